"""The kernel that rotates some of the units that a rotation is cut into, and how large units have to be."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from functools import cache

import numpy as np
from numba import types

from rope_cpu import _machine
from rope_cpu._compile import DONE, SOURCES, Kernel, compiled, entry_point, helper
from rope_cpu._formats import FORMATS
from rope_cpu._integers import choose, emitted, every, larger, number, smaller
from rope_cpu._part import FEW
from rope_cpu._rows import rotate_rows
from rope_cpu._words import copy_bytes, fence, fetch

# The words of a job: SIDE for q, as many for k, then the rest.
SIDE, COMMON = 11, 24

_LONG_ROW, _WORD = 128, 8  # bytes: of a row that is stored past the caches, and of what is stored at a time
# As many tokens are gone through one by one, wherever they lie.
FEW_TOKENS = 8
# With fewer runs than these, threads share heads instead of tokens: where tokens are neighbours, rows of two threads
# have a memory line in common, for each head.
_FEW_RUNS = 64
# Bytes of q and k that are in the second cache of a thread: loads and stores are what limits wide elements there, so
# asking for them ahead costs more than it saves.
_NEAR = 2**20

# Work that is worth a thread, in seconds: for less than twice as much sharing costs more than it saves. Where threads
# sleep, see `_pool`.
_WORTH_A_THREAD = 1.2e-6
_LEAST_WORTH, _MOST_WORTH = 2**12, 2**18  # elements, however slow or fast the processor seems to be


@emitted(types.Tuple((types.int64, types.UniTuple(types.int64, 2 * SIDE + COMMON))))
def divide(q, k, both, cos, sin, form, blocks, most, threads, size):
    """Return how many units a rotation is, and the words of its job.

    q, k: what is read, what is written, and whether these are the same, arrays being (address, shape, strides). both:
    whether k is rotated. cos, sin: arrays. form: from stream_above on, see `numbers`. blocks: where the pairs of each
    stand, and how many there are. most: into how many parts it may be cut. threads: how many are there. size: bytes of
    an element.
    """
    (q_read, q_written, q_in_place), (k_read, k_written, k_in_place) = q, k
    stream_above, run, together, rotated, kept, fewest = form
    (_, (batch, tokens, q_heads, width), q_steps), k_heads = q_read, choose(both, k_read[1][2], 0)
    table_rows, _, table_heads, _ = cos[1]
    q_share, k_share = larger(q_heads // table_heads, 1), larger(k_heads // table_heads, 1)
    by_head = (tokens > FEW_TOKENS) & (abs(q_steps[1]) < abs(q_steps[2]))
    tile = choose(by_head, run, 8)
    tiles = _parts(tokens, tile)
    by_group = every(by_head, most > 1, tiles < _FEW_RUNS)
    group = larger(smaller(choose(both, smaller(q_share, k_share), q_share), q_share * tiles // _FEW_RUNS), 4)
    group = _parts(q_heads, _parts(q_heads, group))  # as many in each, about
    q_group, k_group = choose(by_group, group, q_share), choose(by_group, group, k_share)
    q_groups = _parts(q_heads, q_group)
    groups = q_groups + _parts(k_heads, k_group)

    total, elsewhere = (q_heads + k_heads) * batch * tokens * width * size, ~(q_in_place | (both & k_in_place))
    beyond, half = total > stream_above, total > stream_above // 5 * 2
    # Past the caches: not shorter rows, which take longer that way, nor what would have to be stored by less than a
    # word: pairs one by one, and what is kept of a row.
    stream = every(elsewhere, beyond, width * size >= _LONG_ROW, fewest >= FEW, (kept == 0) | (kept >= _WORD))
    # 1: only across gaps, as the hardware does well without, 2: everywhere. Where is a matter of measurement.
    far = choose(by_head, total > 2 * _NEAR, (size == 2) | (total > threads * _NEAR))
    everywhere = every(far, ~by_head, stream | (~elsewhere & half))

    job = (
        *_side(q_read, q_written), q_heads, q_share, q_group,
        *_side(k_read, k_written), k_heads, k_share, k_group,
        tokens, _parts(tokens, tiles), tiles, groups, q_groups,
        number(by_head), number(by_group), number(table_rows > 1),
        cos[0], *cos[2][:3], sin[0], *sin[2][:3], *blocks, rotated, kept, together,
        number(far) + number(everywhere), number(total >= stream_above // 5) + number(beyond), number(stream),
    )  # fmt: skip
    return batch * tiles * groups, job


def _side(read, written):
    (x, _, x_steps), (out, _, out_steps) = read, written
    return x, *x_steps[:3], out, *out_steps[:3]


def _parts(whole, part):
    """Return how many parts of a size, of which the last may be smaller, a whole has."""
    return (whole + part - 1) // part


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
    h0, (h1, t1) = g * group, _ends(place, heads, group, tokens, tile)
    return choose(by_head, h1 - h0, t1 - t0), h0, choose(by_head, h0 + 1, h1)


def _ends(place, heads, group, tokens, tile):
    """Return the ends of the heads and of the tokens of a unit."""
    _, g, t0, _ = place
    return smaller(heads, g * group + group), smaller(tokens, t0 + tile)


@emitted(types.UniTuple(types.int64, 15))
def _run(i, h, unit, stop, place, side, common):
    """Return the run of step `i` that begins with head `h`, as `rotate_rows` takes it; stop: the end of the range."""
    b, _, t0, _ = place
    x, x_batch, x_token, x_head, out, o_batch, o_token, o_head, heads, share_of, group = side
    (
        tokens, tile, _tiles, groups, _q_groups, by_head, by_group, each_batch,
        cos, c_batch, c_token, c_head, sin, s_batch, s_token, s_head,
        blocks, count, rotated, kept, together, far, large, _stream,
    ) = common  # fmt: skip
    by_head, (h1, t1) = by_head != 0, _ends(place, heads, group, tokens, tile)
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
                        _copy_kept(run)
                        rotate_rows(run, dtype, pairing, "")
        if stream:
            fence()
        return DONE

    return compiled(rotate, f"rotate_{dtype}_{pairing}", (types.int64,) * 3)


@helper
def _copy_kept(run):
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
