"""The rotation kernel: each pair (a, b) of a head vector becomes (a·cos − b·sin, b·cos + a·sin).

The functions from the inside out:

- `half_split` and `interleaved` make the device function that rotates some pairs of a tile, which
  is a run of tokens and heads;
- `_make_rotate_part` makes the loop over the tiles of one part of an array, the work of a thread;
- `_rotate` is the entry point: it checks the arrays and splits the work between threads.

Arrays are (batch, tokens, heads, head_dim) with a contiguous last axis; strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import gcd
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types

from rope_cpu.kernels import compile
from rope_cpu.kernels.head_vectors import make_load_normalised
from rope_cpu.kernels.vectors import (
    ALIGNMENT,
    address,
    advance,
    doubled,
    even_negated,
    load,
    muladd,
    pointer,
    store,
    swapped,
)

# The statuses that a kernel returns. INVALID: the arrays did not pass its checks, and nothing was
# written.
DONE = 0
INVALID = 1

# Numba's types of the array elements, and of cos and sin, for each dtype. 16-bit floats are passed
# as the integers of their bits: int16 stands for float16 and uint16 for bfloat16.
ELEMENTS = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.int16, types.float32),
    "bfloat16": (types.uint16, types.float32),
}

# Minimum number of elements for several threads. With 40 heads of 128, two threads took as long as
# one for 16 tokens, and 0.8 to 0.9 of its time for 32; beside two busy processes, 1.1 of it.
PARALLEL_FROM = 2**17

# The axes of arrays. Shapes and strides are indexed with these constants only: a variable index
# compiles to one branch for each axis.
BATCH = 0
TOKEN = 1
HEAD = 2
ELEMENT = 3


class View(NamedTuple):
    """An array as the device functions see it."""

    pointer: Any
    shape: Any  # (batch, tokens, heads, head_dim)
    strides: Any
    itemsize: Any


class Table(NamedTuple):
    """The cos and sin of the tokens; both have the same shape and strides."""

    cos: Any  # pointer
    sin: Any  # pointer
    shape: Any  # (batch or 1, tokens, frequency heads, pairs)
    strides: Any
    itemsize: Any


class Tile(NamedTuple):
    """A run of tokens and heads that one call of a device function rotates."""

    tokens: Any
    heads: Any
    token_stride: Any
    head_stride: Any
    out_token_stride: Any
    out_head_stride: Any
    table_token_stride: Any
    itemsize: Any
    out_itemsize: Any
    table_itemsize: Any
    block_pairs: Any  # pointer to the number of pairs of each block
    blocks: Any


# Device functions that rotate `lanes` pairs of a tile, from pair i of a block on. A block is a run
# of elements of a head vector within which pairs are formed. x, out: pointers to the block in the
# tile's first token and head. cos, sin: pointers to the block's pairs of that token. pairs: the
# number of pairs of the block. norm: a `Norm` that is applied before, to a tile of one token, or
# None. first: the place of the block's first element in the head vector. nontemporal: whether
# results are stored past the caches.


def half_split(lanes: int) -> Any:
    """Return the device function that rotates `lanes` of the pairs (i, i + pairs)."""
    load_normalised = make_load_normalised(lanes)

    @partial(compile.device_function, variant=f"half_{lanes}")
    def rotate(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal):
        for _ in range(tile.tokens):
            c = load(cos, i, lanes)
            s = load(sin, i, lanes)
            row = x
            out_row = out
            for head in range(tile.heads):
                a = load_normalised(row, i, norm, head, first + i)
                b = load_normalised(row, i + pairs, norm, head, first + i + pairs)
                # Vectors have no negation, which a·c − b·s as `muladd` would need.
                store(out_row, i, a * c - b * s, nontemporal)
                store(out_row, i + pairs, muladd(b, c, a * s), nontemporal)
                row = advance(row, tile.head_stride)
                out_row = advance(out_row, tile.out_head_stride)
            x = advance(x, tile.token_stride)
            out = advance(out, tile.out_token_stride)
            cos = advance(cos, tile.table_token_stride)
            sin = advance(sin, tile.table_token_stride)

    return rotate


def interleaved(lanes: int) -> Any:
    """Return the device function that rotates `lanes` of the pairs (2i, 2i + 1).

    In vectors: (a, b)·(cos, cos) + (b, a)·(−sin, sin).
    """
    elements = 2 * lanes
    load_normalised = make_load_normalised(elements)
    load_normalised_64 = make_load_normalised(64)

    @partial(compile.device_function, variant=f"interleaved_{lanes}")
    def rotate(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal):
        for _ in range(tile.tokens):
            c = doubled(load(cos, i, lanes))
            s = even_negated(doubled(load(sin, i, lanes)))
            row = x
            out_row = out
            for head in range(tile.heads):
                ab = load_normalised(row, 2 * i, norm, head, first + 2 * i)
                store(out_row, 2 * i, muladd(ab, c, swapped(ab) * s), nontemporal)
                row = advance(row, tile.head_stride)
                out_row = advance(out_row, tile.out_head_stride)
            x = advance(x, tile.token_stride)
            out = advance(out, tile.out_token_stride)
            cos = advance(cos, tile.table_token_stride)
            sin = advance(sin, tile.table_token_stride)

    # 64 pairs as one vector need more registers than there are: float32 took 1.2 to 1.4 times as
    # long. Two vectors of 32 pairs share the loops instead.
    @compile.device_function
    def rotate_64(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal):
        for _ in range(tile.tokens):
            c_low = doubled(load(cos, i, 32))
            s_low = even_negated(doubled(load(sin, i, 32)))
            c_high = doubled(load(cos, i + 32, 32))
            s_high = even_negated(doubled(load(sin, i + 32, 32)))
            row = x
            out_row = out
            for head in range(tile.heads):
                low = load_normalised_64(row, 2 * i, norm, head, first + 2 * i)
                store(out_row, 2 * i, muladd(low, c_low, swapped(low) * s_low), nontemporal)
                high = load_normalised_64(row, 2 * i + 64, norm, head, first + 2 * i + 64)
                store(
                    out_row, 2 * i + 64, muladd(high, c_high, swapped(high) * s_high), nontemporal
                )
                row = advance(row, tile.head_stride)
                out_row = advance(out_row, tile.out_head_stride)
            x = advance(x, tile.token_stride)
            out = advance(out, tile.out_token_stride)
            cos = advance(cos, tile.table_token_stride)
            sin = advance(sin, tile.table_token_stride)

    return rotate_64 if lanes == 64 else rotate


PAIRINGS: dict[str, Callable[[int], Any]] = {"half": half_split, "interleaved": interleaved}


# From arrays to views.


@compile.device_function
def view(x):
    """Return the view of an array of four axes."""
    return View(pointer(x), x.shape, x.strides, x.itemsize)


@compile.device_function
def table_view(cos_sin):
    """Return the view of an array whose first axis holds cos and sin."""
    cos = pointer(cos_sin)
    sin = advance(cos, cos_sin.strides[0])
    return Table(cos, sin, cos_sin.shape[1:], cos_sin.strides[1:], cos_sin.itemsize)


# Checks of shapes and aliasing.


@compile.device_function
def _extent(x):
    """Return the address of the first byte of an array, and that of the first byte after it."""
    batch_reach = (x.shape[BATCH] - 1) * x.strides[BATCH]
    token_reach = (x.shape[TOKEN] - 1) * x.strides[TOKEN]
    head_reach = (x.shape[HEAD] - 1) * x.strides[HEAD]
    first = address(x.pointer)
    start = first + min(batch_reach, 0) + min(token_reach, 0) + min(head_reach, 0)
    stop = first + max(batch_reach, 0) + max(token_reach, 0) + max(head_reach, 0)
    return start, stop + x.shape[ELEMENT] * x.itemsize


@compile.device_function
def are_disjoint(x, y):
    """Return True if two arrays certainly share no element.

    Either one array ends before the other begins, or both are views of one buffer, such as q and k
    in packed QKV. Then the heads of a token of x and those of y must not overlap, either as two
    ranges or, where they alternate, one by one.
    """
    x_start, x_stop = _extent(x)
    y_start, y_stop = _extent(y)
    if x_stop <= y_start or y_stop <= x_start:
        return True
    if x.strides[BATCH] != y.strides[BATCH] or x.strides[TOKEN] != y.strides[TOKEN]:
        return False
    if x.strides[HEAD] < 0 or y.strides[HEAD] < 0:
        return False
    distance = y_start - x_start
    row = x.shape[ELEMENT] * x.itemsize
    x_token = (x.shape[HEAD] - 1) * x.strides[HEAD] + row
    y_token = (y.shape[HEAD] - 1) * y.strides[HEAD] + row
    period = gcd(x.strides[BATCH], x.strides[TOKEN])
    if _are_periodically_disjoint(distance, period, x_token, y_token):
        return True
    if x.strides[HEAD] != y.strides[HEAD]:
        return False
    return _are_periodically_disjoint(distance, gcd(period, x.strides[HEAD]), row, row)


@compile.device_function
def _are_periodically_disjoint(distance, period, x_size, y_size):
    """Return True if byte ranges of x and of y, repeated with the same period, never overlap.

    distance: bytes from a range of x to one of y. x_size, y_size: bytes of a range.
    """
    if period <= 0:
        return False
    offset = distance % period
    return x_size <= offset and offset + y_size <= period


@compile.device_function
def overlaps_itself(x):
    """Return True unless the elements of an array certainly have memory of their own."""
    batch_stride = abs(x.strides[BATCH])
    token_stride = abs(x.strides[TOKEN])
    head_stride = abs(x.strides[HEAD])
    batch = x.shape[BATCH]
    tokens = x.shape[TOKEN]
    heads = x.shape[HEAD]
    row = x.shape[ELEMENT] * x.itemsize
    if not _is_nested(batch_stride, batch, token_stride, tokens):
        return True
    if not _is_nested(batch_stride, batch, head_stride, heads):
        return True
    if not _is_nested(token_stride, tokens, head_stride, heads):
        return True
    if batch > 1 and batch_stride < row:
        return True
    if tokens > 1 and token_stride < row:
        return True
    return heads > 1 and head_stride < row


@compile.device_function
def _is_nested(stride, count, other_stride, other_count):
    """Return True if all steps along one of two axes fit into one step along the other."""
    return stride * count <= other_stride or other_stride * other_count <= stride


@compile.device_function
def fits(x, out, table, head_dim):
    """Return True if x can be rotated into `out`, which may be the same array.

    False for empty arrays, which the caller handles.
    """
    if x.shape != out.shape or x.shape[ELEMENT] != head_dim:
        return False
    if x.shape[BATCH] * x.shape[TOKEN] * x.shape[HEAD] == 0:
        return False
    if table.shape[BATCH] != 1 and table.shape[BATCH] != x.shape[BATCH]:
        return False
    repeats_one_token = table.strides[TOKEN] == 0 and table.shape[TOKEN] > 0
    if table.shape[TOKEN] != x.shape[TOKEN] and not repeats_one_token:
        return False
    if x.shape[HEAD] % table.shape[HEAD]:
        return False
    if x.strides[ELEMENT] != x.itemsize or out.strides[ELEMENT] != x.itemsize:
        return False
    if table.strides[ELEMENT] != table.itemsize or overlaps_itself(out):
        return False
    if address(x.pointer) == address(out.pointer) and x.strides == out.strides:
        return True
    return are_disjoint(x, out)


@compile.device_function
def _all_fit(q, k, q_out, k_out, table, head_dim, arrays):
    """Return True if q, and k if arrays is 2, can be rotated into their outputs."""
    if not fits(q, q_out, table, head_dim):
        return False
    if arrays == 1:
        return True
    if k.shape[BATCH] != q.shape[BATCH] or k.shape[TOKEN] != q.shape[TOKEN]:
        return False
    if not fits(k, k_out, table, head_dim):
        return False
    return are_disjoint(q_out, k_out) and are_disjoint(q_out, k) and are_disjoint(q, k_out)


# The rotation of an array.


@compile.device_function
def _bypasses_caches(x, out, pairs, cache_bytes):
    """Return True if results should be stored past the caches.

    They must go to another array, be too large to stay in the last-level cache, and have aligned
    vectors.
    """
    elements = x.shape[BATCH] * x.shape[TOKEN] * x.shape[HEAD] * x.shape[ELEMENT]
    if 2 * elements * x.itemsize <= cache_bytes or address(x.pointer) == address(out.pointer):
        return False
    strides = out.strides[BATCH] | out.strides[TOKEN] | out.strides[HEAD]
    return (address(out.pointer) | strides | pairs * x.itemsize) & (ALIGNMENT - 1) == 0


@compile.device_function
def _tile_shape(x, frequency_heads, parts):
    """Return how many tokens and heads a tile has.

    A tile is one token and the heads that share its cos and sin. Where the tokens of a head lie
    closer together than the heads of a token, and there are at least as many heads as parts, it is
    all tokens of one head, or of two if every part then has equally many: two heads read each cos
    and sin once.
    """
    tokens = x.shape[TOKEN]
    heads_per_frequency = x.shape[HEAD] // frequency_heads
    all_heads = x.shape[BATCH] * x.shape[HEAD]
    if tokens == 1 or abs(x.strides[TOKEN]) >= abs(x.strides[HEAD]) or all_heads < parts:
        return 1, heads_per_frequency
    if heads_per_frequency % 2 == 0 and all_heads % (2 * parts) == 0:
        return tokens, 2
    return tokens, 1


@compile.device_function
def tile_of(tokens, heads, x, out, table, block_pairs):
    """Return the tile of so many tokens and heads of x, with their strides."""
    return Tile(
        tokens,
        heads,
        x.strides[TOKEN],
        x.strides[HEAD],
        out.strides[TOKEN],
        out.strides[HEAD],
        table.strides[TOKEN],
        x.itemsize,
        out.itemsize,
        table.itemsize,
        pointer(block_pairs),
        block_pairs.size,
    )


@compile.device_function
def row_offset(x, batch, token, head):
    """Return the offset in bytes of a head vector of an array, or of a row of a table."""
    return batch * x.strides[BATCH] + token * x.strides[TOKEN] + head * x.strides[HEAD]


def make_rotate_tile(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates all pairs of a tile.

    They are rotated 64 at a time, then 32, 8 and one. Each of these takes 0.3 s to compile.
    """
    rotate_64 = pairing(64)
    rotate_32 = pairing(32)
    rotate_8 = pairing(8)
    rotate_1 = pairing(1)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_tile(x, out, cos, sin, tile, norm, nontemporal):
        first = np.intp(0)
        for block in range(tile.blocks):
            pairs = tile.block_pairs[block]
            for i in range(0, pairs & -64, 64):
                rotate_64(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal)
            for i in range(pairs & -64, pairs & -32, 32):
                rotate_32(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal)
            for i in range(pairs & -32, pairs & -8, 8):
                rotate_8(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal)
            for i in range(pairs & -8, pairs):
                rotate_1(x, out, cos, sin, i, pairs, tile, norm, first, nontemporal)
            x = advance(x, 2 * pairs * tile.itemsize)
            out = advance(out, 2 * pairs * tile.out_itemsize)
            cos = advance(cos, pairs * tile.table_itemsize)
            sin = advance(sin, pairs * tile.table_itemsize)
            first += 2 * pairs

    return rotate_tile


def _make_rotate_part(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates one of several parts of an array.

    All parts have the same number of tiles but the last ones, which may have fewer or none.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_part(x, out, table, block_pairs, cache_bytes, part, parts):
        heads_per_frequency = x.shape[HEAD] // table.shape[HEAD]
        tokens, heads = _tile_shape(x, table.shape[HEAD], parts)
        tile = tile_of(tokens, heads, x, out, table, block_pairs)
        one_block = block_pairs.size == 1
        nontemporal = one_block and _bypasses_caches(x, out, block_pairs[0], cache_bytes)
        tiles_across = x.shape[HEAD] // heads
        tiles = x.shape[TOKEN] // tokens * tiles_across  # of one batch row
        tiles_per_part = (x.shape[BATCH] * tiles + parts - 1) // parts
        for n in range(x.shape[BATCH]):
            table_row = n if table.shape[BATCH] > 1 else 0
            start = max(part * tiles_per_part - n * tiles, 0)
            stop = min((part + 1) * tiles_per_part - n * tiles, tiles)
            for index in range(start, stop):
                token = index // tiles_across * tokens
                head = index % tiles_across * heads
                source = advance(x.pointer, row_offset(x, n, token, head))
                target = advance(out.pointer, row_offset(out, n, token, head))
                group = head // heads_per_frequency
                table_offset = row_offset(table, table_row, token, group)
                cos = advance(table.cos, table_offset)
                sin = advance(table.sin, table_offset)
                rotate_tile(source, target, cos, sin, tile, None, nontemporal)

    return rotate_part


def _make_rotate_in_parallel(pairing: Callable[[int], Any], rotate_part: Any) -> Any:
    """Return the device function that rotates q, and k if arrays is 2, on several threads.

    It is separate from `_rotate`, because Numba counts references to the arrays of a parallel
    function, which would cost a serial call 0.1 µs.
    """

    @partial(compile.device_function, variant=pairing.__name__, parallel=True)
    def rotate_in_parallel(q, k, q_out, k_out, cos_sin, block_pairs, cache_bytes, arrays, parts):
        for index in prange(parts):
            part = np.intp(index)
            table = table_view(cos_sin)
            rotate_part(view(q), view(q_out), table, block_pairs, cache_bytes, part, parts)
            if arrays == 2:
                rotate_part(view(k), view(k_out), table, block_pairs, cache_bytes, part, parts)

    return rotate_in_parallel


# Placeholders for the device functions of one dtype and pairing: `compile.compile_kernel` compiles
# a copy of `_rotate` whose globals of these names are the functions that `rotation_kernel` passes.
# A closure would say the same, but Numba's cache on disk holds no closures over compiled functions.
rotate_part: Any = None
rotate_in_parallel: Any = None


def _rotate(q, k, q_out, k_out, cos_sin, block_pairs, head_dim, cache_bytes, arrays, threads):
    """Rotate q, and k if arrays is 2; see `rotation_kernel`."""
    table = table_view(cos_sin)
    if not _all_fit(view(q), view(k), view(q_out), view(k_out), table, head_dim, arrays):
        return INVALID
    elements = q.size + k.size if arrays == 2 else q.size
    if threads > 1 and elements >= PARALLEL_FROM:
        rotate_in_parallel(q, k, q_out, k_out, cos_sin, block_pairs, cache_bytes, arrays, threads)
        return DONE
    # The types of a part's number in `rotate_in_parallel`: one specialisation serves both.
    first = np.intp(0)
    one = np.intp(1)
    rotate_part(view(q), view(q_out), table, block_pairs, cache_bytes, first, one)
    if arrays == 2:
        rotate_part(view(k), view(k_out), table, block_pairs, cache_bytes, first, one)
    return DONE


@cache
def rotation_kernel(dtype: str, pairing: str) -> Any:
    """Return the compiled kernel that rotates q and k, for keys of `ELEMENTS` and of `PAIRINGS`.

    It returns `DONE`, or `INVALID` with nothing written if the arrays do not pass its checks. Its
    arguments:

    - q, k, q_out, k_out: (batch, tokens, heads, head_dim), of the element type in `ELEMENTS`;
      outputs may be the very same arrays;
    - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), cos and then sin; with stride 0
      over the tokens, which rotates all alike, they may be of one token for any number;
    - block_pairs: int64 (blocks,), the number of pairs of each block of a head vector;
    - head_dim: elements of a head vector;
    - cache_bytes: size of the last-level cache;
    - arrays: 1 rotates q alone, which is then passed as k too; 2 rotates q and k;
    - threads: maximum number of threads.
    """
    element, table_element = ELEMENTS[dtype]
    x = types.Array(element, 4, "A", readonly=True, aligned=False)
    out = types.Array(element, 4, "A", aligned=False)
    cos_sin = types.Array(table_element, 5, "A", readonly=True)
    block_pairs = types.Array(types.int64, 1, "C", readonly=True)
    number = types.intp
    signature = (x, x, out, out, cos_sin, block_pairs, number, number, number, number)
    part = _make_rotate_part(PAIRINGS[pairing])
    return compile.compile_kernel(
        _rotate,
        f"rotate_{dtype}_{pairing}",
        signature,
        rotate_part=part,
        rotate_in_parallel=_make_rotate_in_parallel(PAIRINGS[pairing], part),
    )
