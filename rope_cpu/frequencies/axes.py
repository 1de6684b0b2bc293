"""Frequencies for positions with several coordinates: which pair rotates with which axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.scaling import resolve_argument, scaled, scaling_section
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes

Span = Literal["axis", "head"]
SPANS = get_args(Span)


def axial(
    head_dim: int,
    axes: int = 2,
    rope_theta: float | Sequence[float] = 10000.0,
    interleaved: bool = False,
    axis_dims: Sequence[int] | None = None,
    span: str = "axis",
) -> RopeSpec:
    """Describe the rotation of `RotaryEmbedding.axial`: every axis rotates its own pairs."""
    head_dim = scalars.whole_number("head_dim", head_dim, 1, limits.HEAD_DIM)
    axes = scalars.whole_number("axes", axes, 1, limits.AXES)
    span = scalars.choice("span", span, SPANS)
    widths = _axis_widths(head_dim, axes, axis_dims)
    is_row = isinstance(rope_theta, list | tuple) or getattr(rope_theta, "ndim", 0) == 1
    thetas: Any = rope_theta if is_row else [rope_theta] * axes
    if len(thetas) != axes:
        finding = Finding(f"has {len(thetas)} bases")
        raise ArgumentError("rope_theta", finding, f"have one for each of {axes} `axes`")
    frequencies = [
        base_frequencies(theta, width) for theta, width in zip(thetas, widths, strict=True)
    ]
    arrangement = "blocks" if span == "axis" else "runs"
    spec = from_frequencies(frequencies, head_dim, interleaved, arrangement)
    return replace(spec, rope_type="axial")


def from_frequencies(
    frequencies: Sequence[Float64],
    head_dim: int,
    interleaved: bool,
    arrangement: str,
    order: Sequence[int] = (),
    angle_dtype: str = "float64",
) -> RopeSpec:
    """Describe the rotation in which each axis has pairs of its own, from their frequencies.

    arrangement: "runs" if each axis has a run of pairs across the rotated part, "blocks" if pairs
    are formed within the elements of an axis, "turns" if the axes take pairs by turns. order: the
    axis of each run, block or turn; empty: as they come.
    """
    axes = len(frequencies)
    order = order or range(axes)
    if arrangement == "turns":
        pair_axis = np.tile(order, frequencies[0].size).tolist()
        inv_freq = np.stack(frequencies, axis=1).ravel()
    else:
        pair_axis = np.repeat(order, [axis.size for axis in frequencies]).tolist()
        inv_freq = np.concatenate(frequencies)
    return from_inv_freq(
        spread_over_axes(inv_freq, pair_axis, axes),
        head_dim=head_dim,
        interleaved=interleaved,
        blocks=tuple(2 * axis.size for axis in frequencies) if arrangement == "blocks" else 1,
        pair_axis=tuple(pair_axis),
        rope_type="axial" if axes > 1 else "default",
        angle_dtype=angle_dtype,
    )


def mrope(
    head_dim: int,
    mrope_section: Sequence[int],
    rope_theta: float,
    mrope_interleaved: bool = False,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Describe the rotation of `RotaryEmbedding.mrope`, with `shared_id`."""
    head_dim = scalars.whole_number("head_dim", head_dim, 2, limits.HEAD_DIM)
    theta = scalars.real_number("rope_theta", rope_theta)
    axis_pairs = checked_mrope_section("mrope_section", mrope_section)
    is_interleaved = scalars.boolean("mrope_interleaved", mrope_interleaved)
    section = scaling_section(scaling)
    section_pairs = section.pop("mrope_section", None)
    resolve_argument("mrope_section", axis_pairs, section_pairs, checked_mrope_section)
    section_interleaved = section.pop("mrope_interleaved", None)
    resolve_argument("mrope_interleaved", is_interleaved, section_interleaved, scalars.boolean)
    pairs = sum(axis_pairs)
    if 2 * pairs > head_dim:
        rule = f"add up to at most {head_dim // 2}, the pairs of head_dim {head_dim}"
        raise ArgumentError("mrope_section", axis_pairs, rule)
    one_axis = scaled(
        head_dim, rope_theta=theta, rotary_dim=2 * pairs, interleaved=interleaved, scaling=section
    )
    return to_mrope(one_axis, axis_pairs, is_interleaved)


def to_mrope(spec: RopeSpec, mrope_section: Sequence[int], mrope_interleaved: bool) -> RopeSpec:
    """Distribute the pairs of a rotation with one axis among several axes, as M-RoPE does.

    Raises TypeError or ValueError if `mrope_section` does not split the pairs.
    """
    pair_axis = mrope_pair_axis(mrope_section, mrope_interleaved)
    return with_pair_axis(spec, pair_axis, len(mrope_section))


def with_pair_axis(spec: RopeSpec, pair_axis: tuple[int, ...], axes: int) -> RopeSpec:
    """Give each pair of a rotation with one axis to the axis that `pair_axis` has for it.

    Raises ValueError if `pair_axis`, made from the section of a config, has another length.
    """
    if len(pair_axis) != spec.pairs:
        finding = Finding(f"adds up to {len(pair_axis)}")
        raise ArgumentError("mrope_section", finding, f"add up to {spec.pairs} pairs")
    inv_freq = spread_over_axes(spec.inv_freq[:, 0], pair_axis, axes)
    return replace(spec, inv_freq=inv_freq.swapaxes(1, 2), pair_axis=pair_axis, shared_id=True)


def mrope_pair_axis(mrope_section: Sequence[int], mrope_interleaved: bool) -> tuple[int, ...]:
    """Return the axis of each pair in M-RoPE.

    Chunked: the axes own consecutive runs of mrope_section[a] pairs. Interleaved: pair j belongs to
    axis a = j % axes for j < axes · mrope_section[a], and to axis 0 for larger j.

    Raises TypeError or ValueError if axes in turn cannot have these numbers of pairs.
    """
    section = checked_mrope_section("mrope_section", mrope_section)
    axes = len(section)
    pairs = sum(section)
    if not scalars.boolean("mrope_interleaved", mrope_interleaved):
        return tuple(np.repeat(np.arange(axes), section).tolist())
    pair_axis = interleaved_pair_axis(section, pairs)
    if tuple(np.bincount(pair_axis, minlength=axes)) != section:
        turns = [len(range(axis, pairs, axes)) for axis in range(1, axes)]
        rule = f"have at most {shown(turns)} pairs for the axes after the first"
        remedy = "interleaved axes take pairs in turn, and the first takes the rest"
        raise ArgumentError("mrope_section", list(section), rule, remedy)
    return pair_axis


def interleaved_pair_axis(mrope_section: Sequence[int], pairs: int) -> tuple[int, ...]:
    """Return the axis of each of so many pairs, which the axes take in turn.

    An axis takes as many pairs as the section has for it, or as there are; the first has the rest.
    """
    axes = len(mrope_section)
    turn = np.arange(pairs) % axes
    is_taken = np.arange(pairs) < axes * np.array(mrope_section)[turn]
    return tuple(np.where(is_taken, turn, 0).tolist())


def round_robin_pair_axis(mrope_section: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each pair in the M-RoPE that configs call `mrope_interleaved_glm`.

    Pair j belongs to axis j % axes, or to the next axis in turn that has pairs left.

    References
    ----------
    `_build_axis_map` of `MRotaryEmbedding` in SGLang (rotary_embedding/mrope.py).

    Examples
    --------
    >>> round_robin_pair_axis((1, 3, 2))
    (0, 1, 2, 1, 1, 2)
    """
    section = checked_mrope_section("mrope_section", mrope_section)
    axes = len(section)
    left = list(section)
    pair_axis = []
    for pair in range(sum(section)):
        turns = [(pair + skipped) % axes for skipped in range(axes)]
        axis = next(turn for turn in turns if left[turn])
        left[axis] -= 1
        pair_axis.append(axis)
    return tuple(pair_axis)


def time_last_pair_axis(mrope_section: Sequence[int]) -> tuple[int, ...]:
    """Return the axis of each pair where time has the slowest pairs: `video_rope`, Ernie-4.5-VL.

    The axes are time, row and column. Row and column alternate in the pairs before those of time.

    Raises TypeError or ValueError unless the section has three axes, with as many rows as columns.

    References
    ----------
    `BailingMRotaryEmbedding` in vLLM and SGLang (rotary_embedding/bailing_mrope.py);
    modeling_ernie4_5_vl_moe in transformers.

    Examples
    --------
    >>> time_last_pair_axis((1, 2, 2))
    (1, 2, 1, 2, 0)
    """
    section = checked_mrope_section("mrope_section", mrope_section)
    if len(section) != 3 or section[1] != section[2]:
        rule = "have three numbers, of time, row and column, with as many rows as columns"
        raise ArgumentError("mrope_section", list(section), rule)
    return (1, 2) * section[1] + (0,) * section[0]


def checked_mrope_section(name: str, mrope_section: object) -> tuple[int, ...]:
    """Return the number of pairs of each axis; raise unless they are whole numbers, not all 0."""
    section = scalars.whole_numbers(
        name, mrope_section, 0, most=limits.HEAD_DIM, longest=limits.AXES
    )
    if sum(section) == 0:
        raise ArgumentError(name, mrope_section, "name the pairs of each axis")
    return section


def base_frequencies(rope_theta: float, width: int, angle_dtype: str = "float64") -> Float64:
    """Return the unscaled frequencies rope_theta^(−2i/width), in radians per unit of position.

    angle_dtype: "float32" rounds every step to float32, as transformers does.

    Returns float64, (width / 2,). Raises TypeError or ValueError for an odd width, a base that is
    not a number above 0, and another dtype.
    """
    theta = scalars.real_number("rope_theta", rope_theta)
    spec = scaled(width, rope_theta=theta, angle_dtype=angle_dtype)
    frequencies: Float64 = spec.inv_freq[0, 0, 0]
    return frequencies


def _axis_widths(head_dim: int, axes: int, axis_dims: Sequence[int] | None) -> tuple[int, ...]:
    """Return the width of each axis in elements: `axis_dims`, or equal shares of the head."""
    if axis_dims is None:
        if head_dim % (2 * axes):
            rule = f"divide into pairs for {axes} axes equally"
            raise ArgumentError("head_dim", head_dim, rule, "give `axis_dims`")
        return (head_dim // axes,) * axes
    widths = scalars.whole_numbers("axis_dims", axis_dims, 2, longest=limits.AXES)
    if len(widths) != axes or any(width % 2 for width in widths) or sum(widths) > head_dim:
        rule = f"hold an even width for each of {axes} `axes`, at most head_dim {head_dim} in all"
        raise ArgumentError("axis_dims", widths, rule)
    return widths
