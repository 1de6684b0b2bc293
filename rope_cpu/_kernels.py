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
from rope_cpu._integers import choose, emitted, every, larger, number
from rope_cpu._objects import ITEMS, OBJECT, items, location, look, sort, view, where
from rope_cpu._overlap import aliasing_allowed, fits, in_place
from rope_cpu._part import FEW
from rope_cpu._pool import THREADS, share
from rope_cpu._words import LINE, allocate, call, fetch, free, greatest, least, load, pointer, spill

ALONE, TRUSTED = 1, 2  # flags of a rotation
FIRST = 4  # times a position, added to flags
# Of a rotation on the way: elements of q, up to which it is faster, and the position, which others are added to.
FEW_ELEMENTS, _FURTHEST = 2**17, 2**52
LAYOUTS = {"bshd": 0, "bhsd": 1, "sbhd": 2, "thd": 0}  # thd comes as a batch of one

_BLOCKS = 12  # where the pairs of blocks begin in a form
# Elements of q and k for which one more thread than two may be woken: that takes longer the slower the processor.
_ONE_MORE = 2**15
# Bytes of the heads that go together: what is read, fetched ahead and written fits three times into the first cache.
_NEAREST = 2**14
_LONG_ROW, _WORD = 128, 8  # bytes: of a row that is stored past the caches, and of what is stored at a time
# As many tokens are gone through one by one, wherever they lie.
_FEW_TOKENS = 8
# Bytes of a run of tokens of one head that are in the first cache: cos and sin, what is read and what is written.
_RUN = 2**15
# With fewer runs than these, threads share heads instead of tokens: where tokens are neighbours, rows of two threads
# have a memory line in common, for each head.
_FEW_RUNS = 64
# Bytes of q and k that are in the second cache of a thread: loads and stores are what limits wide elements there, so
# asking for them ahead costs more than it saves.
_NEAR = 2**20


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


@emitted(types.UniTuple(types.int64, 2))
def _tiles(tokens, by_head, row):
    """Return how many tokens go together, and how often: few, or as many of one head as the first cache holds.

    row: bytes of what is read, written and multiplied for a token of a head.
    """
    tile = choose(by_head, larger(_RUN // row, 8), 8)
    tiles = (tokens + tile - 1) // tile
    return (tokens + tiles - 1) // tiles, tiles  # as many in each, about


@emitted(types.UniTuple(types.int64, 3))
def _far_large_stream(total, threads, elsewhere, by_head, row, size, fewest, kept, stream_above):
    """Return whether to fetch ahead, how large arrays are, and whether to store past the caches; see `rotate_rows`."""
    beyond, half = total > stream_above, total > stream_above // 5 * 2
    # Past the caches: not shorter rows, which take longer that way, nor what would have to be stored by less than a
    # word: pairs one by one, and what is kept of a row.
    stream = every(elsewhere, beyond, row >= _LONG_ROW, fewest >= FEW, (kept == 0) | (kept >= _WORD))
    # 1: only across gaps, as the hardware does well without, 2: everywhere. Where is a matter of measurement.
    far = choose(by_head, total > 2 * _NEAR, (size == 2) | (total > threads * _NEAR))
    everywhere = every(far, ~by_head, stream | (~elsewhere & half))
    large = number(total >= stream_above // 5) + number(beyond)
    return number(far) + number(everywhere), large, number(stream)


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
        work, layout, width, stream_above, circles, sign, kind, pair, rank, sort, worth, in_use = fetch(told, _BLOCKS)
        blocks = fetch(told_shape, 1)[0] - _BLOCKS
        both, trusted = not flags & ALONE, flags & TRUSTED
        q_is, k_is = where(q), where(k)
        out_q, out_k = items(where(out), pair) if both else (where(out), where(out))
        if out_q == 0:
            return LOOK_CLOSER
        q_lies, q_sort, _read = view(q_is, kind, rank)
        k_lies, k_sort, _read = view(k_is, kind, rank)
        oq_lies, oq_sort, oq_writeable = view(out_q, kind, rank)
        ok_lies, ok_sort, ok_writeable = view(out_k, kind, rank)
        if not (q_sort and k_sort and oq_sort and ok_sort and oq_writeable and ok_writeable):
            return LOOK_CLOSER
        if not trusted and not q_sort == k_sort == oq_sort == ok_sort == sort:
            return LOOK_CLOSER if q_sort == sort else OTHER_DTYPE
        q_lies, k_lies = _in_order(q_lies, layout), _in_order(k_lies, layout)
        oq_lies, ok_lies = _in_order(oq_lies, layout), _in_order(ok_lies, layout)
        (q_at, q_shape, q_strides), (k_at, k_shape, k_strides) = q_lies, k_lies
        (oq_at, _shape, oq_strides), (ok_at, _shape, ok_strides) = oq_lies, ok_lies

        q_elements = q_shape[0] * q_shape[1] * q_shape[2] * width
        # Without heads there may be any number of tokens.
        if on_the_way and (greatest(q_elements, q_shape[1]) > FEW_ELEMENTS or abs(flags // FIRST) > _FURTHEST):
            return LOOK_CLOSER
        if on_the_way:
            (turns, turns_shape), (factor, _rows) = location(cos), location(sin)
            turn_rows, axes, table_heads, _two, table_pairs = fetch(turns_shape, 5)
            table = turn_rows, q_shape[1], table_heads, table_pairs
            head = table_pairs * real_size
            row, table_size = table_heads * head, turn_rows * q_shape[1] * table_heads * head
            c_steps = s_steps = (q_shape[1] * row, row, head, real_size)
        else:
            four = greatest(rank, 4)  # a literal would have `view` compiled once more
            (c_at, table, c_steps), (s_at, s_shape, s_steps) = view(cos, kind, four)[0], view(sin, kind, four)[0]
            if table != s_shape or c_steps[3] != real_size or s_steps[3] != real_size:
                return LOOK_CLOSER

        fit = fits(q_lies, oq_lies, table, size, width)
        if both:
            fit = fit and fits(k_lies, ok_lies, table, size, width) and q_shape[0] == k_shape[0]
        if not fit:
            return LOOK_CLOSER
        tokens, q_heads, k_heads = q_shape[1], q_shape[2], k_shape[2] if both else 0
        elements = (q_heads + k_heads) * q_shape[0] * tokens * width
        # Few tokens of one sequence are two units, q and k, and shared only if these are about equal.
        shared = q_shape[0] > 1 or tokens > _FEW_TOKENS or q_heads <= 2 * k_heads
        pool = load(in_use) if elements >= 2 * worth and shared else 0
        if pool < 0 and not trusted:
            return NO_THREADS
        q_in_place, k_in_place = in_place(q_lies, oq_lies), in_place(k_lies, ok_lies)
        if not trusted and not aliasing_allowed(q_lies, q_in_place, k_lies, k_in_place, oq_lies, ok_lies, both, size):
            return LOOK_CLOSER

        q_share, k_share = greatest(1, q_heads // table[2]), greatest(1, k_heads // table[2])
        by_head = tokens > _FEW_TOKENS and abs(q_strides[1]) < abs(q_strides[2])
        most = least(elements // worth, 2 + elements // _ONE_MORE) if pool > 0 else 1
        threads = least(most, load(pool + THREADS)) if pool > 0 else 1
        tile, tiles = _tiles(tokens, by_head, width * (real_size + 2 * size))
        q_group, k_group, by_group = q_share, k_share, by_head and most > 1 and tiles < _FEW_RUNS
        if by_group:
            q_group = greatest(4, least(least(q_share, k_share if both else q_share), q_share * tiles // _FEW_RUNS))
            most_groups = (q_heads + q_group - 1) // q_group
            q_group = k_group = (q_heads + most_groups - 1) // most_groups
        q_groups = (q_heads + q_group - 1) // q_group
        groups = q_groups + (k_heads + k_group - 1) // k_group

        rotated, fewest = 0, width
        for block in range(blocks):
            pairs = fetch(told + 8 * (_BLOCKS + block), 1)[0]
            rotated += 2 * pairs * size
            fewest = least(fewest, pairs)
        kept = width * size - rotated
        elsewhere = not q_in_place and not (both and k_in_place)
        far, large, stream = _far_large_stream(
            elements * size, threads, elsewhere, by_head, width * size, size, fewest, kept, stream_above
        )
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
        job = spill((
            q_at, q_strides[0], q_strides[1], q_strides[2],
            oq_at, oq_strides[0], oq_strides[1], oq_strides[2], q_heads, q_share, q_group,
            k_at, k_strides[0], k_strides[1], k_strides[2],
            ok_at, ok_strides[0], ok_strides[1], ok_strides[2], k_heads, k_share, k_group,
            tokens, tile, tiles, groups, q_groups, int(by_head), int(by_group), int(table[0] > 1),
            c_at, c_steps[0], c_steps[1], c_steps[2], s_at, s_steps[0], s_steps[1], s_steps[2],
            told + 8 * _BLOCKS, blocks, rotated, kept,
            greatest(1, _NEAREST // (width * size)), far, large, stream,
        ))  # fmt: skip
        share(pool, work, job, q_shape[0] * tiles * groups, most)
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
    return np.array([work, LAYOUTS[layout], head_dim, stream_above, *angles, *seen, worth, in_use, *pairs], np.int64)
