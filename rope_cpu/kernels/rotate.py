"""The rotation kernel: each pair (a, b) of a head vector becomes (a·cos − b·sin, b·cos + a·sin).

The functions from the inside out:

- `half_split` and `interleaved` make the device function that rotates some pairs of a tile, which
  is a run of tokens and heads;
- `_rotate_part` is the loop over the tiles of one part of the arrays, the work of a thread;
- `_rotate` is the entry point: it checks the arrays and splits the work between threads.

Arrays are (batch, tokens, heads, head_dim) with a contiguous last axis; strides are in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rope_cpu.kernels import compile
from rope_cpu.kernels.vectors import (
    ALIGNMENT,
    address,
    advance,
    doubled,
    even_negated,
    load,
    muladd,
    pointer,
    splat,
    store,
    swapped,
)

# Numba's types of the array elements, and of cos and sin, for each dtype. 16-bit floats are passed
# as the integers of their bits: int16 stands for float16 and uint16 for bfloat16.
ELEMENTS = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.int16, types.float32),
    "bfloat16": (types.uint16, types.float32),
}

NUMBERS = types.Array(types.int64, 1, "C", readonly=True)

# Minimum number of elements for several threads. With 40 heads of 128, two threads took as long as
# one for 16 tokens, and 0.8 to 0.9 of its time for 32; beside two busy processes, 1.1 of it.
PARALLEL_FROM = 2**17

# The axes of arrays. Shapes and strides are indexed with these constants only: a variable index
# compiles to one branch for each axis.
BATCH = 0
TOKEN = 1
HEAD = 2
ELEMENT = 3

# The numbers of a rotation, in one array of int64, since each argument takes a call 20 ns: the
# address of the part of the kernel, the width of head vectors and of their rotated part, the size
# of the last-level cache in bytes, and from `BLOCKS` on the number of pairs of each block.
PART = 0
HEAD_DIM = 1
ROTARY_DIM = 2
CACHE_BYTES = 3
BLOCKS = 4


class View(NamedTuple):
    """An array as the device functions see it."""

    pointer: Any
    shape: Any  # (batch, tokens, heads, head_dim)
    strides: Any
    itemsize: Any


class Span(NamedTuple):
    """The memory of an array, in bytes."""

    start: Any  # address
    stop: Any
    batch: Any  # strides
    token: Any
    head: Any
    heads: Any  # size of the heads of a token
    row: Any  # size of a head vector


class Table(NamedTuple):
    """The cos and sin of the tokens; both have the same shape and strides."""

    cos: Any  # pointer
    sin: Any  # pointer
    shape: Any  # (batch or 1, tokens, frequency heads, pairs)
    strides: Any
    itemsize: Any


class Step(NamedTuple):
    """What a thread needs for its part of a rotation, without arrays, whose references would count.

    k and k_out are rotated if arrays is 2.
    """

    q: Any  # view
    k: Any
    q_out: Any
    k_out: Any
    table: Any
    numbers: Any  # pointer
    count: Any  # of the numbers
    arrays: Any


def make_load_normalised(lanes: int) -> Any:
    """Return the device function that loads elements of a head vector and normalises them.

    It loads elements from i on of a part of head vector `head`; x: pointer to the part. norm: a
    `Norm`, or None, for which Numba compiles the load alone. element: the place of the first one in
    the whole head vector, and so of its weight.
    """

    @partial(compile.device_function, variant=f"{lanes}", inline=True)
    def load_normalised(x, i, norm, head, element):
        elements = load(x, i, lanes)
        if norm is None:
            return elements
        if norm.is_given:
            elements = (
                elements * splat(norm.factors[head], lanes) * load(norm.weight, element, lanes)
            )
        return elements

    return load_normalised


# Device functions that rotate `lanes` pairs of a run of tokens and heads, from pair i of a block
# on. A block is a run of elements of a head vector within which pairs are formed. x, out, table:
# from the first head vector on, and from its cos and sin on. first: the place of the block's first
# element in a head vector. pairs: the number of pairs of the block. norm: a `Norm` that is applied
# before, to one token, or None. nontemporal: whether results are stored past the caches.


def half_split(lanes: int) -> Any:
    """Return the device function that rotates `lanes` of the pairs (i, i + pairs)."""
    load_normalised = make_load_normalised(lanes)

    @partial(compile.device_function, variant=f"half_{lanes}")
    def rotate(x, out, table, tokens, heads, first, pairs, i, norm, nontemporal):
        place = first + i
        for token in range(tokens):
            c = load(advance(table.cos, token * table.strides[TOKEN]), first // 2 + i, lanes)
            s = load(advance(table.sin, token * table.strides[TOKEN]), first // 2 + i, lanes)
            row = advance(x.pointer, token * x.strides[TOKEN] + place * x.itemsize)
            out_row = advance(out.pointer, token * out.strides[TOKEN] + place * out.itemsize)
            for head in range(heads):
                a = load_normalised(row, 0, norm, head, place)
                b = load_normalised(row, pairs, norm, head, place + pairs)
                # Vectors have no negation, which a·c − b·s as `muladd` would need.
                store(out_row, 0, a * c - b * s, nontemporal)
                store(out_row, pairs, muladd(b, c, a * s), nontemporal)
                row = advance(row, x.strides[HEAD])
                out_row = advance(out_row, out.strides[HEAD])

    return rotate


def interleaved(lanes: int) -> Any:
    """Return the device function that rotates `lanes` of the pairs (2i, 2i + 1).

    In vectors: (a, b)·(cos, cos) + (b, a)·(−sin, sin). 64 pairs as one vector need more registers
    than there are: float32 took 1.2 to 1.4 times as long. Two vectors of 32 share the loops.
    """
    low_lanes = min(lanes, 32)
    load_normalised = make_load_normalised(2 * low_lanes)

    @partial(compile.device_function, variant=f"interleaved_{lanes}")
    def rotate(x, out, table, tokens, heads, first, pairs, i, norm, nontemporal):
        place = first + 2 * i
        high = 2 * low_lanes  # after the place
        for token in range(tokens):
            cos = advance(table.cos, token * table.strides[TOKEN])
            sin = advance(table.sin, token * table.strides[TOKEN])
            c = doubled(load(cos, place // 2, low_lanes))
            s = even_negated(doubled(load(sin, place // 2, low_lanes)))
            if lanes > low_lanes:
                c_high = doubled(load(cos, place // 2 + low_lanes, low_lanes))
                s_high = even_negated(doubled(load(sin, place // 2 + low_lanes, low_lanes)))
            row = advance(x.pointer, token * x.strides[TOKEN] + place * x.itemsize)
            out_row = advance(out.pointer, token * out.strides[TOKEN] + place * out.itemsize)
            for head in range(heads):
                ab = load_normalised(row, 0, norm, head, place)
                store(out_row, 0, muladd(ab, c, swapped(ab) * s), nontemporal)
                if lanes > low_lanes:
                    ab = load_normalised(row, high, norm, head, place + high)
                    store(out_row, high, muladd(ab, c_high, swapped(ab) * s_high), nontemporal)
                row = advance(row, x.strides[HEAD])
                out_row = advance(out_row, out.strides[HEAD])

    return rotate


PAIRINGS: dict[str, Callable[[int], Any]] = {"half": half_split, "interleaved": interleaved}


# From arrays to views.


@intrinsic
def view(typing: Any, x: Any) -> Any:
    """Return the view of an array of four axes."""
    result = view_type(View, x.dtype)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = context.make_array(x)(context, builder, args[0])
        fields = (array.data, array.shape, array.strides, array.itemsize)
        return context.make_tuple(builder, result, fields)

    return result(x), emit


def view_type(kind: Any, *elements: types.Type) -> types.NamedTuple:
    """Return Numba's type of a `View` or `Table`, with pointers to elements of these types."""
    pointers = [types.CPointer(element) for element in elements]
    four = types.UniTuple(types.intp, 4)
    return types.NamedTuple((*pointers, four, four, types.intp), kind)


@partial(compile.device_function, inline=True)
def table_view(cos_sin):
    """Return the view of an array whose first axis holds cos and sin."""
    cos = pointer(cos_sin)
    sin = advance(cos, cos_sin.strides[0])
    return Table(cos, sin, cos_sin.shape[1:], cos_sin.strides[1:], cos_sin.itemsize)


# Checks of shapes and aliasing.


@compile.device_function
def span(x):
    """Return the memory of a view, of no bytes if it has no heads."""
    row = x.shape[ELEMENT] * x.itemsize
    first = address(x.pointer)
    batch_reach = (x.shape[BATCH] - 1) * x.strides[BATCH]
    token_reach = (x.shape[TOKEN] - 1) * x.strides[TOKEN]
    head_reach = (x.shape[HEAD] - 1) * x.strides[HEAD]
    start = first
    stop = first + row
    for reach in (batch_reach, token_reach, head_reach):
        if reach < 0:
            start += reach
        else:
            stop += reach
    if x.shape[HEAD] == 0:
        start = stop = np.intp(0)
    return Span(
        start, stop, x.strides[BATCH], x.strides[TOKEN], x.strides[HEAD], head_reach + row, row
    )


@compile.device_function
def are_disjoint(x, y):
    """Return True if two arrays certainly share no element, by their spans.

    Either one array ends before the other begins, or both are views of one buffer, such as q and k
    in packed QKV. Then the heads of a token of x and those of y must not overlap, either as two
    ranges or, where they alternate, one by one.
    """
    if x.stop <= y.start or y.stop <= x.start:
        return True
    if x.batch != y.batch or x.token != y.token or x.head < 0 or y.head < 0:
        return False
    distance = y.start - x.start
    period = _common_divisor(x.batch, x.token)
    if _are_periodically_disjoint(distance, period, x.heads, y.heads):
        return True
    if x.head != y.head:
        return False
    period = _common_divisor(period, x.head)
    return _are_periodically_disjoint(distance, period, x.row, y.row)


@compile.device_function
def _common_divisor(x, y):
    """Return the greatest common divisor of two strides. Numba's `gcd` takes 0.1 s to compile."""
    while y != 0:
        x, y = y, x % y
    return abs(x)


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
    batch = x.shape[BATCH]
    tokens = x.shape[TOKEN]
    heads = x.shape[HEAD]
    batch_stride = abs(x.strides[BATCH])
    token_stride = abs(x.strides[TOKEN])
    head_stride = abs(x.strides[HEAD])
    row = x.shape[ELEMENT] * x.itemsize
    return not (
        _is_nested(batch_stride, batch, token_stride, tokens)
        and _is_nested(batch_stride, batch, head_stride, heads)
        and _is_nested(token_stride, tokens, head_stride, heads)
        and (batch <= 1 or batch_stride >= row)
        and (tokens <= 1 or token_stride >= row)
        and (heads <= 1 or head_stride >= row)
    )


@partial(compile.device_function, inline=True)
def _is_nested(stride, count, other_stride, other_count):
    """Return True if all steps along one of two axes fit into one step along the other."""
    return stride * count <= other_stride or other_stride * other_count <= stride


@partial(compile.device_function, inline=True)
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
    return are_disjoint(span(x), span(out))


@partial(compile.device_function, inline=True)
def _all_fit(step):
    """Return True if q, and k if arrays is 2, can be rotated into their outputs."""
    q, k, q_out, k_out = step[:4]
    for which in range(step.arrays):
        x = k if which else q
        out = k_out if which else q_out
        if x.shape[BATCH] != q.shape[BATCH] or x.shape[TOKEN] != q.shape[TOKEN]:
            return False
        if not fits(x, out, step.table, step.numbers[HEAD_DIM]):
            return False
    if step.arrays == 1:
        return True
    q_span = span(q_out)
    k_span = span(k_out)
    return (
        are_disjoint(q_span, k_span)
        and are_disjoint(q_span, span(k))
        and are_disjoint(span(q), k_span)
    )


# The rotation of an array.


@compile.device_function
def _elements(x):
    """Return the number of elements of a view."""
    return x.shape[BATCH] * x.shape[TOKEN] * x.shape[HEAD] * x.shape[ELEMENT]


@partial(compile.device_function, inline=True)
def _bypasses_caches(x, out, pairs, cache_bytes):
    """Return True if results should be stored past the caches.

    They must go to another array, be too large to stay in the last-level cache, and have aligned
    vectors.
    """
    if 2 * _elements(x) * x.itemsize <= cache_bytes or address(x.pointer) == address(out.pointer):
        return False
    strides = out.strides[BATCH] | out.strides[TOKEN] | out.strides[HEAD]
    return (address(out.pointer) | strides | pairs * x.itemsize) & (ALIGNMENT - 1) == 0


@partial(compile.device_function, inline=True)
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


@intrinsic
def row_offset(typing: Any, x: Any, batch: Any, token: Any, head: Any) -> Any:
    """Return the offset in bytes of a head vector of an array, or of a row of a table."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        strides = builder.extract_value(args[0], x.fields.index("strides"))
        steps = cgutils.unpack_tuple(builder, strides)
        offsets = [builder.mul(*pair) for pair in zip(args[1:], steps[:ELEMENT], strict=True)]
        return builder.add(builder.add(offsets[BATCH], offsets[TOKEN]), offsets[HEAD])

    return types.intp(x, types.intp, types.intp, types.intp), emit


@compile.device_function
def from_row(x, batch, token, head):
    """Return the view of an array from a head vector on."""
    start = advance(x.pointer, row_offset(x, batch, token, head))
    return View(start, x.shape, x.strides, x.itemsize)


@compile.device_function
def table_from_row(table, batch, token, head):
    """Return the cos and sin from those of a token and frequency head on."""
    offset = row_offset(table, batch, token, head)
    cos = advance(table.cos, offset)
    return Table(cos, advance(table.sin, offset), table.shape, table.strides, table.itemsize)


def make_rotate_tile(pairing: Callable[[int], Any], widest: int = 64) -> Any:
    """Return the device function that rotates all pairs of a tile, a run of tokens and heads.

    They are rotated 64 at a time, then 32, 8 and one. Each of these takes 0.1 s to compile. Without
    64, head vectors of 128 took up to 1.3 times as long, and without 32 those of 64 up to 1.8.
    widest: 32 for float64, of which 64 pairs do not fit the registers: up to 1.5 times as long.
    """
    rotate_widest = pairing(widest)
    rotate_32 = pairing(32)
    rotate_8 = pairing(8)
    rotate_1 = pairing(1)

    @partial(compile.device_function, variant=pairing.__name__, inline=True)
    def rotate_tile(x, out, table, tokens, heads, numbers, count, norm, nontemporal):
        first = np.intp(0)
        for block in range(BLOCKS, count):
            n = numbers[block]
            for i in range(0, n & -widest, widest):
                rotate_widest(x, out, table, tokens, heads, first, n, i, norm, nontemporal)
            for i in range(n & -widest, n & -32, 32):
                rotate_32(x, out, table, tokens, heads, first, n, i, norm, nontemporal)
            for i in range(n & -32, n & -8, 8):
                rotate_8(x, out, table, tokens, heads, first, n, i, norm, nontemporal)
            for i in range(n & -8, n):
                rotate_1(x, out, table, tokens, heads, first, n, i, norm, nontemporal)
            first += 2 * n

    return rotate_tile


# Placeholder for the device function of a pairing: `compile.compile_part` compiles a copy of
# `_rotate_part` whose global of this name is the function that `rotation_part` passes.
rotate_tile: Any = None


def _rotate_part(arguments, part, parts):
    """Rotate one of several parts of q, and of k if arrays is 2.

    All parts have the same number of tiles but the last ones, which may have fewer or none.
    """
    step = arguments[0]
    table = step.table
    numbers = step.numbers
    for which in range(step.arrays):
        x = step.k if which else step.q
        out = step.k_out if which else step.q_out
        heads_per_frequency = x.shape[HEAD] // table.shape[HEAD]
        tokens, heads = _tile_shape(x, table.shape[HEAD], parts)
        bypasses = _bypasses_caches(x, out, numbers[BLOCKS], numbers[CACHE_BYTES])
        nontemporal = step.count == BLOCKS + 1 and bypasses
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
                source = from_row(x, n, token, head)
                target = from_row(out, n, token, head)
                rows = table_from_row(table, table_row, token, head // heads_per_frequency)
                rotate_tile(
                    source, target, rows, tokens, heads, numbers, step.count, None, nontemporal
                )


def _rotate(numbers, q, k, q_out, k_out, cos_sin, arrays, threads):
    """Rotate q, and k if arrays is 2; see `rotation_kernel`."""
    views = (view(q), view(k), view(q_out), view(k_out), table_view(cos_sin))
    step = Step(*views, pointer(numbers), numbers.size, arrays)
    if not _all_fit(step):
        return False
    elements = _elements(step.q) + (arrays - 1) * _elements(step.k)
    parts = threads if elements >= PARALLEL_FROM else np.intp(1)
    compile.run_parts(numbers[PART], step, parts)
    return True


@cache
def rotation_part(dtype: str, pairing: str) -> Any:
    """Return the compiled part of the kernel, for keys of `ELEMENTS` and of `PAIRINGS`."""
    element, table_element = ELEMENTS[dtype]
    x = view_type(View, element)
    table = view_type(Table, table_element, table_element)
    numbers = types.CPointer(types.int64)
    step = types.NamedTuple((x, x, x, x, table, numbers, types.intp, types.intp), Step)
    return compile.compile_part(
        _rotate_part,
        f"rotate_part_{dtype}_{pairing}",
        step,
        rotate_tile=make_rotate_tile(PAIRINGS[pairing], 32 if dtype == "float64" else 64),
    )


@cache
def rotation_kernel(dtype: str) -> Any:
    """Return the compiled kernel that rotates q and k of a dtype, a key of `ELEMENTS`.

    It returns True, or False with nothing written if the arrays do not pass its checks. Its
    arguments:

    - numbers: those of the rotation, see `BLOCKS`, with the part for a pairing;
    - q, k, q_out, k_out: (batch, tokens, heads, head_dim), of the element type in `ELEMENTS`;
      outputs may be the very same arrays;
    - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), cos and then sin; with stride 0
      over the tokens, which rotates all alike, they may be of one token for any number;
    - arrays: 1 rotates q alone, which is then passed as k too; 2 rotates q and k;
    - threads: maximum number of threads.
    """
    element, table_element = ELEMENTS[dtype]
    x = types.Array(element, 4, "A", readonly=True, aligned=False)
    out = types.Array(element, 4, "A", aligned=False)
    cos_sin = types.Array(table_element, 5, "A", readonly=True)
    signature = (NUMBERS, x, x, out, out, cos_sin, types.intp, types.intp)
    # A call for one token takes 1.03 of the time at level 1.
    return compile.compile_kernel(_rotate, f"rotate_{dtype}", signature, level=3)
