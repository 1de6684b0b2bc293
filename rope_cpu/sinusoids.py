"""Sinusoidal position embeddings: tables, and adding them in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from rope_cpu import _check
from rope_cpu.rotary import RotaryEmbedding
from rope_cpu.spec import LARGEST_FREQUENCY, boolean, integers, real_number, unmasked, whole_number

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))


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
    rows, columns = whole_number("num_positions", num_positions, 0), whole_number("dim", dim)
    base, wanted = real_number("base", base), _check.dtype(dtype)
    sines = (columns + 1) // 2
    exponents = 2.0 * np.arange(sines) / columns
    if base ** -exponents[-1] > LARGEST_FREQUENCY:
        raise ValueError(f"`base` is {base!r}; its frequencies must be at most 2^40 radians per position")
    cos, sin = RotaryEmbedding.from_inv_freq(base**-exponents).cos_sin(np.arange(rows), wanted)
    adjacent = boolean("interleaved", interleaved)
    where_sin, where_cos = (slice(0, None, 2), slice(1, None, 2)) if adjacent else (slice(sines), slice(sines, None))
    table = np.empty((rows, columns), dtype=wanted)
    table[:, where_sin], table[:, where_cos] = sin, cos[:, : columns // 2]
    return table


def add_sinusoidal(
    x: NDArray[Any], table: NDArray[Any], position_ids: ArrayLike | None = None, *, offset: int = 0
) -> NDArray[Any]:
    """Add rows of a sinusoidal table to embeddings, in place, and return them.

    x: (batch, seq, dim) or (seq, dim), float32 or float64, any strides.
    table: (num_positions, dim) of x's dtype.
    position_ids: (seq,) or (batch, seq) integers below num_positions. None: offset + 0, 1, 2, …

    Raises TypeError or ValueError, before anything is written, naming argument, value and rule.
    """
    for name, array in (("x", x), ("table", table)):
        if not isinstance(array, np.ndarray) or array.dtype not in _DTYPES:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"`{name}` is {kind}; it must be a float32 or float64 array")
        unmasked(name, array)
    if x.ndim not in (2, 3) or table.ndim != 2 or table.shape[1] != x.shape[-1] or table.dtype != x.dtype:
        raise ValueError(
            f"`x` is {x.dtype} {x.shape} and `table` {table.dtype} {table.shape}; they must be (batch, seq, dim) or "
            "(seq, dim) and (num_positions, dim) of one dtype"
        )
    if not x.flags.writeable:
        raise ValueError("`x` is read-only; the table is added in place")
    if x.size and not _check.apart_within(x):
        raise ValueError(f"`x` has strides {x.strides}; {_check.APART}")
    if _check.share(x, table):
        raise ValueError("`x` shares memory with `table`, which would change while it is added")
    rows = x if x.ndim == 3 else x[None]
    ids = _row_ids(position_ids, offset, rows.shape[:2], len(table))
    for row, of in zip(rows, ids, strict=True):
        row += table[of]
    return x


def _row_ids(position_ids: ArrayLike | None, offset: int, shape: tuple[int, ...], positions: int) -> NDArray[np.int64]:
    offset = whole_number("offset", offset, 0)
    if position_ids is None:
        if offset + shape[1] > positions:
            last = offset + shape[1] - 1
            raise ValueError(
                f"`offset` is {offset}: positions run to {last}, but `table` has rows 0 to {positions - 1}"
            )
        ids = np.arange(offset, offset + shape[1])
    elif offset != 0:
        raise ValueError(f"`offset` is {offset!r} and `position_ids` are given as well; give one of them")
    else:
        ids = integers("position_ids", position_ids)
    if ids.shape not in (shape[1:], shape, (1, shape[1])):
        raise ValueError(f"`position_ids` has shape {ids.shape}; it must be {shape[1:]} or {shape}")
    if ids.size and not 0 <= ids.min() <= ids.max() < positions:
        raise ValueError(
            f"`position_ids` run from {ids.min()} to {ids.max()}, but `table` has rows 0 to {positions - 1}"
        )
    return np.broadcast_to(ids, shape)
