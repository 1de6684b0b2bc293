"""Sinusoidal position embeddings: tables, and adding them in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rope_cpu.spec import whole_number


def sinusoidal(
    num_positions: int,
    dim: int,
    *,
    base: float = 10000.0,
    interleaved: bool = True,
    dtype: DTypeLike = np.float32,
) -> NDArray[Any]:
    """Return the sinusoidal table (num_positions, dim): sin and cos of position · base^(-2i/dim).

    interleaved: True puts sin in even and cos in odd columns, False sin in the first half and cos in the second
        (RoFormer, XLM). An odd dim has one sin more.
    dtype: of the table; values are computed in float64 and rounded once.

    Raises TypeError or ValueError naming the argument, its value and the rule.
    Source: Vaswani et al., arXiv:1706.03762; RoFormerSinusoidalPositionalEmbedding in transformers.
    """
    rows, columns = whole_number("num_positions", num_positions, 0), whole_number("dim", dim)
    if not (np.isfinite(base) and base > 0):
        raise ValueError(f"`base` is {base!r}; it must be finite and positive")
    sines = (columns + 1) // 2
    angles = np.arange(rows)[:, None] * float(base) ** (-2.0 * np.arange(sines) / columns)
    where_sin, where_cos = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(sines), slice(sines, None))
    table = np.empty((rows, columns), dtype=dtype)
    table[:, where_sin] = np.sin(angles)
    table[:, where_cos] = np.cos(angles[:, : columns // 2])
    return table
