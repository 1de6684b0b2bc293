"""The kernel that rotates some of the units that a rotation is cut into, and how large units have to be."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types

from rope_cpu import _machine
from rope_cpu._compile import DONE, SOURCES, Kernel, compiled, entry_point, helper
from rope_cpu._formats import FORMATS
from rope_cpu._integers import choose, emitted, number, smaller
from rope_cpu._rows import rotate_rows
from rope_cpu._words import copy_bytes, fence, fetch

# The words of a job: SIDE for q, as many for k, then the rest.
SIDE, COMMON = 11, 24

# Work that is worth a thread, in seconds: for less than twice as much sharing costs more than it saves. Where threads
# sleep, see `_pool`.
_WORTH_A_THREAD = 1.2e-6
_LEAST_WORTH, _MOST_WORTH = 2**12, 2**18  # elements, however slow or fast the processor seems to be


@emitted(types.UniTuple(types.int64, 4))
def _place(unit, common):
    """Return the batch row, the group of heads and the first token of a unit, and whether it is of k."""
    _tokens, tile, tiles, groups, q_groups, _by_head, by_group, *_ = common
    in_row = unit % (tiles * groups)
    divisor = choose(by_group != 0, tiles, groups)
    one, other = in_row // divisor, in_row % divisor
    group, tile_at = choose(by_group != 0, one, other), choose(by_group != 0, other, one)
    is_k = group >= q_groups
    return unit // (tiles * groups), group - choose(is_k, q_groups, 0), tile_at * tile, number(is_k)


@emitted(types.UniTuple(types.int64, 3))
def _loops(place, side, common):
    """Return how many steps a unit is gone through in, and the first head of its runs and the end of them.

    A step is a token with all heads of the group, or one head with all tokens of the tile: that is one run.
    """
    (_, g, t0, _), (tokens, tile, *_), by_head = place, common, common[5] != 0
    heads, _share_of, group = side[8:]
    h0, h1, t1 = g * group, smaller(heads, g * group + group), smaller(tokens, t0 + tile)
    return choose(by_head, h1 - h0, t1 - t0), h0, choose(by_head, h0 + 1, h1)


@emitted(types.UniTuple(types.int64, 15))
def _run(i, h, unit, stop, place, side, common):
    """Return the run of step `i` that begins with head `h`, as `rotate_rows` takes it; stop: the end of the range."""
    b, g, t0, _ = place
    x, x_batch, x_token, x_head, out, o_batch, o_token, o_head, heads, share_of, group = side
    (
        tokens, tile, _tiles, groups, _q_groups, by_head, by_group, each_batch,
        cos, c_batch, c_token, c_head, sin, s_batch, s_token, s_head,
        blocks, count, rotated, kept, together, far, large, _stream,
    ) = common  # fmt: skip
    by_head = by_head != 0
    h1, t1 = smaller(heads, g * group + group), smaller(tokens, t0 + tile)
    h, t = choose(by_head, h + i, h), choose(by_head, t0, t0 + i)
    # What comes next: the same heads of the next token, or the same run of the next head. Where other parts of a
    # buffer lie between, the hardware's own fetching ahead ends at each. Not beyond the range, where another thread is
    # at work.
    last = choose(by_head, h, t) + 1 == choose(by_head, h1, t1)
    ahead = choose(by_head, choose(last, tile * x_token - i * x_head, x_head), x_token)
    beyond = last & (unit + choose(by_group != 0, 1, groups) >= stop)
    near = beyond | (far <= number(x_token == heads * x_head))
    shared = b * each_batch
    return (
        x + b * x_batch + t * x_token + h * x_head,
        out + b * o_batch + t * o_token + h * o_head,
        cos + shared * c_batch + t * c_token + h // share_of * c_head,
        sin + shared * s_batch + t * s_token + h // share_of * s_head,
        blocks, count, choose(by_head, t1 - t0, smaller(h1 - h, together)),
        choose(by_head, x_token, x_head), choose(by_head, o_token, o_head),
        choose(by_head, c_token, 0), choose(by_head, s_token, 0),
        choose(near, 0, ahead), rotated, kept, large,
    )  # fmt: skip


@cache
def rows(dtype: str, pairing: str) -> Kernel:
    """Return the kernel that rotates: (address of a job, start, stop), a range of its units of work.

    A unit: where heads lie closer in memory than tokens, a few tokens, each with all heads that share its cos and sin;
    where tokens lie closer, a run of tokens of all these heads, or of some, while its cos and sin stay in the cache.
    """
    sources = SOURCES

    def rotate(job, start, stop):
        _ = sources  # a part of the cache key
        common = fetch(job + 2 * 8 * SIDE, COMMON)
        together, stream = common[-4], common[-1]
        for unit in range(start, stop):
            place = _place(unit, common)
            side = fetch(job + 8 * SIDE * place[3], SIDE)
            steps, first, end = _loops(place, side, common)
            for i in range(steps):
                for h in range(first, end, together):
                    run = _run(i, h, unit, stop, place, side, common)
                    if stream:
                        rotate_rows(run, dtype, pairing, "stream")
                    else:
                        copy_kept(run)
                        rotate_rows(run, dtype, pairing, "")
        if stream:
            fence()
        return DONE

    return compiled(rotate, f"rotate_{dtype}_{pairing}", (types.int64,) * 3)


@helper
def copy_kept(run):
    """Copy what is not rotated of the rows of a run, unless it is there."""
    x, out, _, _, _, _, count, x_step, o_step, _, _, _, rotated, kept, _ = run
    if kept and x != out:
        for n in range(count):
            copy_bytes(out + n * o_step + rotated, x + n * x_step + rotated, kept)


@cache
def worth_a_thread(dtype: str, pairing: str) -> int:
    """Return how many elements are worth a thread on this processor; 8 tokens are rotated ten times to tell."""
    kernel, kind, (tokens, heads, pairs) = entry_point(rows(dtype, pairing)), FORMATS[dtype], (8, 64, 64)
    row, head = pairs * kind.real_size, 2 * pairs * kind.size
    x, table = np.zeros(tokens * heads * head, np.uint8), np.zeros(tokens * row, np.uint8)
    blocks = np.array([pairs])
    side, angles = (x.ctypes.data, 0, heads * head, head), (table.ctypes.data, 0, row, 0)
    job = np.array((
        *side, *side, heads, heads, heads, *(0,) * SIDE,
        tokens, tokens, 1, 1, 1, 0, 0, 0, *angles, *angles, blocks.ctypes.data, 1, head, 0, heads, 0, 0, 0,
    ))  # fmt: skip
    seconds = _machine.seconds(lambda: kernel(job.ctypes.data, 0, 1), 10)
    worth = 2 * pairs * heads * tokens * _WORTH_A_THREAD / seconds
    return int(np.clip(worth, _LEAST_WORTH, _MOST_WORTH))
