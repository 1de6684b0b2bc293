"""Common NumPy implementations; 16-bit arrays are computed in float32 and rounded at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rope_cpu.array_types import Array

from ..measurement.timing import Call
from ..workload import Pair, Workload
from .rotation_call import require, rotation_call


def rotate_half(workload: Workload) -> Call:
    """Rotate by x·cos + (x, halves swapped, one negated)·sin, cos and sin of head_dim width."""
    require(workload, pairings=(False,))
    cos, sin = (table[:, :, None] for table in workload.wide_cos_sin())

    def rotate(x: Array) -> Array:
        half = x.shape[-1] // 2
        rotated: Array = x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
        return rotated

    return _pair_call(workload, rotate)


def complex_product(workload: Workload) -> Call:
    """Rotate interleaved pairs by the product of x_a + i·x_b with cos + i·sin."""
    require(workload, pairings=(True,))
    cos, sin = workload.cos_sin()
    factors = (cos + 1j * sin)[:, :, None]

    def rotate(x: Array) -> Array:
        rotated: Array = (x.view(factors.dtype) * factors).view(x.dtype)
        return rotated

    return _pair_call(workload, rotate)


def _pair_call(workload: Workload, rotate: Callable[[Array], Array]) -> Call:
    pairs = workload.bshd_arrays()
    first_q, _ = pairs[0]
    dtype = first_q.dtype
    compute_dtype = workload.compute_dtype

    def rotate_pair(q: Array, k: Array) -> Pair:
        return rotate(q), rotate(k)

    def rotate_wider_pair(q: Array, k: Array) -> Pair:
        q_rot = rotate(q.astype(compute_dtype)).astype(dtype)
        k_rot = rotate(k.astype(compute_dtype)).astype(dtype)
        return q_rot, k_rot

    function = rotate_pair if dtype == compute_dtype else rotate_wider_pair
    return rotation_call(workload, function, pairs, pairs[0])
