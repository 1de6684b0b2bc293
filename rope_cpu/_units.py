"""The kernel that rotates some of the units that a rotation is cut into, and how large units have to be."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types

from rope_cpu import _machine
from rope_cpu._compile import DONE, SOURCES, Kernel, compiled, entry_point
from rope_cpu._formats import FORMATS
from rope_cpu._rows import rotate_rows
from rope_cpu._words import copy_bytes, fence, fetch, least

# The words of a job: SIDE for q, as many for k, then the rest.
SIDE, COMMON = 11, 24

# Work that is worth a thread, in seconds: for less than twice as much sharing costs more than it saves. Where threads
# sleep, see `_pool`.
_WORTH_A_THREAD = 1.2e-6
_LEAST_WORTH, _MOST_WORTH = 2**12, 2**18  # elements, however slow or fast the processor seems to be


@cache
def rows(dtype: str, pairing: str) -> Kernel:
    """Return the kernel that rotates: (address of a job, start, stop), a range of its units of work.

    A unit: where heads lie closer in memory than tokens, a few tokens, each with all heads that share its cos and sin;
    where tokens lie closer, a run of tokens of all these heads, or of some, while its cos and sin stay in the cache.
    """
    sources = SOURCES

    def rotate(job, start, stop):
        _ = sources  # a part of the cache key
        (
            tokens, tile, tiles, groups, q_groups, by_head, by_group, each_batch,
            cos, c_batch, c_token, c_head, sin, s_batch, s_token, s_head,
            blocks, count, rotated, kept, together, far, large, stream,
        ) = fetch(job + 2 * 8 * SIDE, COMMON)  # fmt: skip
        for unit in range(start, stop):
            b, r = unit // (tiles * groups), unit % (tiles * groups)
            g, t0 = (r // tiles, r % tiles * tile) if by_group else (r % groups, r // groups * tile)
            is_k = g >= q_groups
            (
                x, x_batch, x_token, x_head, out, o_batch, o_token, o_head, heads, share_of, group,
            ) = fetch(job + 8 * SIDE * is_k, SIDE)  # fmt: skip
            g -= q_groups * is_k
            c, s = cos + b * each_batch * c_batch, sin + b * each_batch * s_batch
            x, out = x + b * x_batch, out + b * o_batch
            h0, h1, t1 = g * group, least(heads, g * group + group), least(tokens, t0 + tile)
            x_step, o_step, c_step, s_step = (x_token, o_token, c_token, s_token) if by_head else (x_head, o_head, 0, 0)
            for i in range(h1 - h0 if by_head else t1 - t0):
                t, first = (t0, h0 + i) if by_head else (t0 + i, h0)
                # What comes next: the same heads of the next token, or the same run of the next head. Where other parts
                # of a buffer lie between, the hardware's own fetching ahead ends at each. Not beyond the range, where
                # another thread is at work.
                last = i + 1 == h1 - h0 if by_head else t + 1 == t1
                next_run = tile * x_token - i * x_head if last else x_head
                ahead = next_run if by_head else x_token
                beyond = last and unit + (1 if by_group else groups) >= stop
                if beyond or far <= (x_token == heads * x_head):
                    ahead = 0
                for h in range(first, first + 1 if by_head else h1, together):
                    cr, sr = c + t * c_token + h // share_of * c_head, s + t * s_token + h // share_of * s_head
                    xr, tr = x + t * x_token + h * x_head, out + t * o_token + h * o_head
                    count_rows = t1 - t0 if by_head else least(h1 - h, together)
                    run = (
                        xr, tr, cr, sr, blocks, count, count_rows, x_step, o_step, c_step, s_step, ahead, rotated, kept,
                        large,
                    )  # fmt: skip
                    if stream:
                        rotate_rows(run, dtype, pairing, "stream")
                    else:
                        if kept and xr != tr:
                            for n in range(count_rows):
                                copy_bytes(tr + n * o_step + rotated, xr + n * x_step + rotated, kept)
                        rotate_rows(run, dtype, pairing, "")
        if stream:
            fence()
        return DONE

    return compiled(rotate, f"rotate_{dtype}_{pairing}", (types.int64,) * 3)


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
