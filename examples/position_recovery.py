"""Which position a rotation came from, and over which range that is decided: python examples/position_recovery.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Float64

TOLERANCE = 0.01  # radians by which an angle may miss that of its position
Bound = float | Sequence[float]  # for all axes, or for each


def unique_range(rope: RotaryEmbedding) -> Float64:
    """Return how far apart (axes,) two positions may be on each axis and still never share a rotation.

    It is 2π / (smallest frequency) on axes that share no pair with another, which is one revolution of the slowest
    pair; axes that do share pairs get one range for all of them. 0: no pair rotates with that axis. Positions further
    apart may still differ in every practical case, but no revolution counts them any more.
    """
    inv_freq = _matrix(rope)
    if rope.spec.pair_axis is not None:
        slowest = np.where(inv_freq != 0, np.abs(inv_freq), np.inf).min(axis=1)
        return np.where(np.isfinite(slowest), 2 * np.pi / slowest, 0.0)
    speeds = np.abs(inv_freq).sum(axis=0)
    order = np.argsort(speeds)[(speeds == 0).sum() :]
    for count in range(rope.axes, len(order) + 1):
        slow = order[
            :count
        ]  # enough pairs to solve for the position, none of which revolves within the range
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
    """Return the positions from low to high on every axis whose cos and sin these are, to the accuracy of the angles.

    cos, sin: (..., pairs) as `rope.cos_sin` gives them. Returns (..., axes), for one axis (...).

    Raises ValueError where high - low is not below `unique_range`, and where no position there has this cos and sin.
    """
    inv_freq, (bottom, top) = (
        _matrix(rope),
        (np.broadcast_to(one, rope.axes).astype(float) for one in (low, high)),
    )
    if not (top - bottom < unique_range(rope)).all():
        raise ValueError(
            f"from {low} to {high} positions are not unique, but within {unique_range(rope)}"
        )
    angles = np.arctan2(sin.astype(np.float64), cos.astype(np.float64)).reshape(
        -1, inv_freq.shape[1]
    )
    found = _solve(angles, inv_freq, (bottom + top) / 2, (top - bottom) / 2)
    off, slack = (
        np.abs(_wrapped(angles - found @ inv_freq)).max(initial=0),
        TOLERANCE / np.abs(inv_freq).max(axis=1),
    )
    if off > TOLERANCE or (found < bottom - slack).any() or (found > top + slack).any():
        raise ValueError(f"`cos` and `sin` are not those of positions from {low} to {high}")
    lead = cos.shape[: cos.ndim - (rope.inv_freq.ndim - (rope.axes > 1))]
    return found.reshape(lead if rope.axes == 1 else (*lead, rope.axes))


def positions_from_vectors(
    x: NDArray[np.generic],
    rotated: NDArray[np.generic],
    rope: RotaryEmbedding,
    low: Bound,
    high: Bound,
) -> Float64:
    """Return the positions that rotate x, (..., head_dim), into rotated; other arguments as above."""
    first, second = rope.spec.pair_elements()
    before, after = x.astype(np.float64), rotated.astype(np.float64)
    rotation = (after[..., first] + 1j * after[..., second]) * (
        before[..., first] - 1j * before[..., second]
    )
    return positions_from_cos_sin(rotation.real, rotation.imag, rope, low, high)


def _solve(angles: Float64, inv_freq: Float64, centre: Float64, reach: Float64) -> Float64:
    """Return the positions (n, axes) of angles (n, pairs) given modulo 2π, within reach of the centre, a unique range.

    The slowest pairs do not wrap in the range, and are enough for a first estimate. Each next one is unwrapped with the
    estimate so far, least squares over all pairs up to it, and makes it finer.
    """
    away, estimate = _wrapped(angles - centre @ inv_freq), np.zeros((len(angles), len(centre)))
    order = np.argsort(np.abs(inv_freq).sum(axis=0))
    for count, pair in enumerate(order, 1):
        if np.abs(inv_freq[:, pair]) @ reach >= np.pi:
            expected = estimate @ inv_freq[:, pair]
            away[:, pair] = expected + _wrapped(away[:, pair] - expected)
        known = inv_freq[:, order[:count]]
        scale = np.linalg.norm(known, axis=1, keepdims=True)
        scale[scale == 0] = (
            1  # axes differ in speed by orders of magnitude: slow ones must not count as undetermined
        )
        estimate = away[:, order[:count]] @ np.linalg.pinv(known / scale) / scale.T
    return estimate + centre


def _matrix(rope: RotaryEmbedding) -> Float64:
    """Return the frequencies of all heads as (axes, pairs)."""
    return rope.spec.inv_freq[0].reshape(rope.axes, -1)


def _wrapped(angle: Float64) -> Float64:
    return angle - 2 * np.pi * np.rint(angle / (2 * np.pi))


def main() -> None:
    """Recover the coordinates of image patches from their rotation."""
    rope = RotaryEmbedding.axial(64, 2)
    print(f"positions are unique up to {unique_range(rope).round(1)} on each axis")
    xy = np.random.default_rng(0).uniform(0, 1000, (5, 2))
    found = positions_from_cos_sin(*rope.cos_sin(xy), rope, 0, 1000)
    for given, back in zip(xy, found, strict=True):
        print(f"{given.round(4)} came back as {back.round(4)}")


if __name__ == "__main__":
    main()
