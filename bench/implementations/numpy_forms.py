"""Rotations as they are commonly written in NumPy; 16-bit arrays are computed in float32 and rounded at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..workload import DTYPES, Workload
from .base import Array, Binding, Pair


def tables(workload: Workload) -> Pair:
    """Return cos and sin (batch or 1, seq, pairs) in the type that NumPy forms compute in."""
    real = np.float64 if workload.dtype == "float64" else np.float32
    cos, sin = workload.rope.cos_sin(workload.ids, real)
    return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])


def rotate_half(workload: Workload) -> Binding:
    """Bind the form with the halves of x swapped and negated, cos and sin as wide as the head."""
    cos, sin = (np.concatenate([table, table], -1)[:, :, None] for table in tables(workload))

    def rotate(x: Array) -> Array:
        half = x.shape[-1] // 2
        rotated: Array = x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
        return rotated

    return _over(workload, rotate, cos.dtype)


def as_complex(workload: Workload) -> Binding:
    """View adjacent pairs as complex numbers and multiply."""
    cos, sin = tables(workload)
    circle = (cos + 1j * sin)[:, :, None]

    def rotate(x: Array) -> Array:
        rotated: Array = (x.view(circle.dtype) * circle).view(cos.dtype)
        return rotated

    return _over(workload, rotate, cos.dtype)


def _over(workload: Workload, rotate: Any, real: Any) -> Binding:
    dtype, bshd = DTYPES[workload.dtype], workload.bshd
    pairs = [(bshd(q), bshd(k)) for q, k in workload.arrays()]
    if dtype == real:

        def call(q: Array, k: Array) -> Pair:
            return rotate(q), rotate(k)
    else:

        def call(q: Array, k: Array) -> Pair:
            return rotate(q.astype(real)).astype(dtype), rotate(k.astype(real)).astype(dtype)

    return Binding(call, list(pairs), pairs[0])
