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
from rope_cpu.array_types import DTYPE_LIST, DTYPE_NAMES, LAYOUT_AXES, LAYOUTS, Array

_AXIS_NAMES = {"b": "batch", "s": "seq", "h": "heads", "d": "head_dim", "t": "tokens"}
_OVERLAP_WORK: Any = 10**6  # steps that NumPy may take to decide whether arrays overlap


def check_layout(value: object) -> str:
    """Return the layout; raise if it is unknown."""
    return choice("layout", value, LAYOUTS)


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


def _conversion(name: str, value: Any) -> str:
    """Return how an array of another library becomes one of NumPy, "" for anything else."""
    dtype = ""
    with suppress(Exception):  # an array whose memory was given back raises errors of any class
        dtype = str(value.dtype)
    if dtype == "torch.bfloat16":
        # PyTorch and NumPy exchange no bfloat16, but integers of the same bits.
        return f"pass {name}.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"
    if hasattr(value, "__dlpack__") and dtype != "bfloat16":
        # The arrays of PyTorch, JAX and others share their memory through DLPack.
        return f"pass np.from_dlpack({name})"
    return ""


def plain_array(name: str, value: object, like: str = "") -> Array:
    """Return `value` if it is a NumPy array and not masked; raise otherwise.

    like: the rest of the rule.
    """
    if not isinstance(value, np.ndarray):
        rule = f"be a NumPy array{like}"
        raise ArgumentTypeError(name, Finding.type_of(value), rule, _conversion(name, value))
    refuse_masked(name, value)
    return value


def check_array(name: str, x: object, layout: str) -> Array:
    """Return `x` if it is an array that can be rotated in this layout; raise otherwise."""
    if type(x) is not np.ndarray:
        x = plain_array(name, x)
    if x.dtype not in DTYPE_NAMES:
        raise ArgumentTypeError(
            name, Finding.dtype_of(x), f"be one of {DTYPE_LIST} (native byte order)"
        )
    if x.ndim != len(layout):
        names = ", ".join(_AXIS_NAMES[letter] for letter in layout)
        raise ArgumentError(name, Finding.shape_of(x), f"be ({names}) in layout {layout}")
    return x


def serves_any_tokens(cos_sin: Array) -> bool:
    """Return True for cos and sin of one token that rotate any number of them, by a stride of 0."""
    return cos_sin.shape[2] == 1 and cos_sin.strides[2] == 0


def check_inputs(inputs: Mapping[str, object], layout: str, head_dim: int, cos_sin: Array) -> None:
    """Raise unless every input fits head_dim, cos and sin, and the other inputs.

    cos_sin: (2, batch or 1, seq, frequency heads, pairs).
    """
    checked: dict[str, Array] = {}
    for name, value in inputs.items():
        x = check_array(name, value, layout)
        if x.shape[-1] != head_dim:
            rule = f"have that of this rotary embedding, {head_dim}"
            raise ArgumentError(name, Finding(f"has head_dim {x.shape[-1]}"), rule)
        for other_name, other in checked.items():
            _check_alike(name, x, other_name, other, layout)
        batch_axis, token_axis, head_axis = LAYOUT_AXES[layout]
        batch = 1 if batch_axis is None else x.shape[batch_axis]
        check_tokens(name, batch, x.shape[token_axis], layout, cos_sin)
        check_heads(name, x.shape[head_axis], cos_sin)
        checked[name] = x


def check_tokens(name: str, batch: int, tokens: int, layout: str, cos_sin: Array) -> None:
    """Raise unless cos and sin are for the tokens of an argument in this layout."""
    _, rows, positions, _, _ = cos_sin.shape
    if tokens != positions and not serves_any_tokens(cos_sin):
        rule = f"have {positions}, for which positions, or cos and sin, are given"
        raise ArgumentError(name, Finding(f"has {tokens} tokens by layout {layout!r}"), rule)
    if rows not in (1, batch):
        rule = f"have batch {rows}, for which positions, lengths, or cos and sin, are given"
        raise ArgumentError(name, Finding(f"has batch {batch} by layout {layout!r}"), rule)


def check_heads(name: str, heads: int, cos_sin: Array) -> None:
    """Raise unless cos and sin are for as many heads, or as many groups of heads."""
    if heads % cos_sin.shape[3]:
        rule = f"have a multiple of {cos_sin.shape[3]}, the heads that cos and sin are for"
        raise ArgumentError(name, Finding(f"has {heads} heads"), rule)


def _check_alike(name: str, x: Array, other_name: str, other: Array, layout: str) -> None:
    """Raise unless two inputs have the same dtype, number of tokens and batch."""
    if other.dtype != x.dtype:
        raise ArgumentTypeError(
            name, Finding.dtype_of(x), f"have that of `{other_name}`, {other.dtype}"
        )
    batch_axis, token_axis, _ = LAYOUT_AXES[layout]
    for unit, axis in (("tokens", token_axis), ("batch rows", batch_axis)):
        if axis is not None and other.shape[axis] != x.shape[axis]:
            rule = f"have as many as `{other_name}`, {other.shape[axis]}, by layout {layout!r}"
            raise ArgumentError(name, Finding(f"has {x.shape[axis]} {unit}"), rule)


def check_outputs(outputs: Mapping[str, Any], inputs: Mapping[str, Array]) -> None:
    """Raise unless each output is its input (in place) or shares no element with any input.

    outputs: for the first inputs.
    """
    for (name, out), (input_name, x) in zip(outputs.items(), inputs.items(), strict=False):
        check_output(name, out, input_name, x.shape, x.dtype)
        others = dict(inputs)
        if _same_elements(x, out):
            del others[input_name]
        rule = "be the very same array (in place) or share nothing with the inputs"
        refuse_shared(name, out, others, rule)
    (first_name, first), *later = outputs.items()
    for name, out in later:
        refuse_shared(name, out, {first_name: first})


def check_output(
    name: str, out: Any, input_name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """Raise unless a result of this shape and dtype can be written to `out`."""
    plain_array(name, out, f" like `{input_name}`")
    if out.dtype != dtype:
        raise ArgumentTypeError(name, Finding.dtype_of(out), f"be that of `{input_name}`, {dtype}")
    if out.shape != shape:
        raise ArgumentError(name, Finding.shape_of(out), f"be that of `{input_name}`, {shape}")
    if not out.flags.writeable:
        raise ArgumentError(name, Finding("is read-only"), "be writeable")
    if out.size:
        refuse_overlap(name, out)


def refuse_shared(
    name: str,
    x: Array,
    others: Mapping[str, Array],
    rule: str = "have memory of its own",
    remedy: str = "",
) -> None:
    """Raise if an array shares memory with one of the others."""
    for other_name, other in others.items():
        if share_memory(x, other):
            shares = Finding(f"shares memory with `{other_name}`")
            raise ArgumentError(name, shares, rule, remedy)


def refuse_overlap(name: str, x: Array) -> None:
    """Raise if two elements of an array share memory."""
    if not elements_disjoint(x):
        overlap = Finding(f"has overlapping elements (strides {x.strides})")
        raise ArgumentError(name, overlap, "be an array whose elements share no memory")


def named_pair(out: object) -> dict[str, Any] | None:
    """Return the outputs for q and for k by name; None if there are none."""
    if out is None:
        return None
    rule = "be a pair of arrays, for q and for k"
    if not isinstance(out, tuple | list):
        value = Finding.shape_of(out) if isinstance(out, np.ndarray) else out
        raise ArgumentTypeError("out", value, rule)
    if len(out) != 2:
        raise ArgumentTypeError("out", Finding(f"is a {type(out).__name__} of {len(out)}"), rule)
    return {"out[0]": out[0], "out[1]": out[1]}


def check_tables(cos: object, sin: object, looked_up: bool, layout: str) -> tuple[Array, Array]:
    """Return the cos and sin of `apply_rotary`.

    looked_up: position ids choose the rows of the tables.
    """
    is_batched = not looked_up and layout != "thd"
    cos = _check_table("cos", cos, is_batched)
    sin = _check_table("sin", sin, is_batched)
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        finding = Finding(f"is {sin.dtype} {sin.shape}")
        rule = f"have the dtype and shape of `cos`, {cos.dtype} {cos.shape}"
        raise ArgumentError("sin", finding, rule)
    return cos, sin


def _check_table(name: str, table: object, is_batched: bool) -> Array:
    """Return cos or sin; raise unless it is a float array that may have a batch axis."""
    table = plain_array(name, table)
    if table.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(name, Finding.dtype_of(table), "be float32 or float64")
    if not 2 <= table.ndim <= 3 + is_batched or table.shape[-1] == 0:
        batched = " or (batch, seq, pairs)" if is_batched else ""
        rule = f"be (tokens, pairs){batched}, or with heads before the pairs, of at least one pair"
        raise ArgumentError(name, Finding.shape_of(table), rule)
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
