"""The rotation kernel: q and k of any strides in one launch, checked in compiled code.

A kernel that finds its arguments unfit writes nothing and returns LOOK_CLOSER; `_check` then says in words what is
wrong, or brings the arguments into a form the kernel takes. So a good call pays for its checks in compiled code alone.
It also says when it is told of another dtype, and when it needs threads that are not started.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from rope_cpu._compile import DONE, LOOK_CLOSER, NO_THREADS, OTHER_DTYPE, SOURCES, Kernel, compiled, entry_point
from rope_cpu._integers import choose, emitted, every
from rope_cpu._objects import ITEMS, OBJECT, items, location, look, sort, view, where
from rope_cpu._overlap import aliasing_allowed, are_tables, fits, in_place
from rope_cpu._pool import THREADS, share
from rope_cpu._units import FEW_TOKENS, divide
from rope_cpu._words import LINE, allocate, call, fetch, free, greatest, least, load, pointer, spill

ALONE, TRUSTED = 1, 2  # flags of a rotation
FIRST = 4  # times a position, added to flags
# Of a rotation on the way: elements of q, up to which it is faster, and the position, which others are added to.
FEW_ELEMENTS, _FURTHEST = 2**17, 2**52
LAYOUTS = {"bshd": 0, "bhsd": 1, "sbhd": 2, "thd": 0}  # thd comes as a batch of one

_BLOCKS = 17  # where the pairs of blocks begin in a form
# Elements of q and k for which one more thread than two may be woken: that takes longer the slower the processor.
_ONE_MORE = 2**15
# Bytes of the heads that go together: what is read, fetched ahead and written fits three times into the first cache.
_NEAREST = 2**14
# Bytes of a run of tokens of one head that are in the first cache: cos and sin, what is read and what is written.
_RUN = 2**15

_ARRAY = types.Tuple((types.int64, *(types.UniTuple(types.int64, 4),) * 2))


@emitted(_ARRAY)
def _in_order(array, layout):
    """Return an array (address, shape, strides) with its axes in the order batch, token, head, element."""
    at, *both = array
    by_head, by_token = layout == LAYOUTS["bhsd"], layout == LAYOUTS["sbhd"]
    return at, *(
        (
            choose(by_token, second, first),
            choose(by_token, first, choose(by_head, third, second)),
            choose(by_head, second, third),
            last,
        )
        for first, second, third, last in both
    )


@emitted(types.boolean)
def _usable(sorts, writeable):
    """Tell whether all are arrays, and outputs may be written to."""
    return every(*(sort != 0 for sort in sorts), *writeable)


@emitted(types.boolean)
def _alike(sorts, sort):
    """Tell whether all are of one sort."""
    return every(*(other == sort for other in sorts))


@emitted(types.boolean)
def _fit(q, k, out_q, out_k, both, table, size, width):
    """Tell whether arrays can be rotated as they stand."""
    k_fits = fits(k, out_k, table, size, width) & (q[1][0] == k[1][0])
    return fits(q, out_q, table, size, width) & (k_fits | ~both)


@cache
def rotation(size: int, on_the_way: bool) -> Kernel:
    """Return the kernel (q, k, out, prepared, flags) → DONE, LOOK_CLOSER, OTHER_DTYPE or NO_THREADS.

    size: bytes of an element. q, k: any objects; what is no array of as many axes as the layout has, in its order, is
    not touched. If q is of another dtype than the form is for, OTHER_DTYPE. out: a pair of the like. prepared: a tuple
    of this kernel, of cos and sin, float32 (float64 for float64), (batch or 1, seq, frequency heads, pairs), and of the
    form, see `numbers`. flags: ALONE rotates q only, into out itself (k is then ignored); TRUSTED says that dtypes and
    aliasing were checked before.

    on_the_way: of tokens at consecutive positions, compute cos and sin; in their place come turns and factor, as
    `_angles.angles` takes them, and flags hold also the first position times FIRST. Many tokens need a closer look.

    The caller holds the arrays, and nobody else changes their shape meanwhile.
    """
    look()
    sources, real_size = SOURCES, max(size, 4)

    def rotate(q, k, out, prepared, flags):
        _ = sources  # a part of the cache key
        _kernel, cos, sin, form = fetch(where(prepared) + ITEMS, 4)
        told, told_shape = location(form)
        words = fetch(told, _BLOCKS)
        work, layout, width, circles, sign, kind, pair, rank, sort, worth, in_use = words[:11]
        both, trusted = flags & ALONE == 0, flags & TRUSTED
        out_q, out_k = items(where(out), pair) if both else (where(out), where(out))
        if out_q == 0:
            return LOOK_CLOSER
        q_lies, q_sort, _read = view(where(q), kind, rank)
        k_lies, k_sort, _read = view(where(k), kind, rank)
        oq_lies, oq_sort, oq_writeable = view(out_q, kind, rank)
        ok_lies, ok_sort, ok_writeable = view(out_k, kind, rank)
        sorts = q_sort, k_sort, oq_sort, ok_sort
        if not _usable(sorts, (oq_writeable, ok_writeable)):
            return LOOK_CLOSER
        if not trusted and not _alike(sorts, sort):
            return LOOK_CLOSER if q_sort == sort else OTHER_DTYPE
        q_lies, k_lies = _in_order(q_lies, layout), _in_order(k_lies, layout)
        oq_lies, ok_lies = _in_order(oq_lies, layout), _in_order(ok_lies, layout)
        q_shape, k_heads = q_lies[1], k_lies[1][2] if both else 0
        batch, tokens, q_heads, _width = q_shape

        q_elements = batch * tokens * q_heads * width
        # Without heads there may be any number of tokens.
        if on_the_way and (greatest(q_elements, tokens) > FEW_ELEMENTS or abs(flags // FIRST) > _FURTHEST):
            return LOOK_CLOSER
        if on_the_way:
            (turns, turns_shape), (factor, _rows) = location(cos), location(sin)
            turn_rows, axes, table_heads, _two, table_pairs = fetch(turns_shape, 5)
            head = table_pairs * real_size
            row, table_size = table_heads * head, turn_rows * tokens * table_heads * head
            table, steps = (turn_rows, tokens, table_heads, table_pairs), (tokens * row, row, head, real_size)
            cos_lies = sin_lies = 0, table, steps
        else:
            four = greatest(rank, 4)  # a literal would have `view` compiled once more
            cos_lies, sin_lies = view(cos, kind, four)[0], view(sin, kind, four)[0]
            if not are_tables(cos_lies, sin_lies, real_size):
                return LOOK_CLOSER
            table = cos_lies[1]

        if not _fit(q_lies, k_lies, oq_lies, ok_lies, both, table, size, width):
            return LOOK_CLOSER
        elements = q_elements + batch * tokens * k_heads * width
        # Few tokens of one sequence are two units, q and k, and shared only if these are about equal.
        shared = batch > 1 or tokens > FEW_TOKENS or q_heads <= 2 * k_heads
        pool = load(in_use, 0) if elements >= 2 * worth and shared else 0
        if pool < 0 and not trusted:
            return NO_THREADS
        q_in_place, k_in_place = in_place(q_lies, oq_lies), in_place(k_lies, ok_lies)
        if not trusted and not aliasing_allowed(q_lies, q_in_place, k_lies, k_in_place, oq_lies, ok_lies, both, size):
            return LOOK_CLOSER

        if on_the_way:
            # Positions, to the end of a memory line, then cos and sin.
            before = (8 * tokens + LINE - 1) & -LINE
            memory = allocate(LINE + before + 2 * table_size)
            if memory == 0:
                return LOOK_CLOSER
            positions = (memory + LINE) & -LINE
            for n in range(tokens):
                pointer(positions, "float64")[n] = flags // FIRST + n
            c_at = positions + before
            s_at = c_at + table_size
            circle = spill((
                positions, 1, 1, turns, turn_rows, axes, table_heads, table_pairs, factor, sign, c_at, s_at, tokens,
            ))  # fmt: skip
            call(circles, (circle, 0, turn_rows * tokens))
            cos_lies, sin_lies = (c_at, table, steps), (s_at, table, steps)
        most = least(elements // worth, 2 + elements // _ONE_MORE) if pool > 0 else 1
        threads = least(most, load(pool, THREADS)) if pool > 0 else 1
        blocks = told + 8 * _BLOCKS, fetch(told_shape, 1)[0] - _BLOCKS
        q_side, k_side = (q_lies, oq_lies, q_in_place), (k_lies, ok_lies, k_in_place)
        units, job = divide(q_side, k_side, both, cos_lies, sin_lies, words[11:], blocks, most, threads, size)
        share(pool, work, spill(job), units, most)
        if on_the_way:
            free(memory)
        return DONE

    name = "rotation_at" if on_the_way else "rotation"
    return compiled(rotate, f"{name}_{size}", (*(OBJECT,) * 4, types.int64))


@cache
def quick_rotation(size: int, on_the_way: bool) -> Kernel:
    """Return the same to be called from Python."""
    return entry_point(rotation(size, on_the_way))


def numbers(
    work: int,
    dtype: np.dtype[Any],
    layout: str,
    head_dim: int,
    stream_above: int,
    in_use: int,
    pairs: Sequence[int],
    angles: Sequence[int] = (0, 0),
    worth: int = 2**15,
) -> NDArray[np.int64]:
    """Return what a kernel is told of the form of arrays.

    work: where `rows` is. stream_above: bytes above which results are stored past the caches. in_use: where the address
    of the pool stands whose threads share the work: at that place 0 means none, −1 that it is not started. pairs: of
    each block. angles: for a rotation on the way, where `circles` is, and the sign. worth: how many elements are worth
    a thread.
    """
    seen = id(np.ndarray), id(tuple), 3 if layout == "thd" else 4, sort(dtype)
    size, rotated = dtype.itemsize, 2 * sum(pairs) * dtype.itemsize
    row = head_dim * size
    tile, together = _RUN // (head_dim * (max(size, 4) + 2 * size)), max(_NEAREST // row, 1)
    shape = stream_above, max(tile, 8), together, rotated, row - rotated, min(pairs)
    return np.array([work, LAYOUTS[layout], head_dim, *angles, *seen, worth, in_use, *shape, *pairs], np.int64)
