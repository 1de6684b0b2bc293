"""Position ids: packed and padded sequences, image and video grids, M-RoPE models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.position_ids import parse_cu_seqlens
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64, Int64

__all__ = [
    "grid",
    "left_padded",
    "mrope",
    "packed",
    "patches",
    "token_types",
    "with_unrotated",
]

TEXT = 0
IMAGE = 1
VIDEO = 2
SOUND = 3

_KIND_NAMES = {IMAGE: "image", VIDEO: "video"}
_Start = Literal["largest_id", "longer_side"]
_STARTS = get_args(_Start)
_MAX_ID_STEP = 2.0**31  # between two frames
_INT64_MAX = int(np.iinfo(np.int64).max)


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
    scalars.check_table_size("cu_seqlens[-1]", tokens, tokens)
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
    is_token = _checked_mask(attention_mask)
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
    counts = scalars.whole_numbers("sizes", sizes, longest=limits.AXES)
    if not counts:
        raise ArgumentError("sizes", sizes, "hold the size of at least one axis")
    scalars.check_table_size("sizes", sizes, len(counts), *counts)
    starts = scalars.per_axis("start", start, len(counts))
    if scalars.boolean("centred", centred):
        if starts.any():
            rule = "be left out, as `centred` determines the start"
            raise ArgumentError("start", start, rule)
        starts = -(np.array(counts) - 1) / 2
    scales = scalars.per_axis("scale", scale, len(counts))
    cells = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), axis=-1)
    with np.errstate(over="ignore"):
        ids: Float64 = (cells + starts) * scales
    # Not the limit itself: 2^53 + 1 may have been rounded to it.
    if not (np.abs(ids) < limits.MAX_POSITION).all():
        finding = Finding(f"is {shown(start)} and `scale` is {shown(scale)}")
        raise ArgumentError("start", finding, "give coordinates below ±2^53")
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
    edge = scalars.whole_number("merge_size", merge_size)
    parts = [np.zeros((0, 2), dtype=np.int64)]
    for frames, rows, columns in _checked_grids("grid_thw", grid_thw, edge).tolist():
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
    ids = scalars.real_array("position_ids", position_ids)
    if ids.ndim < 2:
        raise ArgumentError("position_ids", Finding.shape_of(ids), "be (..., tokens, axes)")
    width = (scalars.whole_number("before", before, 0), scalars.whole_number("after", after, 0))
    tokens = sum(width) + ids.shape[-2]
    scalars.check_table_size("(before, after)", width, *ids.shape[:-2], tokens, ids.shape[-1])
    return np.pad(ids, [(0, 0)] * (ids.ndim - 2) + [width, (0, 0)])


class _Grid(NamedTuple):
    """Merged patches of one image or video; step: difference of ids between frames."""

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
    start_after: _Start = "largest_id",
    attention_mask: ArrayLike | None = None,
) -> tuple[Int64, Int64]:
    """Return the M-RoPE ids of a prompt and the offset of the tokens generated after it.

    Text counts up on all three axes, and so does sound. An image or video has the grid of its
    merged patches, and the tokens after it start at its largest id plus one. Not for a video with
    its own audio (`use_audio_in_video` of Qwen2.5-Omni), where both start at the same id.

    Parameters
    ----------
    token_types : array_like of int, shape (batch, seq)
        0 text, 1 image, 2 video, 3 sound; see `token_types`. The `mm_token_type_ids` of
        transformers' processors are such types.
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
    edge = scalars.whole_number("merge_size", merge_size)
    merged_frames = scalars.whole_number("merge_frames", merge_frames)
    images = _optional_grids("image_grid_thw", image_grid_thw, edge)
    videos = _optional_grids("video_grid_thw", video_grid_thw, edge)
    rate = scalars.real_number("tokens_per_second", tokens_per_second)
    if rate > _MAX_ID_STEP:
        raise ArgumentError("tokens_per_second", rate, "be at most 2^31")
    scalars.choice("start_after", start_after, _STARTS)
    steps = _frame_steps(seconds_per_grid, rate, len(videos))
    if scalars.boolean("split_frames", split_frames):
        if merged_frames != 1 or seconds_per_grid is not None or rate != 1:
            rule = "be alone: text between frames, and no other argument, determines their distance"
            raise ArgumentError("split_frames", split_frames, rule)
        frames = videos[:, 0]
        if frames.sum() > types.size:
            raise _unused_grid_error(VIDEO)
        steps = np.repeat(steps, frames)
        videos = np.repeat(videos, frames, axis=0)
        videos[:, 0] = 1
    image_grids = (images // (1, edge, edge)).T.tolist()
    video_grids = (videos // (merged_frames, edge, edge)).T.tolist()
    grids: dict[int, Iterator[_Grid]] = {
        IMAGE: map(_Grid, *image_grids, repeat(np.float32(1))),
        VIDEO: map(_Grid, *video_grids, steps),
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
    ids = scalars.integers("token_ids", token_ids)
    types = np.zeros(ids.shape, dtype=np.int64)
    for kind, token in ((IMAGE, image_token_id), (VIDEO, video_token_id)):
        if token is not None:
            name = f"{_KIND_NAMES[kind]}_token_id"
            types[ids == scalars.whole_number(name, token, -_INT64_MAX - 1, _INT64_MAX)] = kind
    if image_token_id is not None and image_token_id == video_token_id:
        rule = "differ from `video_token_id`, or one of them must be None"
        raise ArgumentError("image_token_id", image_token_id, rule)
    return types


def _sequence_ids(kinds: list[int], grids: dict[int, Iterator[_Grid]], start_after: str) -> Int64:
    """Return the ids (tokens, 3) of one sequence without padding; consumes its grids."""
    parts = [np.zeros((0, 3), dtype=np.int64)]
    start = 0
    before = TEXT
    for kind, run in groupby(kinds):
        if {before, kind} == {VIDEO, SOUND}:
            finding = Finding("has sound next to the tokens of a video")
            remedy = "a video with its own audio (`use_audio_in_video`) has other ids"
            raise ArgumentError("token_types", finding, "have other tokens between", remedy)
        before = kind
        length = len(list(run))
        if kind in (TEXT, SOUND):
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
    name = _KIND_NAMES[kind]
    left = tokens
    while left:
        vision_grid = next(grids, None)
        if vision_grid is None:
            finding = Finding(f"has {left} {name} tokens left")
            rule = f"have a grid in `{name}_grid_thw` for every {name}"
            raise ArgumentError("token_types", finding, rule)
        grid_tokens = vision_grid.frames * vision_grid.rows * vision_grid.columns
        if not 0 < grid_tokens <= left:
            finding = Finding(f"has {left} {name} tokens left in a run")
            rule = f"have the {grid_tokens} of the next grid in `{name}_grid_thw`"
            remedy = "check the grids, `merge_size`, `merge_frames` and `split_frames`"
            raise ArgumentError("token_types", finding, rule, remedy)
        yield vision_grid
        left -= grid_tokens


def _grid_ids(vision_grid: _Grid) -> Int64:
    """Return the ids (tokens, 3) of one image or video that starts at 0."""
    sizes = (vision_grid.frames, vision_grid.rows, vision_grid.columns)
    ids = np.indices(sizes).reshape(3, -1).T.copy()
    # float32, then truncated: the ids that transformers gives the same frames.
    ids[:, 0] = (ids[:, 0].astype(np.float32) * vision_grid.step).astype(np.int64)
    return ids


def _unused_grid_error(kind: int) -> ArgumentError:
    """Return the error for grids without tokens."""
    name = _KIND_NAMES[kind]
    finding = Finding(f"has more grids than `token_types` has {name} tokens for")
    rule = f"have the grids of the tokens of type {kind} alone"
    return ArgumentError(f"{name}_grid_thw", finding, rule, "leave the unused grids out")


def _check_token_types(token_types: ArrayLike) -> Int64:
    """Return token types as int64 (batch, seq)."""
    types = scalars.integers("token_types", token_types)
    if types.ndim != 2:
        raise ArgumentError("token_types", Finding.shape_of(types), "be (batch, seq)")
    _refuse_values(
        "token_types", types[~np.isin(types, (TEXT, IMAGE, VIDEO, SOUND))], "0, 1, 2 or 3"
    )
    return types


def _token_mask(attention_mask: ArrayLike | None, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which elements are tokens, of the shape of `token_types`."""
    if attention_mask is None:
        return np.ones(shape, dtype=bool)
    mask = _checked_mask(attention_mask)
    if mask.shape != shape:
        raise ArgumentError(
            "attention_mask", Finding.shape_of(mask), f"be that of `token_types`, {shape}"
        )
    return mask


def _frame_steps(
    seconds_per_grid: ArrayLike | None, tokens_per_second: float, videos: int
) -> NDArray[np.float32]:
    """Return the difference of ids between frames of each video."""
    if seconds_per_grid is None:
        seconds = np.ones(videos)
    else:
        seconds = scalars.finite_array("seconds_per_grid", seconds_per_grid)
    if seconds.shape != (videos,):
        rule = f"be ({videos},), one value for each video"
        raise ArgumentError("seconds_per_grid", Finding.shape_of(seconds), rule)
    most = _MAX_ID_STEP / max(tokens_per_second, 1.0)
    _refuse_values(
        "seconds_per_grid",
        seconds[(seconds < 0) | (seconds > most)],
        "at least 0, and at most 2^31, also when multiplied by `tokens_per_second`",
    )
    return np.float32(tokens_per_second) * seconds.astype(np.float32)


def _optional_grids(name: str, grids: ArrayLike | None, edge: int) -> Int64:
    """Return grid sizes, no rows for None."""
    return _checked_grids(name, np.zeros((0, 3), int) if grids is None else grids, edge)


def _checked_mask(attention_mask: ArrayLike) -> NDArray[np.bool_]:
    """Return an attention mask as booleans (batch, seq)."""
    mask = scalars.regular_array("attention_mask", attention_mask)
    if mask.dtype.kind in "SUMm":  # strings and dates
        raise ArgumentTypeError(
            "attention_mask", Finding.dtype_of(mask), "hold numbers or booleans"
        )
    if mask.ndim != 2:
        raise ArgumentError("attention_mask", Finding.shape_of(mask), "be (batch, seq)")
    scalars.check_table_size("attention_mask", mask, mask.size)
    _refuse_values("attention_mask", mask[~np.isin(mask, (0, 1))], "0 or 1")
    return mask.astype(bool)


def _checked_grids(name: str, grids: ArrayLike, edge: int) -> Int64:
    """Return grid sizes as int64 (grids, 3); rows and columns must be multiples of `edge`."""
    sizes = scalars.integers(name, grids)
    if sizes.ndim != 2 or sizes.shape[1] != 3:
        raise ArgumentError(name, Finding.shape_of(sizes), "be (grids, 3): frames, rows, columns")
    scalars.check_length(name, sizes, limits.LAYERS)
    _refuse_values(name, sizes[sizes < 1], "at least 1")
    scalars.check_table_size(name, sizes, int(sizes.prod(axis=1, dtype=np.float64).sum()))
    if (sizes[:, 1:] % edge).any():
        rule = f"have rows and columns that are multiples of `merge_size` {edge}"
        raise ArgumentError(name, sizes, rule)
    return sizes


def _refuse_values(name: str, wrong: NDArray[Any], rule: str) -> None:
    """Raise if any value breaks the rule."""
    if wrong.size:
        raise ArgumentError(name, Finding.holds(wrong[0]), f"hold only values {rule}")
