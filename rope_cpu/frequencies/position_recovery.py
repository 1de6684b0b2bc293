"""Rotations undone as a code: which positions they tell apart, and which position a rotation came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.validation.scalars import Float64, finite_array, per_axis, real_number, whole_number

Bound = float | Sequence[float]


def unique_range(inv_freq: ArrayLike) -> Float64:
    """Return how far apart (axes,) two positions may be on each axis and still never share a rotation.

    inv_freq: (pairs,), (axes, pairs) or (axes, heads, pairs), radians per unit of position.

    Two real positions that differ by less than this on every axis have different rotations: enough pairs turn less
    than once over it to solve for the position. It is 2π / (smallest frequency) on axes that share no pair with
    another; axes that do get one range for all of them. 0: no pair turns with that axis. Positions further apart may
    still differ in every practical case (see `separation`), but no single turn counts them any more.

    Raises TypeError or ValueError for frequencies that are not finite numbers.
    """
    frequencies = _matrix(inv_freq)
    turning = frequencies != 0
    if (turning.sum(axis=0) <= 1).all():
        slowest = np.where(turning, np.abs(frequencies), np.inf).min(axis=1)
        return np.where(np.isfinite(slowest), 2 * np.pi / slowest, 0.0)
    axes = len(frequencies)
    speeds = np.abs(frequencies).sum(axis=0)
    order = np.argsort(speeds)
    order = order[speeds[order] > 0]
    for count in range(axes, len(order) + 1):
        slow = frequencies[:, order[:count]]
        if np.linalg.matrix_rank(slow / speeds[order[:count]]) == axes:
            return np.full(axes, 2 * np.pi / speeds[order[count - 1]])
    return np.zeros(axes)


def separation(inv_freq: ArrayLike, reach: int) -> float:
    """Return by how much, in radians, whole positions at most `reach` apart on one axis differ at least.

    inv_freq: (pairs,), radians per unit of position. The difference of two positions is that of the pair in which it
    shows most, so it is π at most; it must exceed the error of the angles (1e-7 for float32 cos and sin).

    Raises TypeError or ValueError for more axes, and for a reach below 1.
    """
    frequencies = _matrix(inv_freq)
    if len(frequencies) != 1:
        raise ValueError(f"`inv_freq` has {len(frequencies)} axes; `separation` counts along one")
    least, reach = np.pi, whole_number("reach", reach)
    for start in range(1, reach + 1, 65536):
        apart = np.arange(start, min(start + 65536, reach + 1), dtype=np.float64)
        least = min(least, np.abs(_wrapped(apart[:, None] * frequencies)).max(axis=1).min())
    return float(least)


def positions_from_cos_sin(
    cos: ArrayLike, sin: ArrayLike, inv_freq: ArrayLike, low: Bound, high: Bound, *, tolerance: float = 0.01
) -> Float64:
    """Return the positions in [low, high] whose cos and sin these are, float64, to the accuracy of the angles.

    cos, sin: (..., pairs), any factor common to both (the attention factor); (..., heads, pairs) for frequencies of
        several heads.
    inv_freq: (pairs,), (axes, pairs) or (axes, heads, pairs), radians per unit of position.
    low, high: the range, for all axes or for each; high - low must be below `unique_range(inv_freq)`.
    tolerance: radians by which an angle may miss that of the position; by so much of the fastest pair's turn a position
        may lie outside the range.

    Returns (...) for inv_freq (pairs,), else (..., axes).

    Raises TypeError for what are no real numbers, ValueError where they are not finite, where the range is not unique,
    and where no position in it has these cos and sin.
    """
    frequencies, tolerance = _matrix(inv_freq), real_number("tolerance", tolerance)
    given, across, lead = np.ndim(inv_freq), finite_array("cos", cos), finite_array("sin", sin)
    trailing = np.shape(inv_freq)[min(1, given - 1) :]
    if across.shape != lead.shape or across.shape[across.ndim - len(trailing) :] != trailing:
        raise ValueError(f"`cos` and `sin` have shapes {across.shape} and {lead.shape}; both must end in {trailing}")
    batch = across.shape[: across.ndim - len(trailing)]
    if not ((across != 0) | (lead != 0)).all():
        raise ValueError("`cos` and `sin` are both 0 for some pair, which has no angle")
    angles = np.arctan2(lead, across).reshape(-1, frequencies.shape[1])
    bottom, top = _range(frequencies, low, high)
    found = _solve(angles, frequencies, (bottom + top) / 2)
    off = np.abs(_wrapped(angles - found @ frequencies)).max(initial=0.0)
    slack = tolerance / np.abs(frequencies).max(axis=1)
    if off > tolerance or (found < bottom - slack).any() or (found > top + slack).any():
        raise ValueError(
            f"`cos` and `sin` are not those of a position from {bottom.tolist()} to {top.tolist()}: the nearest misses "
            f"them by {off:.3g} radians, more than `tolerance` {tolerance}, or lies outside"
        )
    return found.reshape(batch if given == 1 else (*batch, len(frequencies)))


def positions_from_vectors(
    x: ArrayLike, rotated: ArrayLike, spec: RopeSpec, low: Bound, high: Bound, *, tolerance: float = 0.01
) -> Float64:
    """Return the positions in [low, high] that turn x into rotated, float64.

    x, rotated: (..., head_dim), a vector before and after `rotate`.
    spec: the rotation, `rope.spec`; the other arguments and the result are those of `positions_from_cos_sin`.

    Raises TypeError or ValueError as `positions_from_cos_sin` does, and where a pair of x is zero and so shows no
    angle.
    """
    if not isinstance(spec, RopeSpec):
        raise TypeError(f"`spec` is a {type(spec).__name__}; it must be a RopeSpec, such as `rope.spec`")
    first, second = spec.pair_elements()
    before, after = finite_array("x", x), finite_array("rotated", rotated)
    if before.shape != after.shape or before.shape[-1:] != (spec.head_dim,):
        raise ValueError(f"`x` and `rotated` have shapes {before.shape}, {after.shape}; must end in {spec.head_dim}")
    if spec.inv_freq.shape[0] != 1 or spec.inv_freq.shape[2] != 1:
        raise ValueError("`spec` has frequencies for several rows or heads; give those of one")
    turn = (after[..., first] + 1j * after[..., second]) * (before[..., first] - 1j * before[..., second])
    inv_freq = spec.inv_freq[0, :, 0]
    return positions_from_cos_sin(
        turn.real, turn.imag, inv_freq if spec.axes > 1 else inv_freq[0], low, high, tolerance=tolerance
    )


def _solve(angles: Float64, frequencies: Float64, centre: Float64) -> Float64:
    """Return the positions (n, axes) of angles (n, pairs) given modulo 2π, in a unique range around centre.

    The slowest pairs do not wrap in the range. Each next one is unwrapped with the estimate so far, least squares over
    all pairs up to it, and makes it finer.
    """
    away = _wrapped(angles - centre @ frequencies)
    gram, right = np.zeros((len(frequencies),) * 2), np.zeros((len(angles), len(frequencies)))
    estimate = np.zeros_like(right)
    for pair in np.argsort(np.abs(frequencies).sum(axis=0)):
        column = frequencies[:, pair]
        expected = estimate @ column
        gram += np.outer(column, column)
        right += (expected + _wrapped(away[:, pair] - expected))[:, None] * column
        estimate = right @ _pseudo_inverse(gram)
    return estimate + centre


def _pseudo_inverse(gram: Float64) -> Float64:
    # Axes differ in speed by orders of magnitude: without scaling, slow ones would count as undetermined.
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0
    inverse: Float64 = np.linalg.pinv(gram / np.outer(scale, scale), rcond=1e-12, hermitian=True)
    inverse /= np.outer(scale, scale)
    return inverse


def _range(frequencies: Float64, low: Bound, high: Bound) -> tuple[Float64, Float64]:
    bottom, top = (per_axis(name, bound, len(frequencies)) for name, bound in (("low", low), ("high", high)))
    unique = unique_range(frequencies)
    if not (bottom <= top).all():
        raise ValueError(f"`low` is {low!r} and `high` is {high!r}; they must be a range")
    if not (top - bottom < unique).all():
        raise ValueError(
            f"`high` - `low` is {(top - bottom).tolist()}, but these frequencies tell positions apart only within "
            f"{unique.tolist()}"
        )
    return bottom, top


def _matrix(inv_freq: ArrayLike) -> Float64:
    given = finite_array("inv_freq", inv_freq)
    if not 1 <= given.ndim <= 3 or given.size == 0:
        raise ValueError(f"`inv_freq` has shape {given.shape}; it must have 1 to 3 axes, none of them 0 long")
    return given.reshape(1 if given.ndim == 1 else len(given), -1)


def _wrapped(angle: Float64) -> Float64:
    return angle - 2 * np.pi * np.rint(angle / (2 * np.pi))
