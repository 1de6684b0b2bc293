"""Recover positions from a rotation, over the range in which they are unique.

Usage: python examples/position_recovery.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Float64

TOLERANCE = 0.01  # allowed error of an angle, in radians
Bound = float | Sequence[float]  # one number for all axes, or one for each


def unique_range(rope: RotaryEmbedding) -> Float64:
    """Return the range (axes,) of each axis within which no two positions have the same rotation.

    On an axis that shares no pair with another it is 2π / (smallest frequency), one revolution of
    the slowest pair. Axes that share pairs have one common range. 0 means that no pair rotates with
    the axis. Positions further apart usually differ too, but this is not guaranteed.
    """
    inv_freq = _frequency_matrix(rope)
    if rope.spec.pair_axis is not None:
        slowest = np.where(inv_freq != 0, np.abs(inv_freq), np.inf).min(axis=1)
        return np.where(np.isfinite(slowest), 2 * np.pi / slowest, 0.0)
    speeds = np.abs(inv_freq).sum(axis=0)
    order = np.argsort(speeds)[(speeds == 0).sum() :]
    for count in range(rope.axes, len(order) + 1):
        # Enough pairs to solve for the position, none of which revolves within the range.
        slow = order[:count]
        if np.linalg.matrix_rank(inv_freq[:, slow] / speeds[slow]) == rope.axes:
            return np.full(rope.axes, 2 * np.pi / speeds[slow[-1]])
    return np.zeros(rope.axes)


def positions_from_cos_sin(
    cos: NDArray[np.generic],
    sin: NDArray[np.generic],
    rope: RotaryEmbedding,
    low: Bound,
    high: Bound,
) -> Float64:
    """Return the positions between low and high that have this cos and sin.

    cos, sin: (..., pairs), as from `rope.cos_sin`. Returns (..., axes), for one axis (...). The
    accuracy is that of the angles.

    Raises ValueError if high - low is not below `unique_range`, or if no position in the range has
    this cos and sin.
    """
    inv_freq = _frequency_matrix(rope)
    bottom = np.broadcast_to(low, rope.axes).astype(float)
    top = np.broadcast_to(high, rope.axes).astype(float)
    if not (top - bottom < unique_range(rope)).all():
        raise ValueError(
            f"positions from {low} to {high} are not unique; "
            f"the range must be below {unique_range(rope)}"
        )
    angles = np.arctan2(sin.astype(np.float64), cos.astype(np.float64))
    angles = angles.reshape(-1, inv_freq.shape[1])
    positions = _solve(angles, inv_freq, (bottom + top) / 2, (top - bottom) / 2)
    error = np.abs(_wrapped(angles - positions @ inv_freq)).max(initial=0)
    slack = TOLERANCE / np.abs(inv_freq).max(axis=1)
    outside = (positions < bottom - slack).any() or (positions > top + slack).any()
    if error > TOLERANCE or outside:
        raise ValueError(f"`cos` and `sin` are not those of positions from {low} to {high}")
    frequency_dimensions = rope.inv_freq.ndim - (rope.axes > 1)
    leading = cos.shape[: cos.ndim - frequency_dimensions]
    return positions.reshape(leading if rope.axes == 1 else (*leading, rope.axes))


def positions_from_vectors(
    x: NDArray[np.generic],
    rotated: NDArray[np.generic],
    rope: RotaryEmbedding,
    low: Bound,
    high: Bound,
) -> Float64:
    """Return the positions between low and high that rotate x, (..., head_dim), into `rotated`."""
    first, second = rope.spec.pair_elements()
    before = x.astype(np.float64)
    after = rotated.astype(np.float64)
    after_complex = after[..., first] + 1j * after[..., second]
    before_conjugate = before[..., first] - 1j * before[..., second]
    rotation = after_complex * before_conjugate
    return positions_from_cos_sin(rotation.real, rotation.imag, rope, low, high)


def _solve(angles: Float64, inv_freq: Float64, centre: Float64, reach: Float64) -> Float64:
    """Return the positions (n, axes) of angles (n, pairs) modulo 2π, within centre ± reach.

    The slowest pairs do not wrap in this range and are enough for a first estimate. Each faster
    pair is unwrapped with the estimate so far; least squares over all pairs up to it refine it.
    """
    differences = _wrapped(angles - centre @ inv_freq)
    estimate = np.zeros((len(angles), len(centre)))
    order = np.argsort(np.abs(inv_freq).sum(axis=0))
    for count, pair in enumerate(order, 1):
        if np.abs(inv_freq[:, pair]) @ reach >= np.pi:
            expected = estimate @ inv_freq[:, pair]
            differences[:, pair] = expected + _wrapped(differences[:, pair] - expected)
        known = inv_freq[:, order[:count]]
        scale = np.linalg.norm(known, axis=1, keepdims=True)
        # Axes differ in speed by orders of magnitude: a slow axis must not count as undetermined.
        scale[scale == 0] = 1
        estimate = differences[:, order[:count]] @ np.linalg.pinv(known / scale) / scale.T
    return estimate + centre


def _frequency_matrix(rope: RotaryEmbedding) -> Float64:
    """Return the frequencies of all heads as (axes, pairs)."""
    return rope.spec.inv_freq[0].reshape(rope.axes, -1)


def _wrapped(angle: Float64) -> Float64:
    """Return an angle between -π and π."""
    return angle - 2 * np.pi * np.rint(angle / (2 * np.pi))


def main() -> None:
    """Recover the coordinates of image patches from their rotation."""
    rope = RotaryEmbedding.axial(64, 2)
    print(f"positions are unique up to {unique_range(rope).round(1)} on each axis")
    xy = np.random.default_rng(0).uniform(0, 1000, (5, 2))
    recovered = positions_from_cos_sin(*rope.cos_sin(xy), rope, 0, 1000)
    for original, result in zip(xy, recovered, strict=True):
        print(f"{original.round(4)} came back as {result.round(4)}")


if __name__ == "__main__":
    main()
