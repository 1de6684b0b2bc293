"""Frequencies for positions of several coordinates: which pair rotates with which axis (axial, M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import boolean, choice, real_number, whole_number, whole_numbers
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.scaling import resolve_argument, scaled, section_of
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, on_axes

SPANS = ("axis", "head")


def axial(
    head_dim: int,
    axes: int = 2,
    *,
    rope_theta: float | Sequence[float] = 10000.0,
    interleaved: bool = False,
    axis_dims: Sequence[int] | None = None,
    span: str = "axis",
) -> RopeSpec:
    """Return a rotation whose axes rotate pairs of their own; the arguments are `RotaryEmbedding.axial`'s."""
    head_dim = whole_number("head_dim", head_dim, 1, limits.HEAD_DIM)
    axes = whole_number("axes", axes, 1, limits.AXES)
    span = choice("span", span, SPANS)
    widths = _axis_dims(head_dim, axes, axis_dims)
    bases = _bases(axes, rope_theta)
    rows = [base_frequencies(base, width) for base, width in zip(bases, widths, strict=True)]
    return axis_after_axis(
        rows, head_dim=head_dim, interleaved=interleaved, blocks=widths if span == "axis" else 1
    )


def mrope(
    head_dim: int,
    mrope_section: Sequence[int],
    *,
    rope_theta: float,
    mrope_interleaved: bool = False,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Return M-RoPE; the arguments are `RotaryEmbedding.mrope`'s."""
    head_dim = whole_number("head_dim", head_dim, 2, limits.HEAD_DIM)
    theta = real_number("rope_theta", rope_theta)
    shares, interleave = (
        mrope_shares("mrope_section", mrope_section),
        boolean("mrope_interleaved", mrope_interleaved),
    )
    section = section_of(scaling)
    resolve_argument("mrope_section", shares, section.pop("mrope_section", None), mrope_shares)
    resolve_argument(
        "mrope_interleaved", interleave, section.pop("mrope_interleaved", None), boolean
    )
    if 2 * sum(shares) > head_dim:
        pairs = sum(shares)
        raise ValueError(
            f"`mrope_section` is {shown(shares)}, {pairs} pairs; head_dim {head_dim} has {head_dim // 2}"
        )
    text = scaled(
        head_dim,
        rope_theta=theta,
        rotary_dim=2 * sum(shares),
        interleaved=interleaved,
        scaling=section,
    )
    return spread_spec(text, shares, interleave)


def spread_spec(spec: RopeSpec, mrope_section: Sequence[int], mrope_interleaved: bool) -> RopeSpec:
    """Return a rotation of one axis as M-RoPE, whose axes all take the id of a text token.

    mrope_section, mrope_interleaved: how many pairs each axis owns and which, see `mrope_pair_axis`.

    Raises TypeError or ValueError where mrope_section is no split of the pairs.
    """
    pair_axis = mrope_pair_axis(spec.pairs, mrope_section, mrope_interleaved)
    inv_freq = on_axes(spec.inv_freq[:, 0], pair_axis, len(mrope_section)).swapaxes(1, 2)
    return replace(spec, inv_freq=inv_freq, pair_axis=pair_axis, shared_id=True)


def mrope_pair_axis(
    pairs: int, mrope_section: Sequence[int], mrope_interleaved: bool = False
) -> tuple[int, ...]:
    """Return the axis of each pair in M-RoPE.

    Chunked, the axes own consecutive runs of mrope_section[a] pairs. Interleaved, pair j belongs to axis
    a = j % axes while j < axes * mrope_section[a], and to axis 0 after that.

    Raises TypeError or ValueError where mrope_section is no split of the pairs.
    """
    section = mrope_shares("mrope_section", mrope_section)
    axes = len(section)
    if sum(section) != pairs:
        given = shown(list(section))
        raise ValueError(
            f"`mrope_section` is {given}, which adds up to {sum(section)}, not to {pairs} pairs"
        )
    if not boolean("mrope_interleaved", mrope_interleaved):
        return tuple(np.repeat(np.arange(axes), section).tolist())
    axis = np.arange(pairs) % axes
    pair_axis = np.where(np.arange(pairs) < axes * np.array(section)[axis], axis, 0)
    if tuple(np.bincount(pair_axis, minlength=axes)) != section:
        given = shown(list(section))
        raise ValueError(
            f"`mrope_section` is {given}, whose axes cannot take pairs by turns (interleaved)"
        )
    return tuple(pair_axis.tolist())


def mrope_shares(name: str, mrope_section: object) -> tuple[int, ...]:
    """Return the pairs of each axis of M-RoPE as a tuple; raise unless they are whole numbers, one above 0."""
    section = whole_numbers(name, mrope_section, 0, most=limits.HEAD_DIM, longest=limits.AXES)
    if sum(section) == 0:
        raise ValueError(f"`{name}` is {shown(mrope_section)}; it must name the pairs of each axis")
    return section


def base_frequencies(rope_theta: float, width: int, angle_dtype: str = "float64") -> Float64:
    """Return the unscaled frequencies rope_theta^(-2i/width), i < width/2, radians per unit of position, float64.

    angle_dtype: "float32" rounds every step to float32, as transformers does.

    Raises TypeError or ValueError for a width that is odd, a base that is no number above 0, and another dtype.
    """
    theta = real_number("rope_theta", rope_theta)
    frequencies: Float64 = scaled(width, rope_theta=theta, angle_dtype=angle_dtype).inv_freq[
        0, 0, 0
    ]
    return frequencies


def axis_after_axis(rows: Sequence[Float64], **described: Any) -> RopeSpec:
    """Return a rotation in which axis a owns the next len(rows[a]) pairs, with these frequencies.

    described: the further arguments of `from_inv_freq`.
    """
    pair_axis = np.repeat(np.arange(len(rows)), [row.size for row in rows]).tolist()
    inv_freq = on_axes(np.concatenate(rows), pair_axis, len(rows))
    return from_inv_freq(inv_freq, pair_axis=tuple(pair_axis), rope_type="axial", **described)


def _axis_dims(head_dim: int, axes: int, axis_dims: Sequence[int] | None) -> tuple[int, ...]:
    if axis_dims is None:
        if head_dim % (2 * axes):
            raise ValueError(
                f"`head_dim` is {head_dim}, which {axes} axes cannot share equally in pairs; give `axis_dims`"
            )
        return (head_dim // axes,) * axes
    widths = whole_numbers("axis_dims", axis_dims, 2, longest=limits.AXES)
    if len(widths) != axes:
        raise ValueError(
            f"`axis_dims` is {shown(widths)}, {len(widths)} widths, but `axes` is {axes}"
        )
    if any(width % 2 for width in widths) or sum(widths) > head_dim:
        rule = f"widths must be even and add up to head_dim {head_dim} at most"
        raise ValueError(f"`axis_dims` is {shown(widths)}; {rule}")
    return widths


def _bases(axes: int, rope_theta: float | Sequence[float]) -> Sequence[float]:
    several = isinstance(rope_theta, list | tuple) or (
        isinstance(rope_theta, np.ndarray) and rope_theta.ndim == 1
    )
    bases: Any = rope_theta if several else [rope_theta] * axes
    if len(bases) != axes:
        raise ValueError(f"`rope_theta` has {len(bases)} bases, but `axes` is {axes}")
    return list(bases)
