"""The frozen description of one rotation: pure float64 data, which kernels and ONNX graphs alike are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import (
    boolean,
    check_length,
    check_shape_size,
    check_table_size,
    choice,
    finite_array,
    real_array,
    real_number,
    whole_number,
    whole_numbers,
)
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

ANGLE_DTYPES = ("float64", "float32")

# Radians per unit of position. Beyond it positions of some thousands would already lose digits, as angles beyond 2^53
# radians do.
LARGEST_FREQUENCY = 2.0**40

# The factor on cos and sin, and that of the inverse, must be normal numbers of float32.
LARGEST_FACTOR = 2.0**126


class LengthRule(Protocol):
    """Frequencies that depend on the sequence length (rope types dynamic and longrope).

    An implementation is immutable, hashable, compares by value and can be pickled.
    """

    @property
    def original_length(self) -> int:
        """How many tokens the model was trained for: up to there, frequencies are the original ones."""
        ...

    def at_length(self, length: int) -> tuple[Float64, float]:
        """Return inv_freq (pairs,), as for one axis, and the attention factor for `length` tokens."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class RopeSpec:
    """One rotation: which elements pair, and by what angle per unit of position each pair rotates.

    Its arrays are read-only copies of those given. It fits itself: kernels rely on that, also after `replace`.

    inv_freq: float64 (rows, axes, heads, pairs), radians per unit of position. rows is 1, or the batch size where every
        sequence has a length of its own; heads is 1 unless heads have frequencies of their own.
    attention_factor: float64 (rows,), the factor on cos and sin.
    blocks: widths, in elements, of the contiguous blocks that pairs are formed in; their sum is rotary_dim.
    pair_axis: the axis that each pair rotates with, (pairs,); follows from inv_freq where it is not given. None where
        axes mix, or differ by head.
    direction: -1 where the model rotates backwards; inv_freq holds the sign already.
    shared_id: several axes take one plain id for all of them (M-RoPE on text).
    length_rule: where it is set, the frequencies depend on the sequence length; lengths then says for which they are.
        Its frequencies are those of one axis: direction and pair_axis are applied to them.

    Raises TypeError or ValueError where shapes, widths or values do not fit, naming field, value and rule.
    """

    inv_freq: Float64
    attention_factor: Float64
    head_dim: int
    blocks: tuple[int, ...]
    interleaved: bool = False
    rope_type: str = "default"
    angle_dtype: str = "float64"
    pair_axis: tuple[int, ...] | None = None
    direction: int = 1
    shared_id: bool = False
    length_rule: LengthRule | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        inv_freq = _checked_frequencies(self.inv_freq)
        rows, rotary_dim = len(inv_freq), 2 * inv_freq.shape[-1]
        lengths = (
            None
            if self.lengths is None
            else whole_numbers("lengths", self.lengths, longest=limits.LENGTHS)
        )
        checked = {
            "inv_freq": _frozen(inv_freq),
            "attention_factor": _frozen(_factors(self.attention_factor, rows)),
            "head_dim": whole_number("head_dim", self.head_dim, 1, limits.HEAD_DIM),
            "blocks": _widths(self.blocks, rotary_dim),
            "interleaved": boolean("interleaved", self.interleaved),
            "angle_dtype": choice("angle_dtype", self.angle_dtype, ANGLE_DTYPES),
            "shared_id": boolean("shared_id", self.shared_id),
            "pair_axis": _pair_axis(self.pair_axis, inv_freq[0]),
            "lengths": lengths,
        }
        if lengths is not None and len(lengths) != rows:
            rule = f"there must be one for each of {rows} rows of `inv_freq`"
            raise ValueError(f"`lengths` is {shown(self.lengths)}; {rule}")
        if checked["head_dim"] < rotary_dim:
            raise ValueError(
                f"`head_dim` is {self.head_dim}, but `inv_freq` rotates {rotary_dim} elements (2 a pair)"
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> int:
        """Number of position coordinates."""
        return int(self.inv_freq.shape[1])

    @property
    def pairs(self) -> int:
        """Number of rotated pairs in a head vector."""
        return int(self.inv_freq.shape[3])

    @property
    def rotary_dim(self) -> int:
        """Number of rotated elements in a head vector."""
        return 2 * self.pairs

    @property
    def needs_length(self) -> bool:
        """Whether `at_length` must be called before anything is rotated."""
        return self.length_rule is not None and self.lengths is None

    def check_length(self) -> None:
        """Raise where frequencies depend on a sequence length that is not given."""
        if self.needs_length:
            raise ValueError(
                f"rope type {self.rope_type!r} depends on the sequence length; call `at_length(seq_len)` first and "
                "rotate queries and keys with what it returns"
            )

    def pair_elements(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the elements of a head vector that are first and second in their pair, (pairs,) each.

        For references: kernels and graphs know pairs by strides, slices and reshapes of their own.
        """
        elements = np.arange(self.rotary_dim)
        if self.interleaved:
            return elements[0::2], elements[1::2]
        blocks = np.split(elements, np.cumsum(self.blocks)[:-1])
        first, second = np.concatenate([block.reshape(2, -1) for block in blocks], axis=1)
        return first, second

    def at_length(self, lengths: Sequence[int]) -> RopeSpec:
        """Return the spec for one length of all sequences, or for one length per batch row; itself without a rule.

        lengths: tokens, at least 1, which `RotaryEmbedding.at_length` checks.

        Raises ValueError where frequencies for a length are not finite, not above 0 or too large, and where its
        attention factor is out of range.
        """
        if self.length_rule is None:
            return self
        check_length("lengths", lengths, limits.LENGTHS)
        sizes = len(lengths), self.axes, self.pairs
        check_table_size("len(lengths)", len(lengths), *sizes, most=limits.FREQUENCIES)
        rows = [self.length_rule.at_length(length) for length in lengths]
        one_axis = np.stack([self.direction * inv_freq for inv_freq, _ in rows])
        return replace(
            self,
            inv_freq=on_axes(one_axis, self.pair_axis or (), self.axes)[:, :, None],
            attention_factor=np.array([factor for _, factor in rows]),
            lengths=tuple(lengths),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # pickle and deepcopy hand out arrays that can be written to

    def _key(self) -> tuple[Any, ...]:
        arrays = (self.inv_freq, self.attention_factor)
        return (
            *((array.shape, array.tobytes()) for array in arrays),
            *(self.head_dim, self.blocks, self.interleaved, self.rope_type, self.angle_dtype),
            *(self.pair_axis, self.shared_id, self.length_rule, self.lengths),
        )

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, RopeSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def from_inv_freq(
    inv_freq: ArrayLike,
    *,
    head_dim: int | None = None,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    blocks: int | Sequence[int] = 1,
    **described: Any,
) -> RopeSpec:
    """Check a frequency matrix and describe the rotation by it; every other builder ends here.

    described: further fields of RopeSpec (rope_type, angle_dtype, shared_id, length_rule); the other arguments are
        those of `RotaryEmbedding.from_inv_freq`.
    """
    interleaved, frequencies = boolean("interleaved", interleaved), _frequencies(inv_freq)
    rotary_dim = 2 * frequencies.shape[-1]
    of_each = isinstance(blocks, Sequence) or (isinstance(blocks, np.ndarray) and blocks.ndim > 0)
    widths = _widths(blocks if of_each else _equal(blocks, rotary_dim), rotary_dim)
    return RopeSpec(
        inv_freq=frequencies[None],
        attention_factor=np.array([checked_factor(attention_factor)]),
        head_dim=rotary_dim if head_dim is None else head_dim,
        # Adjacent pairs never cross a boundary between even blocks, so blocks make no difference to them.
        blocks=(rotary_dim,) if interleaved else widths,
        interleaved=interleaved,
        **described,
    )


def checked_factor(attention_factor: object) -> float:
    """Return an attention factor as a float; raise unless it is one."""
    factor = real_number("attention_factor", attention_factor)
    if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
        raise ValueError(f"`attention_factor` is {factor}; it must be from 2^-126 to 2^126")
    return factor


def on_axes(inv_freq: Float64, pair_axis: Sequence[int], axes: int) -> Float64:
    """Return frequencies (…, pairs) as (…, axes, pairs): each pair's stands on its axis, and is 0 on the others."""
    return np.where(np.asarray(pair_axis) == np.arange(axes)[:, None], inv_freq[..., None, :], 0.0)


def backwards(spec: RopeSpec) -> RopeSpec:
    """Return the spec that rotates in the other direction, at every length."""
    return replace(spec, inv_freq=-spec.inv_freq, direction=-spec.direction)


def _frequencies(inv_freq: ArrayLike) -> Float64:
    """Return frequencies as (axes, heads, pairs); their values are checked by the spec."""
    frequencies = real_array("inv_freq", inv_freq)
    if not 1 <= frequencies.ndim <= 3 or 0 in frequencies.shape:
        raise ValueError(
            f"`inv_freq` has shape {frequencies.shape}; it must be (pairs,), (axes, pairs) or (axes, heads, pairs), "
            "none of them 0"
        )
    axes = frequencies.shape[0] if frequencies.ndim > 1 else 1
    heads = frequencies.shape[1] if frequencies.ndim == 3 else 1
    pairs = frequencies.shape[-1]
    _check_shape(frequencies.shape, axes, heads, pairs)
    return frequencies.reshape(axes, heads, pairs)


def _check_shape(shape: tuple[int, ...], axes: int, heads: int, pairs: int) -> None:
    """Raise where frequencies of this shape are for more axes, heads or pairs than there may be."""
    sizes = {
        "axes": (axes, limits.AXES),
        "heads": (heads, limits.HEADS),
        "pairs": (pairs, limits.HEAD_DIM // 2),
    }
    for name, (size, most) in sizes.items():
        if size > most:
            raise ValueError(
                f"`inv_freq` has shape {shape}: {size} {name}; there may be at most {most}"
            )
    check_shape_size("inv_freq", shape, *shape, most=limits.FREQUENCIES)


def _checked_frequencies(inv_freq: ArrayLike) -> Float64:
    """Return the frequencies of a spec; raise unless they are finite and within bounds."""
    given = real_array("inv_freq", inv_freq)
    if given.ndim != 4 or 0 in given.shape:
        shape = given.shape
        raise ValueError(
            f"`inv_freq` has shape {shape}; it must be (rows, axes, heads, pairs), none of them 0"
        )
    _check_shape(given.shape, *given.shape[1:])
    frequencies = given.astype(np.float64)
    size = np.abs(frequencies)
    if not size.max() <= LARGEST_FREQUENCY:  # nor is NaN
        finite_array("inv_freq", frequencies)
        raise ValueError(
            f"`inv_freq` holds {frequencies[size > LARGEST_FREQUENCY][0]}, which is beyond ±2^40 radians per position: "
            "the angle of a large position would lose its precision"
        )
    return frequencies


def _pair_axis(given: Sequence[int] | None, inv_freq: Float64) -> tuple[int, ...] | None:
    """Return the axis of each pair of (axes, heads, pairs), None where there is not one; raise where it is another."""
    axes, heads, pairs = inv_freq.shape
    rotating = (inv_freq != 0).any(axis=1)
    if given is None:
        one_each = axes == 1 or (heads == 1 and (rotating.sum(axis=0) <= 1).all())
        return tuple(rotating.argmax(axis=0).tolist()) if one_each else None
    own = whole_numbers("pair_axis", given, 0)
    if (
        len(own) != pairs
        or max(own) >= axes
        or (rotating & (np.arange(axes)[:, None] != own)).any()
    ):
        rule = f"it must name the one axis that each of {pairs} pairs rotates with"
        raise ValueError(f"`pair_axis` is {shown(given)}; {rule}")
    return own


def _factors(attention_factor: ArrayLike, rows: int) -> Float64:
    """Return the attention factors of a spec; raise unless each row has one."""
    factors = real_array("attention_factor", attention_factor).astype(np.float64)
    if factors.shape != (rows,):
        raise ValueError(
            f"`attention_factor` has shape {factors.shape}; it must be ({rows},), as inv_freq"
        )
    wrong = ~((factors >= 1 / LARGEST_FACTOR) & (factors <= LARGEST_FACTOR))
    if wrong.any():
        checked_factor(factors[wrong][0].item())  # raises
    return factors


def _equal(blocks: object, rotary_dim: int) -> tuple[int, ...]:
    """Return the widths of so many equal blocks."""
    count = whole_number("blocks", blocks)
    if rotary_dim % (2 * count):
        raise ValueError(
            f"`blocks` is {count}, which does not divide {rotary_dim // 2} pairs evenly"
        )
    return (rotary_dim // count,) * count


def _widths(blocks: object, rotary_dim: int) -> tuple[int, ...]:
    """Return the widths of blocks; raise unless pairs can be formed in them."""
    widths = whole_numbers("blocks", blocks, 2)
    if sum(widths) != rotary_dim or any(width % 2 for width in widths):
        raise ValueError(
            f"`blocks` is {shown(blocks)}; widths must be even and add up to rotary_dim {rotary_dim}"
        )
    return widths


def _frozen(array: Float64) -> Float64:
    # A copy of our own that cannot be made writeable again through a base: plans rely on it never changing.
    held = np.asarray(array, dtype=np.float64)
    return np.frombuffer(held.tobytes(), dtype=np.float64).reshape(held.shape)
