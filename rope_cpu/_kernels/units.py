"""The kernel that rotates some of the units that a rotation is divided into, and how much of it is worth a thread."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from rope_cpu import _machine
from rope_cpu._kernels.compiler import DONE, Kernel, compiled
from rope_cpu._kernels.division import Common, Side
from rope_cpu._kernels.entry import whole
from rope_cpu._kernels.flow import Variable, each, when, whether
from rope_cpu._kernels.formats import FORMATS
from rope_cpu._kernels.integers import Integer, choose, number, smaller
from rope_cpu._kernels.rows import rotate_rows
from rope_cpu._kernels.words import copy_bytes, fence

# Work that is worth a thread, in seconds: for less than twice as much sharing costs more than it saves. Where threads
# sleep, see `sharing`.
_WORTH_A_THREAD = 1.2e-6
_LEAST_WORTH, _MOST_WORTH = 2**12, 2**18  # elements, however slow or fast the processor seems to be
_SIDE = len(Side._fields)


class Unit(NamedTuple):
    """How a unit is gone through.

    A step is a token with heads `first` to before `end` of a group, or one head with all tokens of the tile: that is
    one run. Addresses are those of the first row, of cos and sin those for head 0; and bytes from step to step. group:
    its number, which is also that of the cos and sin its heads share, unless groups are smaller than that. ahead: bytes
    from a run to what comes next, which is to be fetched, 0 for none; ahead_last: in the last step.
    """

    steps: Integer
    first: Integer
    end: Integer
    x: Integer
    out: Integer
    cos: Integer
    sin: Integer
    x_step: Integer
    out_step: Integer
    cos_step: Integer
    sin_step: Integer
    tokens: Integer
    group: Integer
    ahead: Integer
    ahead_last: Integer


def _unit(n: Integer, stop: Integer, job_at: Integer, job: Common) -> tuple[Unit, Side]:
    """Return how unit `n` is gone through, and what it is of; stop: the end of the range that is asked for."""
    by_head, by_group, of_row = job.by_head != 0, job.by_group != 0, job.tiles * job.groups
    row, divisor = n // of_row, choose(by_group, job.tiles, job.groups)
    in_row = n - row * of_row
    one = in_row // divisor
    other = in_row - one * divisor
    group, t0 = choose(by_group, one, other), choose(by_group, other, one) * job.tile
    is_k = group >= job.q_groups
    group -= choose(is_k, job.q_groups, 0)
    side = Side(*(job_at + number(is_k) * (8 * _SIDE)).words(_SIDE))

    h0 = group * side.group
    heads, tokens = smaller(side.heads - h0, side.group), smaller(job.tokens - t0, job.tile)
    steps, x_step = choose(by_head, heads, tokens), choose(by_head, side.x_head, side.x_token)
    # What comes next: the same heads of the next token, or the same run of the next head. Where other parts of a
    # buffer lie between, the hardware's own fetching ahead ends at each. Not beyond the range, where another thread is
    # at work.
    following = choose(by_head, job.tile * side.x_token - (steps - 1) * side.x_head, side.x_token)
    near = job.far <= number(side.x_token == side.heads * side.x_head)
    is_last = n + choose(by_group, 1, job.groups) >= stop
    shared = row * job.each_batch
    return Unit(
        steps, h0, choose(by_head, h0 + 1, h0 + heads),
        side.x + row * side.x_batch + t0 * side.x_token + h0 * side.x_head,
        side.out + row * side.out_batch + t0 * side.out_token + h0 * side.out_head,
        job.cos + shared * job.cos_batch + t0 * job.cos_token, job.sin + shared * job.sin_batch + t0 * job.sin_token,
        x_step, choose(by_head, side.out_head, side.out_token),
        choose(by_head, 0, job.cos_token), choose(by_head, 0, job.sin_token), tokens, group,
        choose(near, 0, x_step), choose(near | is_last, 0, following),
    ), side  # fmt: skip


def _run(i: Integer, h: Integer, table: Integer, unit: Unit, side: Side, job: Common) -> list[Integer]:
    """Return the run of step `i` that begins with head `h` and shares a table, as `rotate_rows` takes it."""
    by_head, before = job.by_head != 0, h - unit.first
    return [
        unit.x + i * unit.x_step + before * side.x_head, unit.out + i * unit.out_step + before * side.out_head,
        unit.cos + i * unit.cos_step + table * job.cos_head, unit.sin + i * unit.sin_step + table * job.sin_head,
        job.blocks, job.count, choose(by_head, unit.tokens, smaller(unit.end - h, job.together)),
        choose(by_head, side.x_token, side.x_head), choose(by_head, side.out_token, side.out_head),
        choose(by_head, job.cos_token, 0), choose(by_head, job.sin_token, 0),
        choose(i + 1 == unit.steps, unit.ahead_last, unit.ahead), job.rotated, job.kept, job.large,
    ]  # fmt: skip


def _rotate(job: Integer, start: Integer, stop: Integer, dtype: str, pairing: str) -> int:
    """Rotate units of a job; see `rows`."""
    common = Common(*(job + 2 * 8 * _SIDE).words(len(Common._fields)))
    stream = common.stream != 0
    with each(start, stop) as n:
        unit, side = _unit(n, stop, job, common)
        with each(0, unit.steps) as i:
            table = Variable(job.b, unit.group)
            with when(common.by_group != 0):
                table.set((unit.first + i) // side.share_of)
            with each(unit.first, unit.end, common.together) as h:
                run = _run(i, h, table.now, unit, side, common)
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
    return compiled(partial(_rotate, dtype=dtype, pairing=pairing), f"rotate_{dtype}_{pairing}", [whole] * 3)


@cache
def worth_a_thread(dtype: str, pairing: str) -> int:
    """Return how many elements are worth a thread on this processor; 8 tokens are rotated ten times to tell."""
    kernel, kind, (tokens, heads, pairs) = rows(dtype, pairing).call, FORMATS[dtype], (8, 64, 64)
    row, head = pairs * kind.real_size, 2 * pairs * kind.size
    x, table = np.zeros(tokens * heads * head, np.uint8), np.zeros(tokens * row, np.uint8)
    blocks = np.array([pairs])
    place, angles = (x.ctypes.data, 0, heads * head, head), (table.ctypes.data, 0, row, 0)
    side, none = Side(*place, *place, heads, heads, heads), (0,) * _SIDE
    common = Common(
        tokens, tokens, 1, 1, 1, 0, 0, 0, *angles, *angles, blocks.ctypes.data, 1, head, 0, heads, 0, 0, 0
    )  # fmt: skip
    job = np.array([*side, *none, *common])
    seconds = _machine.seconds(lambda: kernel(job.ctypes.data, 0, 1), 10)
    worth = 2 * pairs * heads * tokens * _WORTH_A_THREAD / seconds
    return int(np.clip(worth, _LEAST_WORTH, _MOST_WORTH))
