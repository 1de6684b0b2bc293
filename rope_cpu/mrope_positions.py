"""Position ids of M-RoPE models (Qwen2-VL and its successors); public through `positions`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments.masks_and_grids import check_attention_mask, check_grids, refuse_values
from rope_cpu.arguments.scalars import (
    boolean,
    choice,
    finite_array,
    integers,
    real_number,
    whole_number,
)
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Int64

TEXT = 0
IMAGE = 1
VIDEO = 2

_KIND_NAMES = {IMAGE: "image", VIDEO: "video"}
_GRID_ARGUMENTS = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}
_STARTS = ("largest_id", "longer_side")
_MAX_ID_STEP = 2.0**31  # between two frames
_INT64_MAX = int(np.iinfo(np.int64).max)


class _Grid(NamedTuple):
    """Merged patches of one image or video.

    number: row of the grid argument. step: difference of ids between frames.
    """

    number: int
    frames: int
    rows: int
    columns: int
    step: np.float32


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
    start_after: str = "largest_id",
    attention_mask: ArrayLike | None = None,
) -> tuple[Int64, Int64]:
    """Return the M-RoPE ids of a prompt and the offset of the tokens generated after it.

    Text counts up on all three axes. An image or video has the grid of its merged patches, and
    the tokens after it start at its largest id plus one.

    Parameters
    ----------
    token_types : array_like of int, shape (batch, seq)
        0 text, 1 image, 2 video; see `token_types`.
    image_grid_thw, video_grid_thw : array_like of int, shape (images, 3), (videos, 3), optional
        Frames, rows and columns of patches, in the order of the tokens.
    merge_size : int
        Patches along the edge of the square that becomes one token (`spatial_merge_size`).
    merge_frames : int
        Frames of a video that become one (`temporal_merge_size` of Ernie-4.5-VL).
    seconds_per_grid : array_like of float, shape (videos,), optional
        Seconds between frames (`second_per_grid_ts` of Qwen2.5-VL); None means 1.
    tokens_per_second : float
        Ids per second: 1 for Qwen2-VL and Qwen3-VL, in the configuration of Qwen2.5-VL.
    split_frames : bool
        Frames of a video are separate, with text between them (Qwen3-VL, GLM-4V). That text
        determines their distance, so `merge_frames`, `seconds_per_grid` and `tokens_per_second`
        must keep their defaults.
    start_after : {"largest_id", "longer_side"}
        Where the tokens after an image or video start: "largest_id", past its largest id on any
        axis, as the models were trained; "longer_side", past its longer side in merged patches,
        whatever the ids of its frames, as transformers does since 5.3. The two differ after a
        video whose last frame has a larger id than its sides.
    attention_mask : array_like, shape (batch, seq), optional
        0 for padding; padding gets id 0.

    Returns
    -------
    position_ids : ndarray of int64, shape (batch, seq, 3)
        Time, row and column.
    offset : ndarray of int64, shape (batch,)
        After n tokens, padding not counted, the next token has the id ``n + offset[b]`` on all
        axes.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If grids and tokens do not match, or arguments exclude one another.

    References
    ----------
    P. Wang et al., Qwen2-VL, arXiv:2409.12191, section 2.1; `get_rope_index` of qwen2_vl and
    qwen2_5_vl in transformers up to 5.2 ("largest_id") and since 5.3 ("longer_side").

    Examples
    --------
    >>> from rope_cpu import positions
    >>> ids, offset = positions.mrope([[0, 1, 1, 0]], image_grid_thw=[[1, 2, 4]])
    >>> ids[0].tolist()
    [[0, 0, 0], [1, 1, 1], [1, 1, 2], [3, 3, 3]]
    >>> offset
    array([0])

    A video of four frames, each one token:

    >>> ids, offset = positions.mrope([[0, 2, 2, 2, 2, 0]], video_grid_thw=[[4, 2, 2]])
    >>> ids[0].tolist()
    [[0, 0, 0], [1, 1, 1], [2, 1, 1], [3, 1, 1], [4, 1, 1], [5, 5, 5]]
    """
    types = _check_token_types(token_types)
    is_token = _token_mask(attention_mask, types.shape)
    edge = whole_number("merge_size", merge_size)
    merged_frames = whole_number("merge_frames", merge_frames)
    images = _optional_grids("image_grid_thw", image_grid_thw, edge)
    videos = _optional_grids("video_grid_thw", video_grid_thw, edge)
    rate = real_number("tokens_per_second", tokens_per_second)
    if rate > _MAX_ID_STEP:
        raise ValueError(f"`tokens_per_second` is {rate}; it must be at most 2^31")
    choice("start_after", start_after, _STARTS)
    steps = _frame_steps(seconds_per_grid, rate, len(videos))
    numbers = np.arange(len(videos))
    if boolean("split_frames", split_frames):
        _refuse_timing(
            merge_frames=(merged_frames, 1),
            seconds_per_grid=(seconds_per_grid, None),
            tokens_per_second=(rate, 1),
        )
        frames = videos[:, 0]
        if frames.sum() > types.size:
            raise _unused_grid_error(VIDEO)
        numbers = np.repeat(numbers, frames)
        steps = np.repeat(steps, frames)
        videos = np.repeat(videos, frames, axis=0)
        videos[:, 0] = 1
    image_steps = np.ones(len(images), dtype=np.float32)
    image_grids = images // (1, edge, edge)
    video_grids = videos // (merged_frames, edge, edge)
    grids = {
        IMAGE: _iterate_grids(np.arange(len(images)), image_grids, image_steps),
        VIDEO: _iterate_grids(numbers, video_grids, steps),
    }
    ids = np.zeros((*types.shape, 3), dtype=np.int64)
    for row, mask in enumerate(is_token):
        ids[row, mask] = _sequence_ids(types[row, mask].tolist(), grids, start_after)
    for kind, unused in grids.items():
        if next(unused, None) is not None:
            raise _unused_grid_error(kind)
    largest = ids.max(axis=(1, 2), initial=-1, where=is_token[..., None])
    return ids, largest + 1 - is_token.sum(axis=1)


def token_types(
    token_ids: ArrayLike, *, image_token_id: int | None, video_token_id: int | None
) -> Int64:
    """Return the type of each token: 0 text, 1 image, 2 video.

    Parameters
    ----------
    token_ids : array_like of int, any shape
        The model's input ids.
    image_token_id, video_token_id : int or None
        Placeholder ids of image and video tokens; None if the model has none.

    Returns
    -------
    ndarray of int64, shape of `token_ids`

    Raises
    ------
    TypeError
        If an argument does not hold integers.
    ValueError
        If `image_token_id` equals `video_token_id`.

    Examples
    --------
    >>> from rope_cpu import positions
    >>> positions.token_types([5, 90, 90, 91], image_token_id=90, video_token_id=91)
    array([0, 1, 1, 2])
    """
    ids = integers("token_ids", token_ids)
    types = np.zeros(ids.shape, dtype=np.int64)
    placeholders = (
        (IMAGE, "image_token_id", image_token_id),
        (VIDEO, "video_token_id", video_token_id),
    )
    for kind, name, token in placeholders:
        if token is not None:
            types[ids == whole_number(name, token, -_INT64_MAX - 1, _INT64_MAX)] = kind
    if image_token_id is not None and image_token_id == video_token_id:
        raise ValueError(
            f"`image_token_id` and `video_token_id` are both {image_token_id}; they must differ, "
            "or one must be None"
        )
    return types


def _sequence_ids(kinds: list[int], grids: dict[int, Iterator[_Grid]], start_after: str) -> Int64:
    """Return the ids (tokens, 3) of one sequence without padding; consumes its grids."""
    parts = [np.zeros((0, 3), dtype=np.int64)]
    start = 0
    for kind, run in groupby(kinds):
        length = len(list(run))
        if kind == TEXT:
            parts.append(start + np.tile(np.arange(length)[:, None], 3))
            start += length
            continue
        for vision_grid in _take_grids(kind, length, grids[kind]):
            grid_ids = _grid_ids(vision_grid)
            parts.append(start + grid_ids)
            if start_after == "largest_id":
                start += int(grid_ids.max()) + 1
            else:
                start += max(vision_grid.rows, vision_grid.columns)
    return np.concatenate(parts)


def _take_grids(kind: int, tokens: int, grids: Iterator[_Grid]) -> Iterator[_Grid]:
    """Yield the next grids until their tokens fill a run of `tokens` tokens; raise otherwise."""
    argument = _GRID_ARGUMENTS[kind]
    left = tokens
    while left:
        vision_grid = next(grids, None)
        if vision_grid is None:
            raise ValueError(
                f"`token_types` has {left} {_KIND_NAMES[kind]} tokens left, but `{argument}` has "
                f"no grid for them; pass the grid of every {_KIND_NAMES[kind]}"
            )
        grid_tokens = vision_grid.frames * vision_grid.rows * vision_grid.columns
        if not 0 < grid_tokens <= left:
            raise ValueError(
                f"`token_types` has {left} {_KIND_NAMES[kind]} tokens left in a run, but "
                f"`{argument}`[{vision_grid.number}] makes {grid_tokens}; check the grids, "
                "`merge_size` and `merge_frames`"
            )
        yield vision_grid
        left -= grid_tokens


def _grid_ids(vision_grid: _Grid) -> Int64:
    """Return the ids (tokens, 3) of one image or video that starts at 0."""
    sizes = (vision_grid.frames, vision_grid.rows, vision_grid.columns)
    ids = np.indices(sizes).reshape(3, -1).T.copy()
    # float32, then truncated: the ids that transformers gives the same frames.
    ids[:, 0] = (ids[:, 0].astype(np.float32) * vision_grid.step).astype(np.int64)
    return ids


def _iterate_grids(numbers: Int64, sizes: Int64, steps: NDArray[np.float32]) -> Iterator[_Grid]:
    """Yield the rows of grid sizes (grids, 3) with their number and step."""
    for number, grid_sizes, step in zip(numbers.tolist(), sizes.tolist(), steps, strict=True):
        frames, rows, columns = grid_sizes
        yield _Grid(number, frames, rows, columns, step)


def _unused_grid_error(kind: int) -> ValueError:
    """Return the error for grids without tokens."""
    return ValueError(
        f"`{_GRID_ARGUMENTS[kind]}` has more grids than `token_types` has {_KIND_NAMES[kind]} "
        f"tokens (type {kind}) for; leave the unused grids out"
    )


def _refuse_timing(**arguments: tuple[Any, Any]) -> None:
    """Raise if an argument, name=(value, default), sets the time between separate frames."""
    for name, (value, default) in arguments.items():
        if not np.array_equal(value, default):
            raise ValueError(
                f"`{name}` is {shown(value)}, but with `split_frames` the text between frames "
                f"determines their distance; leave `{name}` out"
            )


def _check_token_types(token_types: ArrayLike) -> Int64:
    """Return token types as int64 (batch, seq)."""
    types = integers("token_types", token_types)
    if types.ndim != 2:
        raise ValueError(f"`token_types` has shape {types.shape}; it must be (batch, seq)")
    refuse_values("token_types", types[~np.isin(types, (TEXT, IMAGE, VIDEO))], "0, 1 or 2")
    return types


def _token_mask(attention_mask: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which elements are tokens, of the shape of `token_types`."""
    if attention_mask is None:
        return np.ones(shape, dtype=bool)
    mask = check_attention_mask(attention_mask)
    if mask.shape != shape:
        raise ValueError(
            f"`attention_mask` has shape {mask.shape}; it must be that of `token_types`, {shape}"
        )
    return mask


def _frame_steps(
    seconds_per_grid: ArrayLike | None, tokens_per_second: float, videos: int
) -> NDArray[np.float32]:
    """Return the difference of ids between frames of each video."""
    if seconds_per_grid is None:
        seconds = np.ones(videos)
    else:
        seconds = finite_array("seconds_per_grid", seconds_per_grid)
    if seconds.shape != (videos,):
        raise ValueError(
            f"`seconds_per_grid` has shape {seconds.shape}; it must be ({videos},), one value for "
            "each video"
        )
    most = _MAX_ID_STEP / max(tokens_per_second, 1.0)
    refuse_values(
        "seconds_per_grid",
        seconds[(seconds < 0) | (seconds > most)],
        "at least 0, and at most 2^31, also when multiplied by `tokens_per_second`",
    )
    return np.float32(tokens_per_second) * seconds.astype(np.float32)


def _optional_grids(name: str, grids: ArrayLike | None, edge: int) -> Int64:
    """Return grid sizes, no rows for None."""
    if grids is None:
        return np.zeros((0, 3), dtype=np.int64)
    return check_grids(name, grids, edge)
