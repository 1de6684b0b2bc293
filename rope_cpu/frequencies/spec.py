"""`RopeSpec`: the immutable float64 description of a rotation, for kernels and ONNX graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.rope_types import LARGEST_FREQUENCY, ScalingRule

AngleDtype = Literal["float64", "float32"]
ANGLE_DTYPES = get_args(AngleDtype)

# Bound of the factor on cos and sin: the factor and its inverse must be normal float32 numbers.
LARGEST_FACTOR = 2.0**126

# The fields that are no arrays, in which equal specs agree.
_PLAIN = "head_dim blocks interleaved rope_type angle_dtype pair_axis shared_id length_rule lengths"
_plain_fields = attrgetter(*_PLAIN.split())

_LARGEST_SIZES = {"axes": limits.AXES, "heads": limits.HEADS, "pairs": limits.HEAD_DIM // 2}


@dataclass(frozen=True, eq=False, kw_only=True)
class RopeSpec:
    """One rotation: which elements form pairs, and how fast each pair rotates on each axis.

    The arrays are read-only copies of the arguments. Shapes, widths and values are checked on
    construction, also through `dataclasses.replace`, because the kernels rely on them.

    Parameters
    ----------
    inv_freq : ndarray of float64, shape (rows, axes, heads, pairs)
        Frequencies in radians per unit of position. `rows` is 1, or the batch size if every
        sequence has its own length. `heads` is 1 unless heads have their own frequencies.
    attention_factor : ndarray of float64, shape (rows,)
        Factor on cos and sin.
    head_dim : int
        Width of a head vector in elements.
    blocks : tuple of int
        Widths, in elements, of the contiguous blocks in which pairs are formed. Their sum is
        `rotary_dim`. A number stands for so many equal blocks.
    interleaved : bool
        True for pairs (2i, 2i+1), False for half-split pairs (i, i+n) within each block.
    rope_type : str
        Name of the scaling type, or of another source of frequencies ("axial", "generators").
    angle_dtype : str
        "float64", or "float32" to repeat the float32 angle arithmetic of transformers.
    pair_axis : tuple of int, shape (pairs,), optional
        Axis of each pair. Derived from `inv_freq` if None, and None in the spec if axes are mixed
        in a pair or differ between heads.
    direction : int
        -1 for a model that rotates backwards. `inv_freq` includes the sign already.
    shared_id : bool
        True if one position id may stand for the ids on all axes (M-RoPE on text).
    length_rule : ScalingRule, optional
        The rule if the frequencies depend on the sequence length. It yields the frequencies of
        one axis, to which `direction` and `pair_axis` are applied.
    lengths : tuple of int, shape (rows,), optional
        Sequence lengths, in tokens, for which a length rule was evaluated.

    Raises
    ------
    TypeError, ValueError
        If a shape, width or value is not allowed. The text names the field, its value and the
        rule.

    Examples
    --------
    >>> from rope_cpu.frequencies.spec import from_inv_freq
    >>> spec = from_inv_freq([1.0, 0.5], head_dim=6)
    >>> spec.axes, spec.pairs, spec.rotary_dim, spec.head_dim
    (1, 2, 4, 6)
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
    length_rule: ScalingRule | None = None
    lengths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        inv_freq = _checked_frequencies(self.inv_freq)
        rows = len(inv_freq)
        rotary_dim = 2 * inv_freq.shape[-1]
        checked: dict[str, Any] = {
            "inv_freq": _read_only(inv_freq),
            "attention_factor": _read_only(_checked_factors(self.attention_factor, rows)),
            "head_dim": scalars.whole_number("head_dim", self.head_dim, 1, limits.HEAD_DIM),
            "blocks": _checked_blocks(self.blocks, rotary_dim),
            "interleaved": scalars.boolean("interleaved", self.interleaved),
            "angle_dtype": scalars.choice("angle_dtype", self.angle_dtype, ANGLE_DTYPES),
            "shared_id": scalars.boolean("shared_id", self.shared_id),
            "pair_axis": _resolved_pair_axis(self.pair_axis, inv_freq[0]),
        }
        if checked["interleaved"]:
            # Adjacent pairs never cross a boundary between even blocks, so blocks do not matter.
            checked["blocks"] = (rotary_dim,)
        if self.lengths is not None:
            checked["lengths"] = _checked_lengths(self.lengths, rows)
        if checked["head_dim"] < rotary_dim:
            rule = f"be at least {rotary_dim}, 2 elements for each pair of `inv_freq`"
            raise ArgumentError("head_dim", self.head_dim, rule)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> int:
        """Number of position coordinates."""
        return int(self.inv_freq.shape[1])

    @property
    def frequency_heads(self) -> int:
        """Number of heads with frequencies of their own."""
        return int(self.inv_freq.shape[2])

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

    @property
    def length_ranges(self) -> str:
        """The frequencies of shorter and longer sequences, for texts; "" without a length rule."""
        return "" if self.length_rule is None else self.length_rule.ranges

    def check_length(self) -> None:
        """Check that the frequencies are those of a known sequence length.

        Raises
        ------
        ValueError
            If the frequencies depend on a sequence length and `at_length` was not called.
        """
        if self.needs_length:
            raise ValueError(
                f"rope type {self.rope_type!r} depends on the sequence length "
                f"({self.length_ranges}); call `at_length(seq_len)` first and rotate queries and "
                "keys with the result"
            )

    def pair_elements(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return the indices of the first and of the second element of each pair.

        For reference implementations. Kernels and graphs address pairs by strides, slices and
        reshapes.

        Returns
        -------
        first, second : ndarray of int, shape (pairs,)
            Indices into a head vector.

        Examples
        --------
        >>> from rope_cpu.frequencies.spec import from_inv_freq
        >>> first, second = from_inv_freq([1.0, 0.5]).pair_elements()
        >>> first.tolist(), second.tolist()
        ([0, 1], [2, 3])
        """
        elements = np.arange(self.rotary_dim)
        if self.interleaved:
            return elements[0::2], elements[1::2]
        blocks = np.split(elements, np.cumsum(self.blocks)[:-1])
        halves = np.concatenate([block.reshape(2, -1) for block in blocks], axis=1)
        return halves[0], halves[1]

    def at_length(self, lengths: Sequence[int]) -> RopeSpec:
        """Return the spec for one length of all sequences, or for one length per batch row.

        Parameters
        ----------
        lengths : sequence of int
            Sequence lengths in tokens, 0 for a sequence without tokens. `RotaryEmbedding.at_length`
            checks them.

        Returns
        -------
        RopeSpec
            A spec with one row per length; `self` without a length rule.

        Raises
        ------
        ValueError
            If the frequencies for a length are not finite, not above 0 or too large, or if its
            attention factor is out of range.

        Examples
        --------
        >>> from rope_cpu.frequencies.scaling import scaled
        >>> section = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 1024}
        >>> spec = scaled(8, scaling=section)
        >>> spec.needs_length, spec.at_length([1024, 4096]).inv_freq.shape
        (True, (2, 1, 1, 4))
        """
        if self.length_rule is None:
            return self
        sizes = (len(lengths), self.axes, self.pairs)
        scalars.check_table_size("len(lengths)", len(lengths), *sizes, most=limits.FREQUENCIES)
        rows = [self.length_rule.frequencies(length) for length in lengths]
        one_axis = np.stack([self.direction * inv_freq for inv_freq, _ in rows])
        inv_freq = spread_over_axes(one_axis, self.pair_axis or (), self.axes)
        return replace(
            self,
            inv_freq=inv_freq[:, :, None],
            attention_factor=np.array([factor for _, factor in rows]),
            lengths=tuple(lengths),
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # pickle and deepcopy create writable arrays

    def _key(self) -> tuple[Any, ...]:
        """Return a hashable value that is equal for equal specs; `inv_freq` has the direction."""
        arrays = (self.inv_freq.shape, self.inv_freq.tobytes(), self.attention_factor.tobytes())
        return (*arrays, *_plain_fields(self))

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, RopeSpec) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def from_inv_freq(
    inv_freq: ArrayLike,
    head_dim: int | None = None,
    attention_factor: float = 1.0,
    interleaved: bool = False,
    blocks: Any = 1,
    **fields: Any,
) -> RopeSpec:
    """Describe the rotation of `RotaryEmbedding.from_inv_freq`; every other builder ends here.

    fields: further fields of `RopeSpec`, such as `rope_type` and `length_rule`.
    """
    frequencies = _frequency_matrix(inv_freq)
    rotary_dim = 2 * frequencies.shape[-1]
    return RopeSpec(
        inv_freq=frequencies[None],
        attention_factor=np.array([scalars.real_number("attention_factor", attention_factor)]),
        head_dim=rotary_dim if head_dim is None else head_dim,
        blocks=blocks,
        interleaved=interleaved,
        **fields,
    )


def spread_over_axes(inv_freq: Float64, pair_axis: Sequence[int], axes: int) -> Float64:
    """Return frequencies (…, pairs) as (…, axes, pairs), zero except on the axis of each pair."""
    on_axis = np.asarray(pair_axis) == np.arange(axes)[:, None]
    return np.where(on_axis, inv_freq[..., None, :], 0.0)


def with_still_pairs(spec: RopeSpec, inv_freq: Float64, **fields: Any) -> RopeSpec:
    """Return a spec with frequencies besides its own that are 0, for elements that do not turn.

    fields: further fields that change. Raises ValueError if an attention factor would multiply
    these elements, too, or if the frequencies depend on the sequence length.
    """
    if spec.length_rule is not None or (spec.attention_factor != 1).any():
        raise ValueError(
            f"rope type {spec.rope_type!r} has an attention factor, or frequencies by length: it "
            "cannot rotate a part of the heads or elements here; rotate that part alone, by a "
            "RotaryEmbedding from numbers"
        )
    return replace(spec, inv_freq=inv_freq, **fields)


def placed(spec: RopeSpec, elements: str) -> RopeSpec:
    """Return a rotation of the first elements of a head; if `elements` is "end", of the last."""
    others = spec.head_dim - spec.rotary_dim
    if elements != "end" or others == 0:
        return spec
    still = others // 2
    return with_still_pairs(
        spec,
        np.pad(spec.inv_freq, [(0, 0)] * 3 + [(still, 0)]),
        pair_axis=(0,) * still + (spec.pair_axis or ()),
        blocks=(others, spec.rotary_dim),
    )


def reverse_direction(spec: RopeSpec) -> RopeSpec:
    """Return the spec that rotates in the other direction, at every length."""
    return replace(spec, inv_freq=-spec.inv_freq, direction=-spec.direction)


def _frequency_matrix(inv_freq: ArrayLike) -> Float64:
    """Return frequencies as (axes, heads, pairs); the spec checks their values."""
    frequencies = scalars.real_array("inv_freq", inv_freq)
    shape = frequencies.shape
    if not 1 <= frequencies.ndim <= 3 or 0 in shape:
        rule = "be (pairs,), (axes, pairs) or (axes, heads, pairs), none of them 0"
        raise ArgumentError("inv_freq", Finding.shape_of(frequencies), rule)
    axes = shape[0] if frequencies.ndim > 1 else 1
    heads = shape[1] if frequencies.ndim == 3 else 1
    pairs = shape[-1]
    return frequencies.reshape(axes, heads, pairs)


def _checked_frequencies(inv_freq: ArrayLike) -> Float64:
    """Return the frequencies of a spec as float64; raise if a shape or value is not allowed."""
    array = scalars.real_array("inv_freq", inv_freq)
    if array.ndim != 4 or 0 in array.shape:
        rule = "be (rows, axes, heads, pairs), none of them 0"
        raise ArgumentError("inv_freq", Finding.shape_of(array), rule)
    for (name, most), size in zip(_LARGEST_SIZES.items(), array.shape[1:], strict=True):
        if size > most:
            raise ArgumentError("inv_freq", Finding(f"has {size} {name}"), f"have at most {most}")
    scalars.check_table_size("inv_freq", array, array.size, most=limits.FREQUENCIES)
    frequencies = scalars.finite_array("inv_freq", array)
    largest = np.abs(frequencies).max()
    if largest > LARGEST_FREQUENCY:
        rule = "be within ±2^40 radians per position, for the precision of large positions"
        raise ArgumentError("inv_freq", Finding(f"reaches {largest}"), rule)
    return frequencies


def _resolved_pair_axis(
    pair_axis: Sequence[int] | None, inv_freq: Float64
) -> tuple[int, ...] | None:
    """Return the axis of each pair for frequencies (axes, heads, pairs).

    None if `pair_axis` is None and pairs rotate with several axes, or with different axes in
    different heads.
    """
    axes, heads, pairs = inv_freq.shape
    rotating = (inv_freq != 0).any(axis=1)  # (axes, pairs)
    if pair_axis is None:
        one_axis_per_pair = axes == 1 or (heads == 1 and (rotating.sum(axis=0) <= 1).all())
        return tuple(rotating.argmax(axis=0).tolist()) if one_axis_per_pair else None
    owners = scalars.whole_numbers("pair_axis", pair_axis, 0)
    is_split = len(owners) == pairs and max(owners) < axes
    if not is_split or (rotating & (np.arange(axes)[:, None] != owners)).any():
        rule = f"name the one axis that each of {pairs} pairs rotates with"
        raise ArgumentError("pair_axis", pair_axis, rule)
    return owners


def _checked_lengths(lengths: Sequence[int], rows: int) -> tuple[int, ...]:
    """Return the sequence lengths of a spec; raise unless there is one for each row."""
    checked = scalars.whole_numbers("lengths", lengths, 0, longest=limits.SEQUENCES)
    if len(checked) != rows:
        rule = f"have one length for each of {rows} rows of `inv_freq`"
        raise ArgumentError("lengths", lengths, rule)
    return checked


def _checked_factors(attention_factor: ArrayLike, rows: int) -> Float64:
    """Return the attention factors of a spec as float64; raise if a row has none or a wrong one."""
    factors = scalars.real_array("attention_factor", attention_factor).astype(np.float64)
    if factors.shape != (rows,):
        rule = f"be ({rows},), one factor per row of `inv_freq`"
        raise ArgumentError("attention_factor", Finding.shape_of(factors), rule)
    wrong = ~((factors >= 1 / LARGEST_FACTOR) & (factors <= LARGEST_FACTOR))
    if wrong.any():
        raise ArgumentError("attention_factor", factors[wrong][0].item(), "be from 2^-126 to 2^126")
    return factors


def _checked_blocks(blocks: object, rotary_dim: int) -> tuple[int, ...]:
    """Return the widths of blocks, from them or their number; raise if no pairs fit in them."""
    if isinstance(blocks, int | np.integer):
        count = scalars.whole_number("blocks", blocks, 1, limits.HEAD_DIM // 2)
        widths = (rotary_dim // count,) * count
    else:
        widths = scalars.whole_numbers("blocks", blocks, 2)
    if sum(widths) != rotary_dim or any(width % 2 for width in widths):
        rule = f"divide rotary_dim {rotary_dim} into even widths"
        raise ArgumentError("blocks", blocks, rule)
    return widths


def _read_only(array: Float64) -> Float64:
    """Return a copy that stays read-only: plans rely on unchanged frequencies."""
    # An array over immutable bytes cannot be made writable again, also not through its base.
    source = np.asarray(array, dtype=np.float64)
    return np.frombuffer(source.tobytes(), dtype=np.float64).reshape(source.shape)
