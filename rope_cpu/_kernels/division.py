"""How a rotation is divided into units of work, and what those who do them are told: its job."""

from __future__ import annotations

from typing import Any, NamedTuple

from rope_cpu._kernels.codegen import target
from rope_cpu._kernels.form import Form
from rope_cpu._kernels.integers import Integer, Words, choose, every, larger, number, smaller
from rope_cpu._kernels.objects import ArrayView
from rope_cpu._kernels.part import FEW

_LONG_ROW, _ONE_STORE = 128, 8  # bytes: of a row that is stored past the caches, and of what is stored at a time
# Up to so many tokens are gone through one by one, wherever they lie.
FEW_TOKENS = 8
# Tokens of a unit of work where all heads of a token follow each other.
_TILE = 8
# With fewer runs than these, threads share heads instead of tokens: where tokens are neighbours, rows of two threads
# have a memory line in common, for each head.
_FEW_RUNS = 64
# Bytes of q and k that are in the second cache of a thread: loads and stores are what limits wide elements there, so
# asking for them ahead costs more than it saves.
_NEAR = 2**20


class Side(NamedTuple):
    """What a job says of q, or of k: addresses that are read and written, and bytes from one to the next.

    heads: how many; share_of: how many share cos and sin; group: how many of them are in a unit.
    """

    x: Any
    x_batch: Any
    x_token: Any
    x_head: Any
    out: Any
    out_batch: Any
    out_token: Any
    out_head: Any
    heads: Any
    share_of: Any
    group: Any


class Common(NamedTuple):
    """What a job says besides.

    tokens: of a sequence; tile: how many are in a unit; tiles: how many of these. groups: of heads, the first
    `q_groups` of q. by_head: whether tokens are neighbours, not heads; by_group: whether the tiles of a group come one
    after the other, not the groups of a tile; each_batch: whether there are cos and sin for each batch row. Addresses
    of cos and sin, and bytes to the next. blocks: where the pairs of each stand; count: of blocks. rotated, kept: bytes
    of a head. together: heads of a run. far: what is fetched ahead, 1: across gaps, 2: everywhere. large: see
    `rotate_rows`. stream: whether results are stored past the caches.
    """

    tokens: Any
    tile: Any
    tiles: Any
    groups: Any
    q_groups: Any
    by_head: Any
    by_group: Any
    each_batch: Any
    cos: Any
    cos_batch: Any
    cos_token: Any
    cos_head: Any
    sin: Any
    sin_batch: Any
    sin_token: Any
    sin_head: Any
    blocks: Any
    count: Any
    rotated: Any
    kept: Any
    together: Any
    far: Any
    large: Any
    stream: Any


# What is read, what is written, and whether these are the same.
Both = tuple[ArrayView, ArrayView, Integer]


def divide(
    q: Both, k: Both, both: Integer, cos: ArrayView, sin: ArrayView, form: Form, blocks: Words,
    most: Integer, threads: Integer, size: int,
) -> tuple[Integer, list[Integer]]:  # fmt: skip
    """Return how many units a rotation is, and the words of its job.

    both: whether k is rotated. blocks: where the pairs of each stand, and how many there are. most: into how many parts
    it may be cut. threads: how many are there. size: bytes of an element.
    """
    (q_read, q_written, q_in_place), (k_read, k_written, k_in_place) = q, k
    (_, (batch, tokens, q_heads, width), q_steps), k_heads = q_read, choose(both, k_read[1][2], 0)
    table_rows, _, table_heads, _ = cos[1]
    q_share, k_share = larger(q_heads // table_heads, 1), larger(k_heads // table_heads, 1)
    by_head = (tokens > FEW_TOKENS) & (abs(q_steps[1]) < abs(q_steps[2]))
    tile = choose(by_head, form.run, _TILE)
    tiles = _parts(tokens, tile)
    by_group = every(by_head, most > 1, tiles < _FEW_RUNS)
    group = larger(smaller(choose(both, smaller(q_share, k_share), q_share), q_share * tiles // _FEW_RUNS), 4)
    group = larger(_parts(q_heads, _parts(q_heads, group)), 1)  # as many in each, about, and some for k alone
    q_group, k_group = choose(by_group, group, q_share), choose(by_group, group, k_share)
    q_groups = _parts(q_heads, q_group)
    groups = q_groups + _parts(k_heads, k_group)

    total, elsewhere = (q_heads + k_heads) * batch * tokens * width * size, ~(q_in_place | (both & k_in_place))
    beyond, alone = total > form.stream_above, _fetched_alone(form, threads)
    # Past the caches: not shorter rows, which take longer that way, nor what would have to be stored by less than a
    # word: pairs one by one, and what is kept of a row.
    long, whole = width * size >= _LONG_ROW, (form.kept == 0) | (form.kept >= _ONE_STORE)
    stream = every(elsewhere, beyond, long, whole, form.fewest >= FEW)
    # Where to fetch ahead is a matter of measurement; across gaps alone where the hardware does well without.
    far = choose(by_head, total > 2 * _NEAR, (total > threads * _NEAR) | (size == 2))
    everywhere = every(far, ~by_head, stream | (~elsewhere & (total > alone)))

    common = Common._make((
        tokens, _parts(tokens, tiles), tiles, groups, q_groups,
        number(by_head), number(by_group), number(table_rows > 1),
        cos[0], *cos[2][:3], sin[0], *sin[2][:3], *blocks, form.rotated, form.kept, form.together,
        number(far) + number(everywhere), number(total >= form.stream_above // 5) + number(beyond), number(stream),
    ))  # fmt: skip
    sides = _side(q_read, q_written, q_heads, q_share, q_group), _side(k_read, k_written, k_heads, k_share, k_group)
    return batch * tiles * groups, [*sides[0], *sides[1], *common]


def _fetched_alone(form: Form, threads: Integer) -> Integer:
    """Return up to how many bytes of q and k, rotated in place, the hardware fetches well by itself."""
    is_amd, half = "+sse4a" in target()[2], form.stream_above // 5 * 2
    return half if is_amd else smaller((threads + 1) * _NEAR, half)


def _side(read: ArrayView, written: ArrayView, heads: Integer, share_of: Integer, group: Integer) -> Side:
    (x, _, x_steps), (out, _, out_steps) = read, written
    return Side._make((x, *x_steps[:3], out, *out_steps[:3], heads, share_of, group))


def _parts(whole: Integer, part: Integer) -> Integer:
    """Return how many parts of a size, of which the last may be smaller, a whole has."""
    return (whole + larger(part, 1) - 1) // part
