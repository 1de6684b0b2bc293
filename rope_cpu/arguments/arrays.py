"""Checks of array arguments.

Each error names the argument, its value and the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import choice, refuse_masked
from rope_cpu.array_types import DTYPE_LIST, DTYPE_NAMES, LAYOUT_AXES, Array

_AXIS_NAMES = {"b": "batch", "s": "seq", "h": "heads", "d": "head_dim", "t": "tokens"}
_OVERLAP_WORK: Any = 10**6  # steps that NumPy may take to decide whether arrays overlap


def check_layout(value: object) -> str:
    """Return the layout; raise if it is unknown."""
    return choice("layout", value, tuple(LAYOUT_AXES))


def check_dtype(value: Any) -> np.dtype[Any]:
    """Return `value` as a dtype of arrays that can be rotated; raise for any other."""
    dtype: np.dtype[Any] | None = to_dtype(value)
    if dtype is None or dtype not in DTYPE_NAMES:
        raise ArgumentTypeError("dtype", value, f"be one of {DTYPE_LIST}")
    return dtype


def to_dtype(value: Any) -> Any:
    """Return `value` as a dtype, or None if it names none; NumPy would read None as float64."""
    if value is None:
        return None
    with suppress(Exception):  # NumPy's errors for a wrong dtype have no common class
        return np.dtype(value)


def not_an_array(name: str, value: object, like: str = "") -> ArgumentTypeError:
    """Return the error for an argument of another type, with the call that makes it an array.

    like: the rest of the rule for an output, for which a converted copy would be of no use.
    """
    remedy = ""
    dtype = _dtype_text(value)
    if value is None and name == "k":
        remedy = "`rotate(q)` rotates q alone"
    elif dtype == "torch.bfloat16":
        # PyTorch and NumPy exchange no bfloat16, but integers of the same bits.
        remedy = f"pass {name}.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"
    elif hasattr(value, "__dlpack__") and dtype != "bfloat16":
        # The arrays of PyTorch, JAX and others share their memory through DLPack.
        remedy = f"pass np.from_dlpack({name})"
    elif not like:
        remedy = f"pass np.asarray({name})"
    return ArgumentTypeError(name, Finding.type_of(value), f"be a NumPy array{like}", remedy)


def _dtype_text(value: Any) -> str:
    """Return the dtype of an array of another library as a text, "" if it has none."""
    with suppress(Exception):  # an array whose memory was given back raises errors of any class
        return str(value.dtype)
    return ""


def check_array(name: str, x: object, layout: str) -> Array:
    """Return `x` if it is an array that can be rotated in this layout; raise otherwise."""
    if type(x) is not np.ndarray:
        if not isinstance(x, np.ndarray):
            raise not_an_array(name, x)
        refuse_masked(name, x)
    if x.dtype not in DTYPE_NAMES:
        raise ArgumentTypeError(
            name, Finding.dtype_of(x), f"be one of {DTYPE_LIST} (native byte order)"
        )
    if x.ndim != len(layout):
        names = ", ".join(_AXIS_NAMES[letter] for letter in layout)
        raise ArgumentError(name, Finding.shape_of(x), f"be ({names}) in layout {layout}")
    return x


def check_inputs(
    inputs: Mapping[str, object],
    layout: str,
    head_dim: int,
    table: tuple[int, ...],
    token_source: str,
    row_source: str,
) -> None:
    """Raise unless every input fits head_dim, the shape of cos and sin, and the other inputs.

    table: (batch or 1, seq, frequency heads, pairs), the shape of cos and sin.
    token_source, row_source: subject of the error text where the number of tokens or batch rows
    differs, such as "positions are given for".
    """
    checked: dict[str, Array] = {}
    for name, value in inputs.items():
        x = check_array(name, value, layout)
        if x.shape[-1] != head_dim:
            rule = f"have that of this rotary embedding, {head_dim}"
            raise ArgumentError(name, Finding(f"has head_dim {x.shape[-1]}"), rule)
        for other_name, other in checked.items():
            _check_alike(name, x, other_name, other, layout)
        _check_table_fit(name, x, layout, table, token_source, row_source)
        checked[name] = x


def _check_table_fit(
    name: str,
    x: Array,
    layout: str,
    table: tuple[int, ...],
    token_source: str,
    row_source: str,
) -> None:
    """Raise unless tokens, batch and heads of `x` fit the shape of cos and sin."""
    batch_axis, token_axis, head_axis = LAYOUT_AXES[layout]
    rows, tokens, frequency_heads = table[:3]
    if x.shape[token_axis] != tokens:
        finding = Finding(f"has {x.shape[token_axis]} tokens, but {token_source} {tokens}")
        rule = f"have as many on axis {token_axis} of its shape {x.shape}, by layout {layout!r}"
        remedy = "check `layout`" if tokens in x.shape[:-1] else ""
        raise ArgumentError(name, finding, rule, remedy)
    batch = 1 if batch_axis is None else x.shape[batch_axis]
    if rows not in (1, batch):
        place = f"(layout {layout!r}, shape {x.shape})"
        finding = Finding(f"has batch {batch} {place}, but {row_source} {rows}")
        remedy = "pass one row, or one for each batch row"
        raise ArgumentError(name, finding, f"have batch {rows}", remedy)
    if x.shape[head_axis] % frequency_heads:
        rule = f"have a multiple of {frequency_heads}, the heads that cos and sin are for"
        raise ArgumentError(name, Finding(f"has {x.shape[head_axis]} heads"), rule)


def _check_alike(name: str, x: Array, other_name: str, other: Array, layout: str) -> None:
    """Raise unless two inputs have the same dtype, number of tokens and batch."""
    if other.dtype != x.dtype:
        raise ArgumentTypeError(
            name, Finding.dtype_of(x), f"have that of `{other_name}`, {other.dtype}"
        )
    batch_axis, token_axis, _ = LAYOUT_AXES[layout]
    if other.shape[token_axis] != x.shape[token_axis]:
        raise _unequal_lengths(name, x, other_name, other, layout)
    if batch_axis is not None and other.shape[batch_axis] != x.shape[batch_axis]:
        rule = f"have that of `{other_name}`, {other.shape[batch_axis]}"
        raise ArgumentError(name, Finding(f"has batch {x.shape[batch_axis]}"), rule)


def _unequal_lengths(
    name: str, x: Array, other_name: str, other: Array, layout: str
) -> ArgumentError:
    """Return the error for two inputs that differ in their number of tokens."""
    _, token_axis, head_axis = LAYOUT_AXES[layout]
    tokens = x.shape[token_axis]
    other_tokens = other.shape[token_axis]
    remedy = (
        "rotate arrays of unequal lengths one at a time, for example "
        f"rope.rotate({other_name}, offset=…)"
    )
    # Query heads that share key heads, in another layout, look like tokens of unequal number.
    same_heads = x.shape[head_axis] == other.shape[head_axis]
    if same_heads and 0 < tokens < other_tokens and other_tokens % tokens == 0:
        remedy += (
            f"; if axis {token_axis} of the shapes {other.shape} and {x.shape} counts heads, "
            f"`layout` is not {layout!r}"
        )
    rule = f"have as many as `{other_name}`, {other_tokens}"
    return ArgumentError(name, Finding(f"has {tokens} tokens"), rule, remedy)


def check_outputs(outputs: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raise unless each output is its input (in place) or shares no element with any input."""
    for (name, out), (input_name, x) in zip(outputs.items(), inputs.items(), strict=True):
        check_output(name, out, input_name, x.shape, x.dtype)
        for other_name, other in inputs.items():
            in_place = other_name == input_name and _same_elements(x, out)
            if not in_place and share_memory(out, other):
                shares = Finding(f"shares memory with `{other_name}`")
                rule = "be the very same array (in place) or share nothing with the inputs"
                raise ArgumentError(name, shares, rule)
    _check_separate(outputs)


def check_output(
    name: str, out: Any, input_name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raise unless a result of this shape and dtype can be written to `out`."""
    if not isinstance(out, np.ndarray):
        raise not_an_array(name, out, f" like `{input_name}`")
    refuse_masked(name, out)
    if out.dtype != dtype:
        raise ArgumentTypeError(name, Finding.dtype_of(out), f"be that of `{input_name}`, {dtype}")
    if out.shape != shape:
        raise ArgumentError(name, Finding.shape_of(out), f"be that of `{input_name}`, {shape}")
    if not out.flags.writeable:
        raise ArgumentError(name, Finding("is read-only"), "be writeable")
    if out.size and not elements_disjoint(out):
        overlap = Finding(f"has overlapping elements (strides {out.strides})")
        raise ArgumentError(name, overlap, "be an array whose elements share no memory")


def _check_separate(outputs: Mapping[str, Array]) -> None:
    """Raise if the first output shares memory with another."""
    (first_name, first), *others = outputs.items()
    for name, out in others:
        if share_memory(first, out):
            shares = Finding(f"shares memory with `{first_name}`")
            raise ArgumentError(name, shares, "have memory of its own")


def check_out_pair(out: object, first: str = "q", second: str = "k") -> tuple[Any, Any]:
    """Return the two arrays of `out`; `first` and `second` name their contents in error texts."""
    rule = f"be a pair of arrays, for {first} and for {second}"
    if not isinstance(out, tuple | list):
        value = Finding.shape_of(out) if isinstance(out, np.ndarray) else out
        raise ArgumentTypeError("out", value, rule)
    if len(out) != 2:
        raise ArgumentTypeError("out", Finding(f"is a {type(out).__name__} of {len(out)}"), rule)
    return out[0], out[1]


def check_out_tables(
    out: object, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the two arrays of `out`; raise unless cos and sin can be written to them."""
    cos, sin = check_out_pair(out, "cos", "sin")
    check_output("out[0]", cos, "cos", shape, dtype)
    check_output("out[1]", sin, "sin", shape, dtype)
    _check_separate({"out[0]": cos, "out[1]": sin})
    return cos, sin


def check_tables(cos: object, sin: object, looked_up: bool, layout: str) -> tuple[Array, Array]:
    """Return the cos and sin of `apply_rotary`.

    looked_up: position ids choose the rows of the tables.
    """
    dimensions: tuple[int, ...] = (2, 3)
    if looked_up:
        rule = "(table, pairs) or (table, heads, pairs)"
    elif layout == "thd":
        rule = "(tokens, pairs) or (tokens, heads, pairs)"
    else:
        rule = "(seq, pairs), (batch, seq, pairs), or with heads before the pairs"
        dimensions = (2, 3, 4)
    cos = _check_table("cos", cos, dimensions, rule)
    sin = _check_table("sin", sin, dimensions, rule)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        finding = Finding(f"is {sin.dtype} {sin.shape}")
        rule = f"have the dtype and shape of `cos`, {cos.dtype} {cos.shape}"
        raise ArgumentError("sin", finding, rule)
    return cos, sin


def _check_table(name: str, table: object, dimensions: tuple[int, ...], rule: str) -> Array:
    """Return cos or sin; raise unless it is a float array of the given number of dimensions."""
    if not isinstance(table, np.ndarray):
        raise not_an_array(name, table)
    refuse_masked(name, table)
    if table.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(name, Finding.dtype_of(table), "be float32 or float64")
    if table.ndim not in dimensions or table.shape[-1] == 0:
        raise ArgumentError(name, Finding.shape_of(table), f"be {rule}, with at least one pair")
    return np.asarray(table)


def elements_disjoint(x: Array) -> bool:
    """Return True if no two elements of `x` share memory.

    Each axis must step over the memory of all axes with smaller strides. The test is sufficient,
    not necessary: some arrays without overlap fail it.
    """
    if x.flags.forc:
        return True
    axes = [(abs(step), size) for step, size in zip(x.strides, x.shape, strict=True) if size > 1]
    span = x.itemsize
    for step, size in sorted(axes):
        if step < span:
            return False
        span += step * (size - 1)
    return True


def _same_elements(a: Array, b: Array) -> bool:
    """Return True if two arrays of one shape have the same address and strides."""
    if a.ctypes.data != b.ctypes.data:
        return False
    axes = zip(a.shape, a.strides, b.strides, strict=True)
    return all(size <= 1 or a_step == b_step for size, a_step, b_step in axes)


def share_memory(a: Array, b: Array) -> bool:
    """Return True if two arrays share an element, or if the answer takes too long.

    A refused call is better than an overwritten input.
    """
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)
    except np.exceptions.TooHardError:
        return True
