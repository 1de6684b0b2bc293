"""Checks of position ids, offsets and deltas, and the positions of tokens that follow from them."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import not_larger, regular_array
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import LAYOUT_AXES, Array, Float64

_WITHIN = "positions must be within ±2^53, which float64 holds exactly"
_FAR = int(limits.MAX_POSITION / 2)  # from where on it matters how many tokens follow an offset


def of_tokens(
    name: str, value: object, axes: int, layout: str | None, rows: int, pairs: int
) -> Float64:
    """Return position ids as float64 (batch or 1, seq, axes).

    value: (seq,) or (batch, seq), for thd (tokens,); with several axes a trailing axis of coordinates. layout: that
    of the arrays, or None where no array will be rotated. rows: how many sequences have frequencies of their own.
    pairs: of all heads with frequencies of their own.
    """
    given = ids = real_ids(name, value)
    packed, tail = layout == "thd", f", {axes}" if axes > 1 else ","
    check_coordinates(name, ids, axes)
    if (ids.ndim if axes == 1 else ids.ndim - 1) not in ((1,) if packed else (1, 2)):
        rule = f"(tokens{tail})" if packed else f"(seq{tail}) or (batch, seq{tail.rstrip(',')})"
        raise ValueError(f"`{name}` has shape {ids.shape}; it must be {rule}")
    if axes == 1:
        ids = ids[..., None]
    ids = ids if ids.ndim == 3 else ids[None]
    if rows > 1 and packed:
        raise ValueError(
            f"lengths are given for {rows} batch rows, but packed tokens (layout thd) have none"
        )
    if rows > 1 and ids.shape[0] not in (1, rows):
        raise ValueError(
            f"`{name}` has batch {ids.shape[0]}, but lengths were given for {rows} sequences"
        )
    if rows * ids.size * pairs > limits.TABLE:  # coarse, as it is passed at every call
        not_larger(f"`{name}` has shape", given.shape, max(rows, len(ids)), ids.shape[1], pairs)
    check_values(name, ids)
    return np.array(ids, dtype=np.float64, order="C")  # a copy: a plan outlives the caller's buffer


def real_ids(name: str, value: object) -> Array:
    """Return positions as an array; raise unless they are integers, float32 or float64."""
    ids = _as_array(name, value)
    if ids.dtype.kind not in "iu" and ids.dtype.newbyteorder("=") not in (np.float32, np.float64):
        raise TypeError(
            f"`{name}` has dtype {cut(str(ids.dtype))}; positions must be integers, float32 or float64"
        )
    return ids


def _as_array(name: str, value: object) -> Array:
    """Return numbers as an array; raise for what is masked, ragged, or too large for any dtype of NumPy's."""
    ids = regular_array(name, value)
    if not ids.size and not isinstance(value, np.ndarray):
        return ids.astype(np.int64)  # NumPy takes an empty list for float64
    if ids.dtype.kind == "O" and ids.size and all(isinstance(one, int) for one in ids.flat):
        extreme = max(ids.flat, key=abs)
        if abs(extreme) > limits.MAX_POSITION:
            raise ValueError(f"`{name}` holds {shown(extreme)}; {_WITHIN}")
    return ids


def check_coordinates(name: str, ids: Array, axes: int) -> None:
    """Raise unless the last axis of ids holds the coordinates of a token, where there are several."""
    if axes > 1 and (ids.ndim == 0 or ids.shape[-1] != axes):
        hint = (
            f"; its axes come first: np.moveaxis({name}, 0, -1)"
            if ids.ndim > 1 and len(ids) == axes
            else ""
        )
        raise ValueError(
            f"`{name}` has shape {ids.shape}; its last axis must hold {axes} coordinates{hint}"
        )


def check_values(name: str, ids: Array) -> None:
    """Raise where a position is not finite or too large."""
    if ids.dtype.kind == "f" and not np.isfinite(ids).all():
        raise ValueError(f"`{name}` holds {ids[~np.isfinite(ids)][0]}; positions must be finite")
    for extreme in (ids.max(), ids.min()) if ids.size else ():
        if abs(extreme.item()) > limits.MAX_POSITION:
            raise ValueError(f"`{name}` holds {extreme}; {_WITHIN}")


def counted(
    name: str, offset: int | ArrayLike, shape: tuple[int, ...], layout: str, rows: int, pairs: int
) -> Float64:
    """Return the positions offset + 0, 1, 2, … of the tokens of `name`, float64 (1 or batch, seq, 1).

    shape: of the array. rows, pairs: as in `of_tokens`.
    """
    seq = shape[LAYOUT_AXES[layout][1]]
    if rows * seq * pairs > limits.TABLE:
        not_larger(f"`{name}` has shape", shape, rows, seq, pairs)
    if type(offset) is int and abs(offset) < _FAR:
        return np.arange(offset, offset + seq, dtype=np.float64).reshape(1, seq, 1)
    given = _as_array("offset", offset)
    if given.dtype.kind not in "iu":
        what = (
            f"{cut(str(given.dtype))} of shape {given.shape}"
            if isinstance(offset, np.ndarray)
            else shown(offset)
        )
        raise TypeError(f"`offset` is {what}; it must be an integer, or one per batch row")
    batch = shape[1 if layout == "sbhd" else 0]
    if given.ndim > 1 or given.shape not in ((), (batch,)):
        raise ValueError(
            f"`offset` has shape {given.shape}; it must be one integer, or one for each of {batch} batch rows"
        )
    not_larger(f"`{name}` has shape", shape, max(rows, given.size), seq, pairs)
    firsts = given.reshape(-1).tolist()  # a few Python integers cost less than NumPy's reductions
    for extreme in (max(firsts), min(firsts)) if firsts else ():
        if max(abs(extreme), abs(extreme + seq - 1)) > limits.MAX_POSITION:
            raise ValueError(f"`offset` is {shown(extreme)}, for {seq} tokens; {_WITHIN}")
    return (
        given.astype(np.int64, copy=False).reshape(-1, 1, 1)
        + np.arange(seq, dtype=np.float64)[:, None]
    )


def refuse_none(axes: int, layout: str) -> None:
    """Raise the reason why position ids cannot be left out."""
    if layout == "thd":
        raise ValueError(
            "`position_ids` is None; packed tokens (layout thd) need them, as sequences share no order"
        )
    raise ValueError(f"`position_ids` is None; with {axes} axes each token needs its coordinates")


def deltas(value: ArrayLike, tokens: int, axes: int, shared: bool) -> Array:
    """Return a delta for each token: one number holds for all of them, and so does one for each axis.

    shared: one number holds for all axes as well.
    """
    not_larger("`keys` have tokens:", tokens, tokens, axes)
    moved = real_ids("delta", value)
    if moved.ndim:
        check_coordinates("delta", moved, axes)
    if moved.ndim == 0 and (axes == 1 or shared):
        return np.full((tokens, axes) if axes > 1 else tokens, moved)
    return np.broadcast_to(moved, (tokens, *moved.shape)) if moved.ndim == 1 and axes > 1 else moved


def rows_of_table(value: object, table: tuple[int, ...], layout: str) -> Array:
    """Return position ids that index the rows of a table (length, pairs); raise where they do not."""
    length, pairs = table
    ids = _as_array("position_ids", value)
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"`position_ids` has dtype {cut(str(ids.dtype))}; rows of a table are looked up by integers"
        )
    if ids.ndim not in ((1,) if layout == "thd" else (1, 2)):
        rule = "(tokens,)" if layout == "thd" else "(seq,) or (batch, seq)"
        raise ValueError(f"`position_ids` has shape {ids.shape}; it must be {rule}")
    not_larger("`position_ids` has shape", ids.shape, ids.size, pairs)
    for extreme in (ids.min(), ids.max()) if ids.size else ():
        if not 0 <= extreme < length:
            raise ValueError(
                f"`position_ids` holds {extreme}, but `cos` has rows 0 to {length - 1}"
            )
    return ids
