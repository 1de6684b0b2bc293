"""The table of sinusoidal position embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rope_cpu.arguments import arrays as check
from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import boolean, not_larger, real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.frequencies.spec import LARGEST_FREQUENCY
from rope_cpu.rotation.embedding import RotaryEmbedding


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
    dtype: float32, float64, float16 or bfloat16; the exact values are rounded once (bfloat16 below 2^-126: to zero).

    Raises TypeError or ValueError naming the argument, its value and the rule.
    Source: Vaswani et al., arXiv:1706.03762; RoFormerSinusoidalPositionalEmbedding in transformers.
    """
    rows = whole_number("num_positions", num_positions, 0)
    columns = whole_number("dim", dim, 1, limits.HEAD_DIM)
    not_larger("`num_positions` is", rows, rows, columns)
    base, wanted = real_number("base", base), check.dtype(dtype)
    adjacent = boolean("interleaved", interleaved)
    sines = (columns + 1) // 2
    exponents = 2.0 * np.arange(sines) / columns
    with np.errstate(over="ignore"):
        fastest = base ** -exponents[-1]
    if fastest > LARGEST_FREQUENCY:
        raise ValueError(
            f"`base` is {shown(base)}; its frequencies must be at most 2^40 radians per position"
        )
    cos, sin = RotaryEmbedding.from_inv_freq(base**-exponents).cos_sin(np.arange(rows), wanted)
    where_sin, where_cos = (
        (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(sines), slice(sines, None))
    )
    table = np.empty((rows, columns), dtype=wanted)
    table[:, where_sin], table[:, where_cos] = sin, cos[:, : columns // 2]
    return table
