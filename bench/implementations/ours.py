"""The rotations of rope_cpu: a plan, in place or into new arrays, and a single call."""

from __future__ import annotations

import numpy as np

from rope_cpu.array_types import Array

from ..measurement.timing import Call
from ..workload import Pair, Workload
from .rotation_call import rotation_call


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
    return rotation_call(workload, rotary_plan, pairs, pairs[0], bshd=workload.bshd, allocates=True)


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
