"""Frequencies for positions of several coordinates: which pair turns with which axis (axial, M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.frequencies.scaling import said_once, scaled, section_of
from rope_cpu.frequencies.spec import LengthRule, RopeSpec, from_inv_freq
from rope_cpu.validation.scalars import Float64, boolean, one_of, real_number, whole_number, whole_numbers

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
    """Describe a rotation whose axes turn pairs of their own; the arguments are `RotaryEmbedding.axial`'s."""
    head_dim, axes = whole_number("head_dim", head_dim), whole_number("axes", axes)
    span = one_of("span", span, SPANS)
    widths = _axis_dims(head_dim, axes, axis_dims)
    bases = _bases(axes, rope_theta)
    rows = [base_frequencies(base, width) for base, width in zip(bases, widths, strict=True)]
    return from_inv_freq(
        block_diagonal(rows),
        head_dim=head_dim,
        interleaved=interleaved,
        blocks=widths if span == "axis" else 1,
        rope_type="axial",
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
    """Describe M-RoPE; the arguments are `RotaryEmbedding.mrope`'s."""
    head_dim, theta = whole_number("head_dim", head_dim, 2), real_number("rope_theta", rope_theta)
    shares, dealt = _section("mrope_section", mrope_section), boolean("mrope_interleaved", mrope_interleaved)
    section = section_of(scaling)
    said_once("mrope_section", shares, section.pop("mrope_section", None), _section)
    said_once("mrope_interleaved", dealt, section.pop("mrope_interleaved", None), boolean)
    if 2 * sum(shares) > head_dim:
        raise ValueError(f"`mrope_section` is {shares}, {sum(shares)} pairs; head_dim {head_dim} has {head_dim // 2}")
    text = scaled(head_dim, rope_theta=theta, rotary_dim=2 * sum(shares), interleaved=interleaved, scaling=section)
    return spread_spec(text, shares, dealt)


def spread_spec(spec: RopeSpec, mrope_section: Sequence[int], mrope_interleaved: bool) -> RopeSpec:
    """Return a rotation of one axis as M-RoPE, whose axes all take the id of a text token.

    mrope_section, mrope_interleaved: how many pairs each axis owns and which, see `spread`.

    Raises TypeError or ValueError where mrope_section is no split of the pairs.
    """
    shares, dealt = _section("mrope_section", mrope_section), boolean("mrope_interleaved", mrope_interleaved)
    rule = spec.length_rule and SpreadRule(spec.length_rule, shares, dealt)
    described = from_inv_freq(spread(spec.inv_freq[0, 0, 0], shares, dealt))
    return replace(spec, inv_freq=described.inv_freq, shared_id=True, length_rule=rule)


@dataclass(frozen=True)
class SpreadRule:
    """A length rule of one axis, shared out among the axes of M-RoPE."""

    rule: LengthRule
    mrope_section: tuple[int, ...]
    mrope_interleaved: bool

    @property
    def original_length(self) -> int:
        """That of the rule."""
        return self.rule.original_length

    def at_length(self, length: int) -> tuple[Float64, float]:
        """Return inv_freq (axes, pairs) and the attention factor for `length` tokens."""
        inv_freq, factor = self.rule.at_length(length)
        return spread(inv_freq.reshape(-1), self.mrope_section, self.mrope_interleaved), factor


def spread(inv_freq: ArrayLike, mrope_section: Sequence[int], mrope_interleaved: bool = False) -> Float64:
    """Return the frequencies (pairs,) as (axes, pairs) float64: each pair keeps its own, on the axis it belongs to.

    Chunked, the axes own consecutive runs of mrope_section[a] pairs. Interleaved, pair j belongs to axis
    a = j % axes while j < axes * mrope_section[a], and to axis 0 after that.

    Raises TypeError or ValueError where mrope_section is no split of the pairs.
    """
    frequencies = np.asarray(inv_freq, dtype=np.float64)
    section = _section("mrope_section", mrope_section)
    pairs, axes = frequencies.size, len(section)
    if sum(section) != pairs:
        raise ValueError(f"`mrope_section` is {list(section)}, which adds up to {sum(section)}, not to {pairs} pairs")
    if boolean("mrope_interleaved", mrope_interleaved):
        turn = np.arange(pairs) % axes
        owner = np.where(np.arange(pairs) < axes * np.array(section)[turn], turn, 0)
        if tuple(np.bincount(owner, minlength=axes)) != section:
            raise ValueError(f"`mrope_section` is {list(section)}, which cannot be dealt out in turn (interleaved)")
    else:
        owner = np.repeat(np.arange(axes), section)
    return np.where(owner == np.arange(axes)[:, None], frequencies, 0.0)


def base_frequencies(rope_theta: float, width: int, angle_dtype: str = "float64") -> Float64:
    """Return the unscaled frequencies rope_theta^(-2i/width), i < width/2, radians per unit of position, float64.

    angle_dtype: "float32" rounds every step to float32, as transformers does.

    Raises TypeError or ValueError for a width that is odd, a base that is no number above 0, and another dtype.
    """
    theta = real_number("rope_theta", rope_theta)
    frequencies: Float64 = scaled(width, rope_theta=theta, angle_dtype=angle_dtype).inv_freq[0, 0, 0]
    return frequencies


def block_diagonal(rows: Sequence[ArrayLike]) -> Float64:
    """Return F (axes, pairs) float64 in which axis a owns the next len(rows[a]) pairs, and is zero in all others.

    rows: for each axis its frequencies, radians per unit of position.

    Raises ValueError where there are no rows.
    """
    values = [np.asarray(row, dtype=np.float64) for row in rows]
    owner = np.repeat(np.arange(len(values)), [row.size for row in values])
    return np.where(owner == np.arange(len(values))[:, None], np.concatenate(values), 0.0)


def _axis_dims(head_dim: int, axes: int, axis_dims: Sequence[int] | None) -> tuple[int, ...]:
    if axis_dims is None:
        if head_dim % (2 * axes):
            raise ValueError(
                f"`head_dim` is {head_dim}, which {axes} axes cannot share equally in pairs; say how in `axis_dims`"
            )
        return (head_dim // axes,) * axes
    widths = whole_numbers("axis_dims", axis_dims, 2)
    if len(widths) != axes:
        raise ValueError(f"`axis_dims` is {widths}, {len(widths)} widths, but `axes` is {axes}")
    if any(width % 2 for width in widths) or sum(widths) > head_dim:
        raise ValueError(f"`axis_dims` is {widths}; widths must be even and add up to head_dim {head_dim} at most")
    return widths


def _bases(axes: int, rope_theta: float | Sequence[float]) -> Sequence[float]:
    several = isinstance(rope_theta, list | tuple) or np.ndim(rope_theta) == 1
    bases: list[Any] = list(rope_theta) if several else [rope_theta] * axes  # type: ignore[arg-type]
    if len(bases) != axes:
        raise ValueError(f"`rope_theta` has {len(bases)} bases, but `axes` is {axes}")
    return bases


def _section(name: str, mrope_section: object) -> tuple[int, ...]:
    section = whole_numbers(name, mrope_section, 0)
    if sum(section) == 0:
        raise ValueError(f"`{name}` is {mrope_section}; it must name the pairs of each axis")
    return section
