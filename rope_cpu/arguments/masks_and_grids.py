"""Checks of attention masks and of the grids of images and videos."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import check_length, check_shape_size, integers, regular_array
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Int64


def check_attention_mask(attention_mask: ArrayLike) -> NDArray[np.bool_]:
    """Return an attention mask as booleans (batch, seq)."""
    mask = regular_array("attention_mask", attention_mask)
    if mask.dtype.kind in "SUMm":  # strings and dates
        raise TypeError(
            f"`attention_mask` has dtype {cut(str(mask.dtype))}; it must hold numbers or booleans"
        )
    if mask.ndim != 2:
        raise ValueError(f"`attention_mask` has shape {mask.shape}; it must be (batch, seq)")
    check_shape_size("attention_mask", mask.shape, mask.size)
    refuse_values("attention_mask", mask[~np.isin(mask, (0, 1))], "0 or 1")
    return mask.astype(bool)


def check_grids(name: str, grids: ArrayLike, edge: int) -> Int64:
    """Return grid sizes as int64 (grids, 3); rows and columns must be multiples of `edge`."""
    sizes = integers(name, grids)
    if sizes.ndim != 2 or sizes.shape[1] != 3:
        raise ValueError(
            f"`{name}` has shape {sizes.shape}; it must be (grids, 3): frames, rows, columns"
        )
    check_length(name, sizes, limits.LAYERS)
    refuse_values(name, sizes[sizes < 1], "at least 1")
    cells = sizes.prod(axis=1, dtype=np.float64)
    if cells.sum() > limits.TABLE:
        raise ValueError(
            f"`{name}` holds grids of {cells.sum():.0f} cells; at most {limits.TABLE} are "
            "supported; pass fewer images at once"
        )
    if (sizes[:, 1:] % edge).any():
        raise ValueError(
            f"`{name}` is {shown(sizes)}; rows and columns must be multiples of merge_size {edge}"
        )
    return sizes


def refuse_values(name: str, wrong: NDArray[Any], rule: str) -> None:
    """Raise if any value breaks the rule."""
    if wrong.size:
        raise ValueError(f"`{name}` holds {wrong[0]}; every value must be {rule}")
