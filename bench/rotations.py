"""Calls that rotate: those of rope_cpu, plans included, and the usual forms in NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np

from rope_cpu.array_types import Array

from .timing import Call
from .workloads import Pair, Workload


class UnavailableError(Exception):
    """A call that cannot be timed here; the message is the reason."""


def require_modules(*modules: str) -> None:
    """Raise UnavailableError unless all modules are installed."""
    for module in modules:
        if find_spec(module) is None:
            raise UnavailableError(f"{module} is not installed")


def require_whole_heads(workload: Workload) -> None:
    """Raise UnavailableError unless the rotation pairs the elements of whole head vectors."""
    rope = workload.rope
    if rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1:
        raise UnavailableError("rotates whole head vectors only")


def plan(workload: Workload) -> Call:
    """Rotate by a plan into given arrays."""
    return _call_into(workload, workload.rope.plan(workload.ids))


def plan_unaligned_out(workload: Workload) -> Call:
    """Rotate by a plan into arrays that start where large ones of NumPy do."""
    return plan(replace(workload, aligned_out=False))


def plan_new_arrays(workload: Workload) -> Call:
    """Rotate by a plan that allocates its results."""
    return Call(workload.rope.plan(workload.ids), workload.arrays(), tuple)


def make_plan(workload: Workload) -> Call:
    """Make the plan alone."""
    return Call(workload.rope.plan, [(workload.ids,)])


def single_call(workload: Workload) -> Call:
    """Rotate by calling the rotary embedding, with an offset for the tokens of one sequence."""
    ids = workload.ids
    given = {"offset": int(ids[0])} if ids.ndim == 1 else {"position_ids": ids}
    return _call_into(workload, partial(workload.rope, **given))


def _call_into(workload: Workload, function: Callable[..., Pair]) -> Call:
    """Return the call of a function that rotates into given arrays."""

    # By keyword, as programs do.
    def rotate(q: Array, k: Array, out: Pair) -> Pair:
        return function(q, k, out=out)

    return Call(rotate, workload.argument_sets(), tuple)


def rotate_half(workload: Workload) -> Call:
    """Rotate by x·cos + (x, elements of pairs swapped, one negated)·sin, in the compute dtype."""
    require_whole_heads(workload)
    cos, sin = (table[:, :, None] for table in workload.wide_cos_sin())
    interleaved = workload.rope.interleaved

    def rotate(x: Array) -> Array:
        if interleaved:
            swapped = np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
        else:
            half = x.shape[-1] // 2
            swapped = np.concatenate([-x[..., half:], x[..., :half]], -1)
        rotated: Array = x * cos + swapped * sin
        return rotated

    def rotate_both(q: Array, k: Array) -> list[Array]:
        wide = (x.astype(workload.compute_dtype, copy=False) for x in (q, k))
        return [rotate(x).astype(q.dtype, copy=False) for x in wide]

    return Call(rotate_both, workload.arrays(), tuple)
