"""Checks of position ids, offsets, deltas and packed sequences; ids as float64 positions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import check_table_size, integers, regular_array
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import LAYOUT_AXES, Array, Float64, Int64

_RANGE_RULE = "be within ±2^53, where float64 is exact"

# Below it, an offset plus any number of tokens stays within the range.
_SAFE_OFFSET = int(limits.MAX_POSITION / 2)


def parse_position_ids(
    name: str, value: object, axes: int, layout: str | None, rows: int, pairs: int
) -> Float64:
    """Return position ids as float64 (batch or 1, seq, axes).

    value: (seq,) or (batch, seq), for thd (tokens,); with several axes a trailing axis of
    coordinates.
    layout: layout of the arrays, or None if no array will be rotated.
    rows: number of sequences with frequencies of their own.
    pairs: pairs of all heads with frequencies of their own.
    """
    ids = position_array(name, value)
    check_coordinates(name, ids, axes)
    _check_dimensions(name, ids, axes, layout)
    if axes == 1:
        ids = ids[..., None]
    if ids.ndim == 2:
        ids = ids[None]
    batch, seq, _ = ids.shape
    if rows > 1 and layout == "thd":
        rule = f"have batch rows, for which {rows} lengths were given (`at_length([...])`)"
        remedy = "pass plan(position_ids, layout='thd', cu_seqlens=...), or one length"
        raise ArgumentError("layout", layout, rule, remedy)
    if rows > 1 and batch not in (1, rows):
        rule = f"be the number of lengths that were given (`at_length([...])`), {rows}"
        raise ArgumentError(name, Finding(f"has batch {batch}"), rule)
    # A coarse test first, because every call passes it.
    if rows * ids.size * pairs > limits.TABLE:
        check_table_size(name, value, max(rows, batch), seq, pairs)
    check_range(name, ids)
    return np.array(ids, dtype=np.float64, order="C")  # a copy: a plan outlives the caller's buffer


def _check_dimensions(name: str, ids: Array, axes: int, layout: str | None) -> None:
    """Raise unless ids are (seq,) or (batch, seq), for thd (tokens,), plus coordinates."""
    dimensions = ids.ndim if axes == 1 else ids.ndim - 1
    if dimensions == 1 or (dimensions == 2 and layout != "thd"):
        return
    coordinates = "" if axes == 1 else f" {axes}"
    rule = f"(tokens,{coordinates})"
    if layout != "thd":
        batched = "(batch, seq)" if axes == 1 else f"(batch, seq, {axes})"
        rule = f"(seq,{coordinates}) or {batched}"
    raise ArgumentError(name, Finding.shape_of(ids), f"be {rule}")


def position_array(name: str, value: object) -> Array:
    """Return positions as an array; raise unless they are integers, float32 or float64."""
    ids = _numeric_array(name, value)
    if ids.dtype.kind not in "iu" and ids.dtype.newbyteorder("=") not in (np.float32, np.float64):
        raise ArgumentTypeError(name, Finding.dtype_of(ids), "hold integers, float32 or float64")
    return ids


def _numeric_array(name: str, value: object) -> Array:
    """Return numbers as an array; raise if masked, ragged, or too large for NumPy's dtypes."""
    ids = regular_array(name, value)
    if not ids.size and not isinstance(value, np.ndarray):
        return ids.astype(np.int64)  # NumPy converts an empty list to float64
    if ids.dtype.kind == "O" and ids.size and all(isinstance(entry, int) for entry in ids.flat):
        extreme = max(ids.flat, key=abs)
        if abs(extreme) > limits.MAX_POSITION:
            raise ArgumentError(name, Finding.holds(shown(extreme)), _RANGE_RULE)
    return ids


def check_coordinates(name: str, ids: Array, axes: int) -> None:
    """Raise unless, with several axes, the last axis of ids holds the coordinates of a token."""
    if axes == 1 or (ids.ndim > 0 and ids.shape[-1] == axes):
        return
    hint = ""
    if ids.ndim > 1 and len(ids) == axes:
        hint = f"its axes come first: np.moveaxis({name}, 0, -1)"
    raise ArgumentError(
        name, Finding.shape_of(ids), f"hold {axes} coordinates in its last axis", hint
    )


def check_range(name: str, ids: Array) -> None:
    """Raise if a position is not finite or too large."""
    for extreme in (ids.max(), ids.min()) if ids.size else ():
        if not abs(extreme.item()) <= limits.MAX_POSITION:  # also true for NaN
            raise ArgumentError(name, Finding.holds(extreme), _RANGE_RULE)


def positions_from_offset(
    name: str, offset: int | ArrayLike, x: Array, layout: str, rows: int, pairs: int
) -> Float64:
    """Return the positions offset + 0, 1, 2, … of the tokens of x, which the argument `name` holds.

    The result is float64 (1 or batch, seq, 1).

    rows, pairs: as in `parse_position_ids`.
    """
    batch_axis, token_axis, _ = LAYOUT_AXES[layout]
    seq = x.shape[token_axis]
    if rows * seq * pairs > limits.TABLE:
        check_table_size(name, x, rows, seq, pairs)
    if type(offset) is int and abs(offset) < _SAFE_OFFSET:
        return np.arange(offset, offset + seq, dtype=np.float64).reshape(1, seq, 1)
    offsets = _check_offsets(offset, x.shape[batch_axis or 0])
    check_table_size(name, x, max(rows, offsets.size), seq, pairs)
    values = offsets.reshape(-1).tolist()  # for a few values cheaper than NumPy's reductions
    for extreme in (max(values), min(values)) if values else ():
        if max(abs(extreme), abs(extreme + seq - 1)) > limits.MAX_POSITION:
            finding = Finding(f"is {shown(extreme)}, for {seq} tokens")
            raise ArgumentError("offset", finding, _RANGE_RULE)
    counts = np.arange(seq, dtype=np.float64)[:, None]
    return offsets.astype(np.int64, copy=False).reshape(-1, 1, 1) + counts


def _check_offsets(offset: int | ArrayLike, batch: int) -> Array:
    """Return offsets as an array; raise unless they are one integer, or one per batch row."""
    offsets = _numeric_array("offset", offset)
    if offsets.dtype.kind not in "iu":
        value = Finding.dtype_of(offset) if isinstance(offset, np.ndarray) else offset
        raise ArgumentTypeError("offset", value, "be an integer, or one per batch row")
    if offsets.shape not in ((), (batch,)):
        rule = f"be one integer, or one for each of {batch} batch rows"
        raise ArgumentError("offset", Finding.shape_of(offsets), rule)
    return offsets


def refuse_missing_ids(axes: int, layout: str) -> None:
    """Raise the reason why position ids are required."""
    rule = f"be given for layout {layout!r} and tokens of {axes} coordinates"
    raise ArgumentError("position_ids", None, rule, "rope_cpu.positions makes many kinds")


def parse_delta(value: ArrayLike, axes: int, shared: bool) -> tuple[Array, bool]:
    """Return deltas in the form of position ids, and whether one of them is for all tokens.

    shared: a single number is valid for all axes as well.
    """
    delta = position_array("delta", value)
    if delta.ndim == 0 and axes > 1 and shared:
        delta = np.full(axes, delta)
    is_uniform = delta.shape == (() if axes == 1 else (axes,))
    return delta[None] if is_uniform else delta, is_uniform


def parse_cu_seqlens(value: ArrayLike, most: int = limits.TABLE) -> Int64:
    """Return the starts of packed sequences and the end of the last one, at most `most`."""
    ends = integers("cu_seqlens", value, most=most)
    if ends.ndim != 1 or ends.size == 0 or ends[0] != 0 or (ends[1:] < ends[:-1]).any():
        rule = "be one-dimensional, start at 0 and never decrease"
        raise ArgumentError("cu_seqlens", ends, rule, "pass 0, then the end of each sequence")
    return ends


def tokens_of_sequences(cu_seqlens: ArrayLike, layout: str, tokens: int, lengths: int) -> Int64:
    """Return the number of tokens of each packed sequence, (sequences,).

    tokens: number of position ids.
    lengths: number of lengths that sequences were given; one serves every number of sequences.
    """
    if layout != "thd":
        rule = "be None, or `layout` 'thd', whose packed tokens it divides into sequences"
        raise ArgumentError("cu_seqlens", Finding(f"is given with layout {layout!r}"), rule)
    ends = parse_cu_seqlens(cu_seqlens, limits.SEQUENCES + 1)
    if ends[-1] != tokens:
        rule = f"end at the number of tokens, {tokens} in `position_ids`"
        raise ArgumentError("cu_seqlens", Finding(f"ends at {ends[-1]}"), rule)
    if lengths not in (1, len(ends) - 1):
        rule = f"be for {lengths}, the number of lengths (`at_length([...])`)"
        raise ArgumentError("cu_seqlens", Finding(f"is for {len(ends) - 1} sequences"), rule)
    return ends[1:] - ends[:-1]


def parse_table_rows(value: object, table: tuple[int, ...], layout: str) -> Array:
    """Return the rows of a table, (batch or 1, seq), that position ids name; raise otherwise.

    table: its shape, (length, pairs) or (length, heads, pairs).
    """
    length, *row_shape = table
    ids = _numeric_array("position_ids", value)
    if ids.dtype.kind not in "iu":
        rule = "hold integers, which look up the rows of a table"
        raise ArgumentTypeError("position_ids", Finding.dtype_of(ids), rule)
    pairs = math.prod(row_shape)
    rows = parse_position_ids("position_ids", ids, 1, layout, 1, pairs)[..., 0].astype(np.intp)
    wrong = rows[(rows < 0) | (rows >= length)]
    if wrong.size:
        rule = f"be within the rows of `cos`, 0 to {length - 1}"
        raise ArgumentError("position_ids", Finding.holds(wrong[0]), rule)
    return rows
