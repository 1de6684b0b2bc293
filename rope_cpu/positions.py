"""Position ids: packed and padded sequences, image and video grids, M-RoPE models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.masks_and_grids import check_attention_mask, check_grids
from rope_cpu.arguments.position_ids import parse_cu_seqlens
from rope_cpu.arguments.scalars import (
    boolean,
    check_table_size,
    per_axis,
    real_array,
    whole_number,
    whole_numbers,
)
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64, Int64
from rope_cpu.mrope_positions import mrope, token_types

__all__ = [
    "grid",
    "left_padded",
    "mrope",
    "packed",
    "patches",
    "token_types",
    "with_unrotated",
]


def packed(cu_seqlens: ArrayLike) -> Int64:
    """Return the position ids of packed sequences, each counted from 0.

    Parameters
    ----------
    cu_seqlens : array_like of int, shape (sequences + 1,)
        0, then the end of each sequence in tokens.

    Returns
    -------
    ndarray of int64, shape (tokens,)

    Raises
    ------
    TypeError
        If `cu_seqlens` does not hold integers.
    ValueError
        If `cu_seqlens` is not one-dimensional, does not start at 0, or decreases.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.packed([0, 3, 5])
    array([0, 1, 2, 0, 1])
    """
    ends = parse_cu_seqlens(cu_seqlens)
    tokens = int(ends[-1])
    check_table_size("cu_seqlens[-1]", tokens, tokens)
    return np.arange(tokens) - np.repeat(ends[:-1], np.diff(ends))


def left_padded(attention_mask: ArrayLike) -> Int64:
    """Return the position ids of padded sequences: tokens count from 0, padding has id 0.

    Parameters
    ----------
    attention_mask : array_like, shape (batch, seq)
        1 or True for tokens, 0 or False for padding. Padding may be anywhere in a row.

    Returns
    -------
    ndarray of int64, shape (batch, seq)

    Raises
    ------
    TypeError
        If the mask is a masked array or holds neither numbers nor booleans.
    ValueError
        If the mask has another shape or other values.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.left_padded([[0, 0, 1, 1], [1, 1, 1, 1]])
    array([[0, 0, 0, 1],
           [0, 1, 2, 3]])
    """
    is_token = check_attention_mask(attention_mask)
    return np.where(is_token, np.cumsum(is_token, axis=1) - 1, 0)


def grid(
    sizes: Sequence[int],
    *,
    centred: bool = False,
    start: float | Sequence[float] = 0,
    scale: float | Sequence[float] = 1,
) -> Int64 | Float64:
    """Return the position ids of a grid, last axis fastest.

    The coordinate of cell i on an axis is ``(i + start) * scale``.

    Parameters
    ----------
    sizes : sequence of int, length axes
        Cells along each axis: (height, width) of an image, (frames, height, width) of a video.
    centred : bool
        Start at ``-(size - 1) / 2``, so that the ids are symmetric around 0. Excludes `start`.
    start, scale : float or sequence of float, length axes
        One number for all axes, or one for each.

    Returns
    -------
    ndarray of int64 or float64, shape (tokens, axes)
        int64 if every coordinate is a whole number, otherwise float64.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If a size is below 1, `start` is passed with `centred`, or a coordinate reaches ±2^53.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.grid((2, 2)).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]

    Centres of the patches of an image that spans -1 to 1 (DINOv3):

    >>> positions.grid((2, 1), centred=True, scale=(2 / 2, 2 / 1)).tolist()
    [[-0.5, 0.0], [0.5, 0.0]]

    The centred whole-number ids of Qwen-Image:

    >>> t, h, w = 1, 2, 3
    >>> positions.grid((t, h, w), start=(0, -(h - h // 2), -(w - w // 2)))[0].tolist()
    [0, -1, -2]
    """
    counts = whole_numbers("sizes", sizes, longest=limits.AXES)
    if not counts:
        raise ValueError(f"`sizes` is {shown(sizes)}; it must hold the size of at least one axis")
    check_table_size("sizes", sizes, len(counts), *counts)
    starts = per_axis("start", start, len(counts))
    if boolean("centred", centred):
        if starts.any():
            raise ValueError(
                f"`start` is {shown(start)}, but `centred` determines the start; pass only one"
            )
        starts = -(np.array(counts) - 1) / 2
    scales = per_axis("scale", scale, len(counts))
    with np.errstate(over="ignore"):
        coordinates = [
            (np.arange(count) + axis_start) * axis_scale
            for count, axis_start, axis_scale in zip(counts, starts, scales, strict=True)
        ]
    for axis_coordinates in coordinates:
        # Not the limit itself: 2^53 + 1 may have been rounded to it.
        if not (np.abs(axis_coordinates) < limits.MAX_POSITION).all():
            raise ValueError(
                f"`start` is {shown(start)} and `scale` is {shown(scale)}; "
                "coordinates must stay below ±2^53"
            )
    cells = np.unravel_index(np.arange(math.prod(counts)), counts)
    columns = [values[index] for values, index in zip(coordinates, cells, strict=True)]
    ids: Float64 = np.stack(columns, axis=-1)
    rounded = np.rint(ids)
    return rounded.astype(np.int64) if np.array_equal(rounded, ids) else ids


def patches(grid_thw: ArrayLike, *, merge_size: int = 1) -> Int64:
    """Return the (row, column) ids of the patches of images and videos, one after another.

    Parameters
    ----------
    grid_thw : array_like of int, shape (images, 3)
        Frames, rows and columns of patches. Every frame repeats the same ids.
    merge_size : int
        Edge of the squares in which patches are ordered, square after square, as in the vision
        towers of Qwen2-VL, GLM-4V and their successors.

    Returns
    -------
    ndarray of int64, shape (tokens, 2)

    Raises
    ------
    TypeError
        If an argument does not hold integers.
    ValueError
        If rows or columns are not multiples of `merge_size`.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.patches([[1, 2, 4]], merge_size=2).tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    """
    edge = whole_number("merge_size", merge_size)
    parts = [np.zeros((0, 2), dtype=np.int64)]
    for frames, rows, columns in check_grids("grid_thw", grid_thw, edge).tolist():
        row_column = np.indices((rows, columns)).transpose(1, 2, 0)
        squares = row_column.reshape(rows // edge, edge, columns // edge, edge, 2)
        frame = squares.swapaxes(1, 2).reshape(-1, 2)
        parts.append(np.tile(frame, (frames, 1)))
    return np.concatenate(parts)


def with_unrotated(position_ids: ArrayLike, *, before: int = 0, after: int = 0) -> NDArray[Any]:
    """Add unrotated tokens (class tokens, registers): position id 0 on every axis.

    Parameters
    ----------
    position_ids : array_like of int or float, shape (..., tokens, axes)
        Ids of the other tokens. The first cell of a grid that starts at 0 also has id 0 and is
        not rotated either; models that must tell it from a class token start the grid at 1 or
        centre it.
    before, after : int
        Number of unrotated tokens before and after the others.

    Returns
    -------
    ndarray, shape (..., before + tokens + after, axes)
        Same dtype as `position_ids`.

    Raises
    ------
    TypeError
        If `position_ids` does not hold real numbers.
    ValueError
        If `position_ids` has no axis of coordinates.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.with_unrotated(positions.grid((1, 2), start=1), before=1).tolist()
    [[0, 0], [1, 1], [1, 2]]
    """
    ids = real_array("position_ids", position_ids)
    if ids.ndim < 2:
        raise ValueError(f"`position_ids` has shape {ids.shape}; it must be (..., tokens, axes)")
    width = (whole_number("before", before, 0), whole_number("after", after, 0))
    tokens = sum(width) + ids.shape[-2]
    check_table_size("(before, after)", width, *ids.shape[:-2], tokens, ids.shape[-1])
    return np.pad(ids, [(0, 0)] * (ids.ndim - 2) + [width, (0, 0)])
