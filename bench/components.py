"""Calls for cos and sin of positions, and for plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, table_bound
from rope_cpu.array_types import Array, Float64

from .timing import Call
from .workload import Pair

PAIRS = 64
_ROPE = RotaryEmbedding(2 * PAIRS, rope_theta=5e5)

# Positions whose cos and sin are compared with the reference.
_CHECKED_POSITIONS = 64


@dataclass(frozen=True)
class Positions:
    """Consecutive positions whose cos and sin are computed, on one axis or more."""

    count: int
    axes: int = 1

    @cached_property
    def inv_freq(self) -> Float64:
        """The frequencies, (axes, pairs): each pair rotates with one axis."""
        frequencies: Float64 = _ROPE.inv_freq * (
            np.arange(PAIRS) % self.axes == np.arange(self.axes)[:, None]
        )
        return frequencies

    @cached_property
    def rope(self) -> RotaryEmbedding:
        """The rotary embedding of these frequencies."""
        return RotaryEmbedding.from_inv_freq(self.inv_freq if self.axes > 1 else self.inv_freq[0])

    @cached_property
    def coordinates(self) -> Array:
        """The positions, (count, axes)."""
        return np.arange(self.count)[:, None] + np.arange(self.axes)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the positions and of cos and sin in float32."""
        return self.count * 2 * PAIRS * 4 + self.coordinates.nbytes

    def error(self, tables: Any) -> float:
        """Return the largest error / tolerance of cos and sin: above 1 is wrong."""
        checked = np.linspace(0, self.count - 1, _CHECKED_POSITIONS).astype(int)
        ids = self.coordinates[checked]
        # The float64 angles of the peer are rounded.
        angle_rounding = np.abs(ids @ self.inv_freq)[None, :, None] * 2.0**-53
        exact_tables = reference.cos_sin(self.rope.spec, ids[None])
        fractions = []
        for table, exact in zip(tables, exact_tables, strict=True):
            bound = table_bound(exact.high, 1.0) + angle_rounding
            _, fraction = compare(exact.error(table[checked][None, :, None]), bound)
            fractions.append(fraction)
        return max(fractions)

    def call(self, function: Callable[[Array], Pair]) -> Call:
        """Return the call of a function of the position ids."""
        ids = self.coordinates if self.axes > 1 else self.coordinates[:, 0]
        return Call(function, [(ids,)], self.bytes_accessed, self.error)


def cos_sin(positions: Positions) -> Call:
    """Compute cos and sin in new arrays."""
    return positions.call(positions.rope.cos_sin)


def cos_sin_into(positions: Positions) -> Call:
    """Compute cos and sin in given arrays."""
    shape = (positions.count, PAIRS)
    out = (np.zeros(shape, np.float32), np.zeros(shape, np.float32))
    return positions.call(partial(positions.rope.cos_sin, out=out))


def numpy_cos_sin(positions: Positions) -> Call:
    """Compute cos and sin by NumPy in float64, and cast them."""

    def run(ids: Array) -> Pair:
        angles = ids.reshape(positions.coordinates.shape) @ positions.inv_freq
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    return positions.call(run)


def plan(ids: Array) -> Call:
    """Make a plan."""
    return Call(_ROPE.plan, [(ids,)], plan_bytes(ids))


def plan_bytes(ids: Array) -> int:
    """Return the bytes of position ids, and of their cos and sin in float32."""
    return int(ids.size) * 2 * PAIRS * 4 + ids.nbytes
