"""Rotations as they are commonly written in NumPy; 16-bit arrays are computed in float32 and rounded at the end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rope_cpu.array_types import Array

from ..workload import Pair, Workload
from .base import Binding


def rotate_half(workload: Workload) -> Binding:
    """Bind the formula with the halves of x swapped and negated, cos and sin as wide as the head."""
    cos, sin = (table[:, :, None] for table in workload.wide_cos_sin())

    def rotate(x: Array) -> Array:
        half = x.shape[-1] // 2
        rotated: Array = x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
        return rotated

    return _bind(workload, rotate)


def as_complex(workload: Workload) -> Binding:
    """Bind the product of adjacent pairs, seen as complex numbers, with cos + i·sin."""
    cos, sin = workload.cos_sin()
    circle = (cos + 1j * sin)[:, :, None]

    def rotate(x: Array) -> Array:
        rotated: Array = (x.view(circle.dtype) * circle).view(x.dtype)
        return rotated

    return _bind(workload, rotate)


def _bind(workload: Workload, rotate: Callable[[Array], Array]) -> Binding:
    pairs = workload.bshd_arrays()
    dtype, compute_dtype = pairs[0][0].dtype, workload.compute_dtype

    def call(q: Array, k: Array) -> Pair:
        return rotate(q), rotate(k)

    def call_wider(q: Array, k: Array) -> Pair:
        return rotate(q.astype(compute_dtype)).astype(dtype), rotate(
            k.astype(compute_dtype)
        ).astype(dtype)

    return Binding(call if dtype == compute_dtype else call_wider, list(pairs), pairs[0])
