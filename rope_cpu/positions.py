"""Builders of position ids: packed and padded sequences, image and video grids, the ids of M-RoPE models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import (
    boolean,
    finite_array,
    integers,
    not_larger,
    not_longer,
    per_axis,
    real_array,
    real_number,
    regular_array,
    whole_number,
    whole_numbers,
)
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64, Int64

TEXT, IMAGE, VIDEO = 0, 1, 2


def packed(cu_seqlens: ArrayLike) -> Int64:
    """Return the ids (tokens,) of sequences packed one after another, each counted from 0.

    cu_seqlens: (sequences + 1,) integers, 0 and then the end of each sequence, in tokens.

    Raises TypeError or ValueError unless they start at 0 and never fall.
    """
    ends = integers("cu_seqlens", cu_seqlens)
    if ends.ndim != 1 or ends.size == 0 or ends[0] != 0 or (np.diff(ends) < 0).any():
        raise ValueError(
            f"`cu_seqlens` is {shown(ends)}; it must be one row that starts at 0 and never falls"
        )
    not_larger("`cu_seqlens` ends at", int(ends[-1]), int(ends[-1]))
    return np.arange(ends[-1]) - np.repeat(ends[:-1], np.diff(ends))


def left_padded(attention_mask: ArrayLike) -> Int64:
    """Return the ids (batch, seq) of padded sequences: tokens are counted from 0, padding has id 0.

    attention_mask: (batch, seq), 1 or True for tokens and 0 or False for padding, wherever it stands.

    Raises ValueError for another shape or other values, TypeError for what is masked or holds neither.
    """
    kept = _mask(attention_mask)
    return np.where(kept, np.cumsum(kept, axis=1) - 1, 0)


def grid(
    sizes: Sequence[int],
    *,
    centred: bool = False,
    start: float | Sequence[float] = 0,
    scale: float | Sequence[float] = 1,
) -> Int64 | Float64:
    """Return the ids (tokens, axes) of a grid, last axis fastest: coordinate (i + start) * scale for index i.

    sizes: cells along each axis: (height, width) for an image, (frames, height, width) for a video.
    centred: start at -(size - 1) / 2, so that the ids are symmetric around 0.
    start, scale: one number for all axes, or one for each. Whole coordinates come as int64, others as float64.

    `grid((h, w), centred=True, scale=(2 / h, 2 / w))` are the centres of patches in an image that spans -1 to 1, and
    `grid((t, h, w), start=(0, -(h - h // 2), -(w - w // 2)))` the centred whole ids of Qwen-Image.

    Raises TypeError or ValueError naming the argument, its value and the rule, also for coordinates from ±2^53 on.
    """
    counts = whole_numbers("sizes", sizes, longest=limits.AXES)
    if not counts:
        raise ValueError(f"`sizes` is {shown(sizes)}; it must name the cells of one axis at least")
    not_larger("`sizes` is", sizes, len(counts), *counts)
    begin = per_axis("start", start, len(counts))
    if boolean("centred", centred):
        if begin.any():
            raise ValueError(
                f"`start` is {shown(start)}, but `centred` already determines where the grid starts"
            )
        begin = -(np.array(counts) - 1) / 2
    scales = per_axis("scale", scale, len(counts))
    with np.errstate(over="ignore"):
        lines = [
            (np.arange(n) + first) * step
            for n, first, step in zip(counts, begin, scales, strict=True)
        ]
    for line in lines:
        if not (
            np.abs(line) < limits.MAX_POSITION
        ).all():  # at the limit 2^53 + 1 may have been rounded to it
            raise ValueError(
                f"`start` is {shown(start)} and `scale` is {shown(scale)}; coordinates must stay below ±2^53"
            )
    cells = np.unravel_index(np.arange(math.prod(counts)), counts)
    ids: Float64 = np.stack(
        [line[index] for line, index in zip(lines, cells, strict=True)], axis=-1
    )
    whole = np.rint(ids)
    return whole.astype(np.int64) if np.array_equal(whole, ids) else ids


def patches(grid_thw: ArrayLike, *, merge_size: int = 1) -> Int64:
    """Return the ids (tokens, 2), row and column, of the patches of images and videos, one after another.

    grid_thw: (images, 3) integers: frames, rows and columns of patches. Every frame repeats the same ids.
    merge_size: patches come in squares of this edge, square after square, as the vision towers of Qwen2-VL, GLM-4V
        and their successors order them.

    Raises TypeError or ValueError where rows or columns do not divide into the squares.
    """
    edge = whole_number("merge_size", merge_size)
    every = [np.zeros((0, 2), dtype=np.int64)]
    for frames, rows, columns in _grids("grid_thw", grid_thw, edge).tolist():
        squares = (rows // edge, edge, columns // edge, edge, 2)
        frame = (
            np.indices((rows, columns))
            .transpose(1, 2, 0)
            .reshape(squares)
            .swapaxes(1, 2)
            .reshape(-1, 2)
        )
        every.append(np.tile(frame, (frames, 1)))
    return np.concatenate(every)


def with_unrotated(position_ids: ArrayLike, *, before: int = 0, after: int = 0) -> NDArray[Any]:
    """Return ids with tokens before and after them that stay unrotated: id 0 on every axis (CLS, registers).

    position_ids: (..., tokens, axes). Token 0 of a grid that starts at 0 has the same ids: grids of models with such
        tokens start at 1 or are centred.

    Raises TypeError or ValueError for ids without an axis of coordinates.
    """
    ids = real_array("position_ids", position_ids)
    if ids.ndim < 2:
        raise ValueError(f"`position_ids` has shape {ids.shape}; it must be (..., tokens, axes)")
    width = (whole_number("before", before, 0), whole_number("after", after, 0))
    tokens = sum(width) + ids.shape[-2]
    not_larger("`before` and `after` are", width, *ids.shape[:-2], tokens, ids.shape[-1])
    return np.pad(ids, [(0, 0)] * (ids.ndim - 2) + [width, (0, 0)])


def mrope(
    token_types: ArrayLike,
    *,
    image_grid_thw: ArrayLike | None = None,
    video_grid_thw: ArrayLike | None = None,
    merge_size: int = 2,
    merge_frames: int = 1,
    seconds_per_grid: ArrayLike | None = None,
    tokens_per_second: float = 1.0,
    split_frames: bool = False,
    attention_mask: ArrayLike | None = None,
) -> tuple[Int64, Int64]:
    """Return the M-RoPE ids (batch, seq, 3), time, row and column, and the offset (batch,) at which decoding goes on.

    Text counts up on all three axes; an image or video takes the grid of its merged patches, and what follows starts
    past its longer side. After n tokens, padding not counted, the next one has the id n + offset[b] on all axes.

    token_types: (batch, seq): 0 text, 1 image, 2 video, see `token_types`.
    image_grid_thw, video_grid_thw: (images, 3), (videos, 3): frames, rows and columns of patches, in order.
    merge_size: patches along the edge of the square that becomes one token (`spatial_merge_size`).
    merge_frames: frames of a video that become one (Ernie-4.5-VL's `temporal_merge_size`).
    seconds_per_grid: (videos,) seconds from frame to frame, None for 1 (Qwen2.5-VL's `second_per_grid_ts`).
    tokens_per_second: ids per second: 1 for Qwen2-VL and Qwen3-VL, in the configuration of Qwen2.5-VL.
    split_frames: the frames of a video stand apart, with text between them (Qwen3-VL, GLM-4V). That text says how far
        apart they are: merge_frames, seconds_per_grid and tokens_per_second have no use then, and are refused.
    attention_mask: (batch, seq), 0 for padding, which gets id 0.

    Raises TypeError or ValueError where grids and tokens do not fit each other, or arguments exclude one another.
    Source: get_rope_index of qwen2_vl, qwen2_5_vl, qwen3_vl in transformers 5.23 (earlier ones let text go on after
    the last frame where that is further than the longer side).
    """
    types, kept = _types_and_mask(token_types, attention_mask)
    edge, merged = (
        whole_number("merge_size", merge_size),
        whole_number("merge_frames", merge_frames),
    )
    images = _grids("image_grid_thw", _NO_ROWS if image_grid_thw is None else image_grid_thw, edge)
    videos = _grids("video_grid_thw", _NO_ROWS if video_grid_thw is None else video_grid_thw, edge)
    rate = real_number("tokens_per_second", tokens_per_second)
    if rate > _FURTHEST:
        raise ValueError(f"`tokens_per_second` is {rate}; it must be at most 2^31")
    steps = _steps(seconds_per_grid, rate, len(videos))
    if boolean("split_frames", split_frames):
        _refuse_timing(
            merge_frames=(merged, 1),
            seconds_per_grid=(seconds_per_grid, None),
            tokens_per_second=(rate, 1),
        )
        frames = videos[:, 0]
        if frames.sum() > types.size:
            raise _too_many(VIDEO)
        videos, steps = np.repeat(videos, frames, axis=0), np.repeat(steps, frames)
        videos[:, 0] = 1
    ones = np.ones(len(images), dtype=np.float32)
    media: dict[int, Iterator[tuple[list[int], np.float32]]] = {
        IMAGE: zip((images // (1, edge, edge)).tolist(), ones, strict=True),
        VIDEO: zip((videos // (merged, edge, edge)).tolist(), steps, strict=True),
    }
    ids = np.zeros((*types.shape, 3), dtype=np.int64)
    for row, mask in enumerate(kept):
        ids[row, mask] = _sequence(types[row, mask].tolist(), media)
    for kind, unused in media.items():
        if next(unused, None) is not None:
            raise _too_many(kind)
    return ids, ids.max(axis=(1, 2), initial=-1) + 1 - kept.sum(axis=1)


def token_types(
    token_ids: ArrayLike, *, image_token_id: int | None, video_token_id: int | None
) -> Int64:
    """Return 0 for text, 1 for image tokens and 2 for video tokens, int64, shaped like token_ids.

    token_ids: integers of any shape, as the model takes them.
    image_token_id, video_token_id: the ids that stand for a token of an image or a video; None where there are none.

    Raises TypeError where these are no integers, ValueError where one id stands for both.
    """
    ids = integers("token_ids", token_ids)
    types = np.zeros(ids.shape, dtype=np.int64)
    named = (IMAGE, "image_token_id", image_token_id), (VIDEO, "video_token_id", video_token_id)
    for kind, name, token in named:
        if token is not None:
            types[ids == whole_number(name, token, -_INT64 - 1, _INT64)] = kind
    if image_token_id is not None and image_token_id == video_token_id:
        raise ValueError(
            f"`image_token_id` and `video_token_id` are both {image_token_id}; tokens are of one kind"
        )
    return types


def _vision_ids(sizes: list[int], step: np.float32) -> tuple[Int64, int]:
    """Return the ids (tokens, 3) of one image or video that starts at 0, and how far it moves what follows."""
    ids = np.indices(sizes).reshape(3, -1).T.copy()
    # float32, then cut off: the ids that transformers gives the same frames.
    ids[:, 0] = (ids[:, 0].astype(np.float32) * step).astype(np.int64)
    return ids, max(sizes[1:])


def _too_many(kind: int) -> ValueError:
    return ValueError(
        f"`{_GRIDS[kind]}` has more grids than `token_types` has tokens of type {kind} for"
    )


def _sequence(kinds: list[int], media: dict[int, Iterator[tuple[list[int], np.float32]]]) -> Int64:
    """Return the ids (tokens, 3) of one sequence without padding; media: sizes and steps of the grids to come."""
    position, parts = 0, [np.zeros((0, 3), dtype=np.int64)]
    for kind, run in groupby(kinds):
        left = len(list(run))
        while left:
            if kind == TEXT:
                ids, further = np.tile(np.arange(left)[:, None], 3), left
            else:
                sizes, step = next(media[kind], _NONE)
                tokens = math.prod(sizes)
                if not 0 < tokens <= left:
                    raise ValueError(
                        f"`token_types` has a run with {left} more tokens of type {kind}, but the next grid in "
                        f"`{_GRIDS[kind]}` makes {tokens or 'none, or there is none left'}"
                    )
                ids, further = _vision_ids(sizes, step)
            parts.append(ids + position)
            position, left = position + further, left - len(ids)
    return np.concatenate(parts)


_NO_ROWS = np.zeros((0, 3), dtype=np.int64)
_FURTHEST = 2.0**31  # ids from one frame to the next
_GRIDS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
_NONE = [0], np.float32(0)
_INT64 = int(np.iinfo(np.int64).max)


def _refuse_timing(**arguments: tuple[Any, Any]) -> None:
    """Raise where frames that stand apart are given a time between them: name=(value, its default)."""
    for name, (value, nothing) in arguments.items():
        if not np.array_equal(value, nothing):
            rule = "with `split_frames` each frame has its own place in the text; leave it out"
            raise ValueError(f"`{name}` is {shown(value)}, but {rule}")


def _types_and_mask(
    token_types: ArrayLike, attention_mask: ArrayLike | None
) -> tuple[Int64, NDArray[np.bool_]]:
    types = integers("token_types", token_types)
    if types.ndim != 2:
        raise ValueError(f"`token_types` has shape {types.shape}; it must be (batch, seq)")
    _refuse_values("token_types", types[~np.isin(types, (TEXT, IMAGE, VIDEO))], "0, 1 or 2")
    if attention_mask is None:
        return types, np.ones(types.shape, dtype=bool)
    mask = _mask(attention_mask)
    if mask.shape != types.shape:
        raise ValueError(
            f"`attention_mask` has shape {mask.shape}, but `token_types` has {types.shape}"
        )
    return types, mask


def _mask(attention_mask: ArrayLike) -> NDArray[np.bool_]:
    mask = regular_array("attention_mask", attention_mask)
    if mask.dtype.kind in "SUMm":  # words and dates
        raise TypeError(
            f"`attention_mask` has dtype {cut(str(mask.dtype))}; it must hold numbers or truth values"
        )
    if mask.ndim != 2:
        raise ValueError(f"`attention_mask` has shape {mask.shape}; it must be (batch, seq)")
    not_larger("`attention_mask` has shape", mask.shape, mask.size)
    _refuse_values("attention_mask", mask[~np.isin(mask, (0, 1))], "0 or 1")
    return mask.astype(bool)


def _refuse_values(name: str, wrong: NDArray[Any], rule: str) -> None:
    if wrong.size:
        raise ValueError(f"`{name}` holds {wrong[0]}; every value must be {rule}")


def _steps(
    seconds_per_grid: ArrayLike | None, tokens_per_second: float, videos: int
) -> NDArray[np.float32]:
    seconds = (
        np.ones(videos)
        if seconds_per_grid is None
        else finite_array("seconds_per_grid", seconds_per_grid)
    )
    if seconds.shape != (videos,):
        raise ValueError(
            f"`seconds_per_grid` has shape {seconds.shape}; it must be ({videos},), one for each video"
        )
    _refuse_values(
        "seconds_per_grid",
        seconds[(seconds < 0) | (seconds > _FURTHEST / max(tokens_per_second, 1.0))],
        "at least 0, and at most 2^31, also when multiplied by `tokens_per_second`",
    )
    return np.float32(tokens_per_second) * seconds.astype(np.float32)


def _grids(name: str, grids: ArrayLike, edge: int) -> Int64:
    sizes = integers(name, grids)
    if sizes.ndim != 2 or sizes.shape[1] != 3:
        raise ValueError(
            f"`{name}` has shape {sizes.shape}; it must be (grids, 3): frames, rows, columns"
        )
    not_longer(name, sizes, limits.LAYERS)
    _refuse_values(name, sizes[sizes < 1], "at least 1")
    cells = sizes.prod(axis=1, dtype=np.float64)
    if cells.sum() > limits.TABLE:
        raise ValueError(
            f"`{name}` holds grids of {cells.sum():.0f} cells; there may be at most {limits.TABLE}"
        )
    if (sizes[:, 1:] % edge).any():
        raise ValueError(
            f"`{name}` is {shown(sizes)}; rows and columns must be multiples of merge_size {edge}"
        )
    return sizes
