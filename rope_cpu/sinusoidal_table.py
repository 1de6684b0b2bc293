"""Tables of sinusoidal position embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.arrays import check_dtype
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.array_types import Dtype
from rope_cpu.frequencies.rope_types import LARGEST_FREQUENCY
from rope_cpu.rotation.embedding import RotaryEmbedding


def sinusoidal(
    num_positions: int,
    dim: int,
    *,
    base: float = 10000.0,
    interleaved: bool = True,
    dtype: Dtype = np.float32,
) -> NDArray[Any]:
    """Return the table of sinusoidal position embeddings: sin and cos of position · base^(-2i/dim).

    Parameters
    ----------
    num_positions : int
        Rows of the table: positions 0 to num_positions - 1.
    dim : int
        Columns of the table. An odd dim has one more sine than cosines.
    base : float
        Base of the frequencies, in radians per position.
    interleaved : bool
        True: sin in even and cos in odd columns. False: sin in the first half and cos in the
        second (RoFormer, XLM).
    dtype : dtype
        float32, float64, float16 or bfloat16. Exact values are rounded once; bfloat16 values below
        2^-126 become zero.

    Returns
    -------
    ndarray of `dtype`, shape (num_positions, dim)

    Raises
    ------
    TypeError
        If an argument has the wrong type or `dtype` is not supported.
    ValueError
        If an argument is out of range, or `base` is below 2^-40.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, section 3.5.
    `RoFormerSinusoidalPositionalEmbedding` in transformers.

    Examples
    --------
    >>> import rope_cpu
    >>> rope_cpu.sinusoidal(2, 4, dtype="float64").round(2)
    array([[0.  , 1.  , 0.  , 1.  ],
           [0.84, 0.54, 0.01, 1.  ]])
    """
    rows = scalars.whole_number("num_positions", num_positions, 0)
    columns = scalars.whole_number("dim", dim, 1, limits.HEAD_DIM)
    scalars.check_table_size("num_positions", rows, rows, columns)
    base = scalars.real_number("base", base)
    table_dtype = check_dtype(dtype)
    interleaved = scalars.boolean("interleaved", interleaved)
    sines = (columns + 1) // 2
    exponents = 2.0 * np.arange(sines) / columns
    if base < 1 / LARGEST_FREQUENCY:
        raise ArgumentError("base", base, "be at least 2^-40, for frequencies of at most 2^40")
    rope = RotaryEmbedding.from_inv_freq(base**-exponents)
    cos, sin = rope.cos_sin(np.arange(rows), table_dtype)
    sin_columns = slice(0, None, 2) if interleaved else slice(sines)
    cos_columns = slice(1, None, 2) if interleaved else slice(sines, None)
    table = np.empty((rows, columns), dtype=table_dtype)
    table[:, sin_columns] = sin
    table[:, cos_columns] = cos[:, : columns // 2]
    return table
