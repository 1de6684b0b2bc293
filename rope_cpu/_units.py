"""The kernel that rotates some of the units that a rotation is divided into, and how much of it is worth a thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import types

from rope_cpu import _machine
from rope_cpu._compile import DONE, SOURCES, Kernel, compiled, entry_point
from rope_cpu._division import Common, Side
from rope_cpu._flow import each, when, whether
from rope_cpu._formats import FORMATS
from rope_cpu._integers import Integer, choose, emitted, number, smaller
from rope_cpu._rows import rotate_rows
from rope_cpu._words import copy_bytes, fence

# Work that is worth a thread, in seconds: for less than twice as much sharing costs more than it saves. Where threads
# sleep, see `_pool`.
_WORTH_A_THREAD = 1.2e-6
_LEAST_WORTH, _MOST_WORTH = 2**12, 2**18  # elements, however slow or fast the processor seems to be


class Unit(NamedTuple):
    """Where a unit lies: batch row, group of heads, first token, and whether it is of k."""

    row: Integer
    group: Integer
    token: Integer
    is_k: Integer


def _unit(number_of: Integer, job: Common) -> Unit:
    """Return where a unit lies."""
    in_row = number_of % (job.tiles * job.groups)
    divisor = choose(job.by_group != 0, job.tiles, job.groups)
    one, other = in_row // divisor, in_row % divisor
    group, tile_at = choose(job.by_group != 0, one, other), choose(job.by_group != 0, other, one)
    is_k = group >= job.q_groups
    group -= choose(is_k, job.q_groups, 0)
    return Unit(number_of // (job.tiles * job.groups), group, tile_at * job.tile, number(is_k))


def _ends(unit: Unit, side: Side, job: Common) -> tuple[Integer, Integer]:
    """Return the ends of the heads and of the tokens of a unit."""
    return smaller(side.heads, (unit.group + 1) * side.group), smaller(job.tokens, unit.token + job.tile)


def _loops(unit: Unit, side: Side, job: Common) -> tuple[Integer, Integer, Integer]:
    """Return how many steps a unit is gone through in, and the first head of its runs and the end of them.

    A step is a token with all heads of the group, or one head with all tokens of the tile: that is one run.
    """
    by_head, h0, (h1, t1) = job.by_head != 0, unit.group * side.group, _ends(unit, side, job)
    return choose(by_head, h1 - h0, t1 - unit.token), h0, choose(by_head, h0 + 1, h1)


def _run(i: Integer, h: Integer, unit: Unit, side: Side, job: Common, is_last: Integer) -> list[Integer]:
    """Return the run of step `i` that begins with head `h`, as `rotate_rows` takes it.

    is_last: whether the next unit of q, or of k, is beyond the range.
    """
    by_head, (h1, t1) = job.by_head != 0, _ends(unit, side, job)
    h, t = choose(by_head, h + i, h), choose(by_head, unit.token, unit.token + i)
    # What comes next: the same heads of the next token, or the same run of the next head. Where other parts of a
    # buffer lie between, the hardware's own fetching ahead ends at each. Not beyond the range, where another thread is
    # at work.
    last = choose(by_head, h, t) + 1 == choose(by_head, h1, t1)
    ahead = choose(by_head, choose(last, job.tile * side.x_token - i * side.x_head, side.x_head), side.x_token)
    near = (last & is_last) | (job.far <= number(side.x_token == side.heads * side.x_head))
    shared, angle = unit.row * job.each_batch, h // side.share_of
    return [
        side.x + unit.row * side.x_batch + t * side.x_token + h * side.x_head,
        side.out + unit.row * side.out_batch + t * side.out_token + h * side.out_head,
        job.cos + shared * job.cos_batch + t * job.cos_token + angle * job.cos_head,
        job.sin + shared * job.sin_batch + t * job.sin_token + angle * job.sin_head,
        job.blocks, job.count, choose(by_head, t1 - unit.token, smaller(h1 - h, job.together)),
        choose(by_head, side.x_token, side.x_head), choose(by_head, side.out_token, side.out_head),
        choose(by_head, job.cos_token, 0), choose(by_head, job.sin_token, 0),
        choose(near, 0, ahead), job.rotated, job.kept, job.large,
    ]  # fmt: skip


@emitted(types.int64)
def _rotate(job: Integer, start: Integer, stop: Integer, dtype: str, pairing: str) -> int:
    """Rotate units of a job; see `rows`."""
    side_words = len(Side._fields)
    common = Common(*(job + 2 * 8 * side_words).words(len(Common._fields)))
    stream = common.stream != 0
    with each(start, stop) as n:
        unit = _unit(n, common)
        side = Side(*(job + unit.is_k * (8 * side_words)).words(side_words))
        is_last = n + choose(common.by_group != 0, 1, common.groups) >= stop
        steps, first, end = _loops(unit, side, common)
        with each(0, steps) as i, each(first, end, common.together) as h:
            run = _run(i, h, unit, side, common, is_last)
            with whether(stream) as (past_caches, as_usual):
                with past_caches:
                    rotate_rows(run, dtype, pairing, stream=True)
                with as_usual:
                    _copy_kept(run)
                    rotate_rows(run, dtype, pairing, stream=False)
    with when(stream):
        fence(job.b)
    return DONE


def _copy_kept(run: Sequence[Integer]) -> None:
    """Copy what is not rotated of the rows of a run, unless it is there."""
    x, out, _, _, _, _, count, x_step, out_step, _, _, _, rotated, kept, _ = run
    with when((kept != 0) & (x != out)), each(0, count) as n:
        copy_bytes(out + n * out_step + rotated, x + n * x_step + rotated, kept)


@cache
def rows(dtype: str, pairing: str) -> Kernel:
    """Return the kernel that rotates: (address of a job, start, stop), a range of its units of work.

    A unit: where heads lie closer in memory than tokens, a few tokens, each with all heads that share its cos and sin;
    where tokens lie closer, a run of tokens of all these heads, or of some, while its cos and sin stay in the cache.
    """
    sources = SOURCES

    def rotate(job, start, stop):  # type: ignore[no-untyped-def]
        _ = sources  # a part of the cache key
        return _rotate(job, start, stop, dtype, pairing)

    return compiled(rotate, f"rotate_{dtype}_{pairing}", (types.int64,) * 3)


def worth_a_thread(dtype: str, pairing: str) -> int:
    """Return how many elements are worth a thread on this processor; 8 tokens are rotated ten times to tell."""
    kernel, kind, (tokens, heads, pairs) = entry_point(rows(dtype, pairing)), FORMATS[dtype], (8, 64, 64)
    row, head = pairs * kind.real_size, 2 * pairs * kind.size
    x, table = np.zeros(tokens * heads * head, np.uint8), np.zeros(tokens * row, np.uint8)
    blocks = np.array([pairs])
    lies, angles = (x.ctypes.data, 0, heads * head, head), (table.ctypes.data, 0, row, 0)
    side, none = Side(*lies, *lies, heads, heads, heads), (0,) * len(Side._fields)
    common = Common(
        tokens, tokens, 1, 1, 1, 0, 0, 0, *angles, *angles, blocks.ctypes.data, 1, head, 0, heads, 0, 0, 0
    )  # fmt: skip
    job = np.array([*side, *none, *common])
    seconds = _machine.seconds(lambda: kernel(job.ctypes.data, 0, 1), 10)
    worth = 2 * pairs * heads * tokens * _WORTH_A_THREAD / seconds
    return int(np.clip(worth, _LEAST_WORTH, _MOST_WORTH))
