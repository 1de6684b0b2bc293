"""Calls that rotate a workload: those of rope_cpu, and the usual forms in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from rope_cpu.array_types import DTYPES, Array

from .measure import UnavailableError
from .timing import Call
from .workload import Pair, Workload


def require(
    workload: Workload,
    *,
    modules: Sequence[str] = (),
    dtypes: Sequence[str] = tuple(DTYPES),
    pairings: Sequence[bool] = (False, True),
    one_axis: bool = False,
) -> None:
    """Raise UnavailableError unless an implementation of whole head vectors supports a workload.

    modules: modules that it imports. dtypes, pairings (interleaved or not): those that it has.
    one_axis: whether it supports one position per token only.
    """
    rope = workload.rope
    for module in modules:
        if find_spec(module) is None:
            raise UnavailableError(f"{module} is not installed")
    if workload.dtype not in dtypes:
        raise UnavailableError(f"has no {workload.dtype}")
    if rope.interleaved not in pairings:
        raise UnavailableError("rotates the other pairing only")
    if rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1:
        raise UnavailableError("rotates whole head vectors only")
    if one_axis and rope.axes > 1:
        raise UnavailableError("takes one position per token")


def as_returned(returned: Any) -> Pair:
    """Return q and k of a function that returns them as NumPy arrays in the input's layout."""
    q, k = returned
    return q, k


def bshd_axes(x: Array) -> Array:
    """Return an array that has the axes (batch, seq, heads, head_dim) already."""
    return x


def rotation_call(
    workload: Workload,
    function: Callable[..., Any],
    argument_sets: Sequence[tuple[Any, ...]],
    inputs: Pair,
    *,
    arithmetic: str = "float32",
    results: Callable[[Any], Pair] = as_returned,
    bshd: Callable[[Array], Array] = bshd_axes,
) -> Call:
    """Return a call whose first result is checked against the exact rotation.

    inputs: q and k of the first set, as NumPy arrays; copied, since a call may overwrite them.
    arithmetic: see `Workload.error`. results: converts a returned value to NumPy arrays.
    bshd: converts inputs and results to axes (batch, seq, heads, head_dim).
    """

    def checked(x: Array) -> Array:
        return bshd(x)[:, workload.checked_tokens].copy()

    originals = [checked(x) for x in inputs]

    def error(returned: Any) -> float:
        pairs = zip(originals, results(returned), strict=True)
        return max(workload.error(x, checked(result), arithmetic) for x, result in pairs)

    return Call(function, argument_sets, workload.bytes_accessed, error)


def plan(workload: Workload) -> Call:
    """Rotate by a plan into given arrays."""
    rotary_plan = workload.rope.plan(workload.ids, layout=workload.layout)
    argument_sets = workload.argument_sets()
    q, k, _ = argument_sets[0]

    # By keyword, as programs do, and through a function, like `single_call`.
    def rotate(q: Array, k: Array, out: Pair) -> Pair:
        return rotary_plan(q, k, out=out)

    return rotation_call(workload, rotate, argument_sets, (q, k), bshd=workload.bshd)


def plan_new_arrays(workload: Workload) -> Call:
    """Rotate by a plan that allocates its results."""
    rotary_plan = workload.rope.plan(workload.ids, layout=workload.layout)
    pairs = workload.arrays()
    return rotation_call(workload, rotary_plan, pairs, pairs[0], bshd=workload.bshd)


def single_call(workload: Workload) -> Call:
    """Rotate by calling the rotary embedding, with an offset if positions are consecutive."""
    rope = workload.rope
    ids = workload.ids
    layout = workload.layout
    argument_sets = workload.argument_sets()
    q, k, _ = argument_sets[0]

    if rope.axes == 1 and layout != "thd" and _are_consecutive(ids):
        first = np.atleast_2d(ids)[:, 0]
        offset = int(first[0]) if len(first) == 1 else first

        def rotate(q: Array, k: Array, out: Pair) -> Pair:
            return rope(q, k, offset=offset, layout=layout, out=out)
    else:

        def rotate(q: Array, k: Array, out: Pair) -> Pair:
            return rope(q, k, ids, layout=layout, out=out)

    return rotation_call(workload, rotate, argument_sets, (q, k), bshd=workload.bshd)


def _are_consecutive(ids: Array) -> bool:
    rows = np.atleast_2d(ids)
    _, tokens = rows.shape
    return np.array_equal(rows, rows[:, :1] + np.arange(tokens))


def rotate_half(workload: Workload) -> Call:
    """Rotate by x·cos + (x, halves swapped, one negated)·sin, cos and sin of head_dim width."""
    require(workload, pairings=(False,))
    cos, sin = (table[:, :, None] for table in workload.wide_cos_sin())

    def rotate(x: Array) -> Array:
        half = x.shape[-1] // 2
        rotated: Array = x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin
        return rotated

    return _pair_call(workload, rotate)


def complex_product(workload: Workload) -> Call:
    """Rotate interleaved pairs by the product of x_a + i·x_b with cos + i·sin."""
    require(workload, pairings=(True,))
    cos, sin = workload.cos_sin()
    factors = (cos + 1j * sin)[:, :, None]

    def rotate(x: Array) -> Array:
        rotated: Array = (x.view(factors.dtype) * factors).view(x.dtype)
        return rotated

    return _pair_call(workload, rotate)


def _pair_call(workload: Workload, rotate: Callable[[Array], Array]) -> Call:
    pairs = workload.bshd_arrays()
    first_q, _ = pairs[0]
    dtype = first_q.dtype
    compute_dtype = workload.compute_dtype

    def rotate_pair(q: Array, k: Array) -> Pair:
        return rotate(q), rotate(k)

    def rotate_wider_pair(q: Array, k: Array) -> Pair:
        q_rot = rotate(q.astype(compute_dtype)).astype(dtype)
        k_rot = rotate(k.astype(compute_dtype)).astype(dtype)
        return q_rot, k_rot

    function = rotate_pair if dtype == compute_dtype else rotate_wider_pair
    return rotation_call(workload, function, pairs, pairs[0])
