"""Rotary embeddings drawn from every constructor, each with the definition that it must have."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from rope_cpu import RotaryEmbedding

EVEN = st.integers(1, 80).map(lambda n: 2 * n)
THETA = st.sampled_from((10000.0, 500000.0, 1e6, 100.0, 1.5)) | st.floats(1.001, 1e8)
FACTOR = st.sampled_from((1.0, 1.0, 0.5, 2.0, 1.1386, 2.0**-126, 2.0**126)) | st.floats(
    2.0**-20, 2.0**20
)


@dataclass(frozen=True)
class Rotary:
    """A constructor of RotaryEmbedding and its arguments.

    lengths: arguments of `at_length`; none means no call. axes, heads: those of the frequencies.
    expected: float64 (axes, heads, pairs). None takes the library's own `inv_freq` for the
    definition, which tests/frequencies compares with the formulas.
    """

    constructor: str
    arguments: dict[str, Any]
    lengths: tuple[int, ...] = ()
    axes: int = 1
    heads: int = 1
    shared_id: bool = False
    expected: Any = field(default=None, repr=False)
    factor: float | None = None

    @cached_property
    def rope(self):
        """The rotary embedding itself."""
        made = self.unsized
        return made.at_length(list(self.lengths)) if self.lengths else made

    @cached_property
    def unsized(self):
        """The rotary embedding before `at_length`."""
        is_plain = self.constructor == "plain"
        make = RotaryEmbedding if is_plain else getattr(RotaryEmbedding, self.constructor)
        made = make(**self.arguments)
        return made[0] if self.constructor == "from_generators" else made

    @property
    def rows(self):
        """Of how many sequences the frequencies differ."""
        differ = len(self.lengths) > 1 and self.unsized.spec.length_rule is not None
        return len(self.lengths) if differ else 1

    @property
    def in_float32(self):
        """Whether angles are computed as transformers does."""
        return self.arguments.get("angle_dtype") == "float32"

    def frequencies(self):
        """Return inv_freq (rows, axes, heads, pairs) and the attention factor of each row."""
        made = [self.unsized.at_length([n]) for n in self.lengths] if self.rows > 1 else [self.rope]
        shape = self.axes, self.heads, -1
        inv_freq = np.stack([rope.inv_freq.reshape(shape) for rope in made])
        if self.expected is not None:
            expected = np.reshape(self.expected, shape)
            np.testing.assert_allclose(inv_freq[0], expected, rtol=1e-14, atol=0)
        if self.factor is not None:
            assert self.rope.attention_factor == self.factor
        return inv_freq, np.array([rope.attention_factor for rope in made])

    def blocks(self):
        """Return the widths of the blocks with half-split pairs, as the arguments say."""
        rope, given = self.rope, self.arguments.get("blocks", 1)
        if self.constructor == "axial" and self.arguments.get("span", "axis") == "axis":
            given = self.arguments.get("axis_dims") or self.arguments["axes"]
        return [rope.rotary_dim // given] * given if isinstance(given, int) else list(given)


def powers(theta, width):
    """Return theta^(-2i/width)."""
    return np.array([theta ** (-2 * i / width) for i in range(width // 2)])


SIZED = ("dynamic", "longrope", "dynamic_powers")
KINDS = (None, None, "linear", "yarn", "llama3", *SIZED)


@st.composite
def plain(draw, kinds=KINDS, fewest_lengths=1):
    """One axis: rope types, partial rotation, float32 angles."""
    rotary_dim = draw(EVEN)
    theta = draw(THETA)
    arguments = _heads(draw, rotary_dim, theta)
    kind = draw(st.sampled_from(kinds))
    scale = draw(st.floats(1.0, 64.0))
    original = draw(st.integers(16, 4096))
    if kind is not None:
        arguments["scaling"] = _scaling(draw, kind, scale, original, rotary_dim // 2)
    if kind in ("dynamic", "dynamic_powers"):
        arguments["max_position_embeddings"] = original
    lengths = ()
    if kind in SIZED:
        length = st.integers(0, 4 * original)
        lengths = tuple(draw(st.lists(length, min_size=fewest_lengths, max_size=3)))
    if kind not in (None, "linear"):
        rotary = Rotary("plain", arguments, lengths, expected=None, factor=None)
        _skip_refused(rotary)
        return rotary
    expected = None
    if "angle_dtype" not in arguments:
        expected = powers(theta, rotary_dim) / (scale if kind == "linear" else 1.0)
    return Rotary("plain", arguments, lengths, expected=expected, factor=1.0)


def _heads(draw, rotary_dim, theta):
    """Draw the arguments besides the rope type."""
    head_dim = rotary_dim + draw(st.sampled_from((0, 0, 0, 1, 2, 16, 40)))
    arguments = {"head_dim": head_dim, "rope_theta": theta, "interleaved": draw(st.booleans())}
    if head_dim > rotary_dim:
        arguments["rotary_dim"] = rotary_dim
    if draw(st.integers(0, 4)) == 0:
        arguments["angle_dtype"] = "float32"
    return arguments


def _scaling(draw, kind, scale, original, pairs):
    """Draw the parameters of a rope type."""
    section = {"rope_type": kind}
    if kind != "dynamic_powers":
        section["factor"] = scale
    if kind in ("yarn", "llama3", "longrope"):
        section["original_max_position_embeddings"] = original
    if kind == "llama3":
        section |= {"low_freq_factor": 1.0, "high_freq_factor": draw(st.floats(1.5, 8.0))}
    if kind == "longrope":
        factors = st.lists(st.floats(1.0, 50.0), min_size=pairs, max_size=pairs)
        section["short_factor"] = draw(factors)
        section["long_factor"] = draw(factors)
    return section


def _skip_refused(rotary):
    """Draw again where the parameters of a rope type do not fit each other."""
    try:
        _ = rotary.rope
    except ValueError:
        reject()


@st.composite
def from_inv_freq(draw):
    """Any frequencies: several axes, several heads, blocks."""
    axes = draw(st.integers(1, 4))
    heads = draw(st.sampled_from((1, 2, 3)))
    pairs = draw(st.integers(1, 80))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    largest = draw(st.sampled_from((1.0, 1.0, 1e-300, 1e-12, 1e4, 2.0**40)))
    inv_freq = random.uniform(-largest, largest, (axes, heads, pairs))
    if draw(st.booleans()):
        inv_freq *= random.integers(0, 2, inv_freq.shape)
    given = inv_freq
    if heads == 1:
        given = inv_freq[0, 0] if axes == 1 else inv_freq[:, 0]
    arguments = {
        "inv_freq": given.tolist(),
        "attention_factor": draw(FACTOR),
        "interleaved": draw(st.booleans()),
    }
    more = draw(st.sampled_from((0, 0, 0, 1, 6, 64)))
    if more:
        arguments["head_dim"] = 2 * pairs + more
    if draw(st.booleans()):
        arguments["blocks"] = draw(_widths(pairs))
    factor = arguments["attention_factor"]
    return Rotary("from_inv_freq", arguments, (), axes, heads, expected=inv_freq, factor=factor)


@st.composite
def _widths(draw, pairs):
    """Draw the widths in elements of one to four blocks."""
    cuts = sorted(draw(st.sets(st.integers(1, pairs - 1), max_size=3))) if pairs > 1 else []
    return [2 * (stop - start) for start, stop in zip([0, *cuts], [*cuts, pairs], strict=True)]


@st.composite
def axial(draw):
    """A block, or a run of pairs, for each axis."""
    axes = draw(st.integers(1, 4))
    widths = draw(st.lists(st.integers(1, 24).map(lambda n: 2 * n), min_size=axes, max_size=axes))
    equal = draw(st.booleans())
    widths = [widths[0]] * axes if equal else widths
    thetas = draw(st.lists(THETA, min_size=axes, max_size=axes))
    arguments = {
        "head_dim": sum(widths) if equal else sum(widths) + draw(st.sampled_from((0, 0, 8))),
        "axes": axes,
        "rope_theta": thetas,
        "interleaved": draw(st.booleans()),
        "span": draw(st.sampled_from(("axis", "head"))),
    }
    if not equal:
        arguments["axis_dims"] = widths
    expected, start = np.zeros((axes, 1, sum(widths) // 2)), 0
    for axis, (theta, width) in enumerate(zip(thetas, widths, strict=True)):
        expected[axis, 0, start : start + width // 2] = powers(theta, width)
        start += width // 2
    return Rotary("axial", arguments, (), axes, expected=expected, factor=1.0)


@st.composite
def mrope(draw):
    """The frequencies of one axis, shared out among several."""
    axes, interleaved = draw(st.integers(1, 4)), draw(st.booleans())
    section = draw(st.lists(st.integers(1, 20), min_size=axes, max_size=axes))
    if interleaved:
        least = draw(st.integers(1, 12))
        section = [least + draw(st.integers(0, 8)), *[least] * (axes - 1)]
    theta, pairs = draw(THETA), sum(section)
    owner = [axis for axis, count in enumerate(section) for _ in range(count)]
    if interleaved:
        owner = [j % axes if j < axes * section[j % axes] else 0 for j in range(pairs)]
    expected = np.zeros((axes, 1, pairs))
    expected[owner, 0, range(pairs)] = powers(theta, 2 * pairs)
    arguments = {
        "head_dim": 2 * pairs + draw(st.sampled_from((0, 0, 10))),
        "mrope_section": section,
        "rope_theta": theta,
        "mrope_interleaved": interleaved,
        "interleaved": draw(st.booleans()),
    }
    return Rotary("mrope", arguments, (), axes, shared_id=True, expected=expected, factor=1.0)


@st.composite
def from_generators(draw):
    """Commuting antisymmetric matrices; frequencies come in an order of the library's."""
    axes, size = draw(st.integers(1, 3)), draw(st.integers(2, 16))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    basis = np.linalg.qr(random.normal(size=(size, size)))[0]
    planes = np.zeros((axes, size, size))
    even = np.arange(0, size - 1, 2)
    planes[:, even + 1, even] = random.uniform(-1, 1, (axes, size // 2))
    matrices = basis @ (planes - planes.transpose(0, 2, 1)) @ basis.T
    matrices = (matrices - matrices.transpose(0, 2, 1)) / 2
    return Rotary("from_generators", {"generators": matrices.tolist()}, (), axes, factor=1.0)


def rotaries():
    """Every constructor."""
    twice = plain() | plain() | from_inv_freq() | from_inv_freq()
    return twice | axial() | mrope() | from_generators()
