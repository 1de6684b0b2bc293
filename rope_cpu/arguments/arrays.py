"""Checks of array arguments, each with its error text: the argument, its value, the rule."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from rope_cpu.arguments.scalars import unmasked
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import DTYPE_LIST, DTYPE_NAMES, LAYOUT_AXES, Array

APART = "each axis must step over all that lies closer together, or elements may share memory"

_AXIS_NAMES = {"b": "batch", "s": "seq", "h": "heads", "d": "head_dim", "t": "tokens"}


def layout(value: object) -> str:
    """Return the layout; raise where it is unknown."""
    if not isinstance(value, str) or value not in LAYOUT_AXES:
        raise ValueError(f"`layout` is {shown(value)}; it must be one of {', '.join(LAYOUT_AXES)}")
    return value


def dtype(value: Any) -> np.dtype[Any]:
    """Return a dtype that can be rotated in; raise for any other."""
    wanted: np.dtype[Any] = dtype_of(value)
    if wanted not in DTYPE_NAMES:
        raise TypeError(f"`dtype` is {shown(value)}; it must be {DTYPE_LIST}")
    return wanted


def dtype_of(value: Any) -> Any:
    """Return `value` as a dtype, None where it stands for none; NumPy takes None for float64."""
    if value is None:
        return None
    with suppress(Exception):  # NumPy's errors of what is no dtype share no class
        return np.dtype(value)


def array(name: str, x: object, layout: str) -> Array:
    """Return `x` if it is an array that can be rotated in this layout; raise otherwise."""
    if type(x) is not np.ndarray:
        if not isinstance(x, np.ndarray):
            raise TypeError(f"`{name}` is a {type(x).__name__}; it must be a NumPy array")
        unmasked(name, x)
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(
            f"`{name}` has dtype {cut(str(x.dtype))}; it must be {DTYPE_LIST} (native byte order)"
        )
    if x.ndim != len(layout):
        names = ", ".join(_AXIS_NAMES[letter] for letter in layout)
        raise ValueError(f"`{name}` has shape {x.shape}; layout {layout} means ({names})")
    return x


def rotated(
    xs: Mapping[str, object],
    layout: str,
    head_dim: int,
    table: tuple[int, ...],
    tokens_by: str,
    rows_by: str,
) -> None:
    """Raise unless every array fits head_dim and the (batch or 1, seq, frequency heads, pairs) of cos and sin.

    tokens_by, rows_by: what these have a row for by token, and by batch row.
    """
    batch_axis, token, head = LAYOUT_AXES[layout]
    seen: dict[str, Array] = {}
    for name, given in xs.items():
        x = array(name, given, layout)
        if x.shape[-1] != head_dim:
            raise ValueError(
                f"`{name}` has head_dim {x.shape[-1]}, but this rotary embedding has head_dim {head_dim}"
            )
        if x.shape[token] != table[1]:
            there = f"`{next(iter(seen))}` has" if seen else tokens_by
            raise ValueError(
                f"`{name}` has {x.shape[token]} tokens ({layout} {x.shape}), but {there} {table[1]}"
            )
        batch = 1 if batch_axis is None else x.shape[batch_axis]
        if table[0] not in (1, batch):
            raise ValueError(
                f"`{name}` has batch {batch} ({layout} {x.shape}), but {rows_by} {table[0]}"
            )
        if x.shape[head] % table[2]:
            raise ValueError(
                f"`{name}` has {x.shape[head]} heads, not a multiple of {table[2]}, the heads that frequencies are for"
            )
        for other, y in seen.items():
            if y.dtype != x.dtype:
                raise TypeError(
                    f"`{name}` has dtype {x.dtype}, but `{other}` has {y.dtype}; they must be the same"
                )
            if batch_axis is not None and y.shape[batch_axis] != batch:
                raise ValueError(
                    f"`{name}` has batch {batch}, but `{other}` has {y.shape[batch_axis]}"
                )
        seen[name] = x


def outputs(outs: Mapping[str, Any], xs: Mapping[str, Array]) -> None:
    """Raise unless each result can be written: in place, or into memory that shares no element with anything read."""
    for (name, out), (of, x) in zip(outs.items(), xs.items(), strict=True):
        _output(name, out, of, x.shape, x.dtype)
        for read, y in xs.items():
            if not (read == of and _same(x, out)) and share(out, y):
                rule = "it must be the very same array (in place) or share nothing with the inputs"
                raise ValueError(f"`{name}` shares memory with `{read}`; {rule}")
    _each_its_own(outs)


def _output(name: str, out: Any, of: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise unless a result of this shape and dtype, that of `of`, can be written to an array."""
    if not isinstance(out, np.ndarray):
        raise TypeError(f"`{name}` is a {type(out).__name__}; it must be a NumPy array like `{of}`")
    unmasked(name, out)
    if out.dtype != dtype:
        raise TypeError(
            f"`{name}` has dtype {cut(str(out.dtype))}; it must be that of `{of}`, {dtype}"
        )
    if out.shape != shape:
        raise ValueError(f"`{name}` has shape {out.shape}; it must be that of `{of}`, {shape}")
    if not out.flags.writeable:
        raise ValueError(f"`{name}` is read-only; the result cannot be written into it")
    if out.size and not apart_within(out):
        raise ValueError(f"`{name}` has strides {out.strides}; {APART}")


def _each_its_own(outs: Mapping[str, Array]) -> None:
    first, *others = outs.items()
    for name, out in others:
        if share(first[1], out):
            raise ValueError(
                f"`{name}` shares memory with `{first[0]}`; each result needs memory of its own"
            )


def out_pair(out: object, first: str = "q", second: str = "k") -> tuple[Any, Any]:
    """Return the two arrays of `out`, for what is named."""
    rule = f"it must be a pair of arrays, for {first} and for {second}"
    if not isinstance(out, tuple | list):
        raise TypeError(f"`out` is {_brief(out)}; {rule}")
    if len(out) != 2:
        raise TypeError(f"`out` is a {type(out).__name__} of {len(out)}; {rule}")
    return out[0], out[1]


def out_tables(out: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Return the two arrays of `out`; raise unless cos and sin of this shape and dtype can be written to them."""
    pair = out_pair(out, "cos", "sin")
    outs = dict(zip(("out[0]", "out[1]"), pair, strict=True))
    for (name, table), of in zip(outs.items(), ("cos", "sin"), strict=True):
        _output(name, table, of, shape, dtype)
    _each_its_own(outs)
    return pair


def tables(cos: object, sin: object, looked_up: bool, layout: str) -> tuple[Array, Array]:
    """Return cos and sin of `apply_rotary` if they are tables; looked_up: position ids choose their rows."""
    one_row = looked_up or layout == "thd"
    rows = (
        "(table, pairs)"
        if looked_up
        else "(tokens, pairs)"
        if one_row
        else "(seq, pairs) or (batch, seq, pairs)"
    )
    found = []
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, np.ndarray):
            raise TypeError(f"`{name}` is a {type(table).__name__}; it must be a NumPy array")
        unmasked(name, table)
        if table.dtype not in (np.float32, np.float64):
            raise TypeError(
                f"`{name}` has dtype {cut(str(table.dtype))}; it must be float32 or float64"
            )
        if table.ndim not in ((2,) if one_row else (2, 3)) or table.shape[-1] == 0:
            raise ValueError(
                f"`{name}` has shape {table.shape}; it must be {rows}, with at least one pair"
            )
        found.append(np.asarray(table))
    if found[0].shape != found[1].shape or found[0].dtype != found[1].dtype:
        a, b = (f"{table.dtype} {table.shape}" for table in found)
        raise ValueError(f"`cos` is {a}, but `sin` is {b}; they must be alike")
    return found[0], found[1]


def _brief(value: object) -> str:
    return f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)


def apart_within(x: Array) -> bool:
    """Return True if all elements certainly lie apart: every axis steps over all that lies closer together."""
    span = x.itemsize
    for step, count in sorted(
        (abs(step), count) for step, count in zip(x.strides, x.shape, strict=True) if count > 1
    ):
        if step < span:
            return False
        span += step * (count - 1)
    return True


def _same(a: Array, b: Array) -> bool:
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    return a.ctypes.data == b.ctypes.data and all(
        count <= 1 or one == other for count, one, other in steps
    )


def share(a: Array, b: Array) -> bool:
    """Return True if two arrays share an element, or it takes too long to find out: better refuse than overwrite."""
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True


_OVERLAP_WORK: Any = 10**6  # steps NumPy may take to find out
