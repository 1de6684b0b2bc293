"""The attention kernel: queries of packed tokens over the keys and values of a cache.

The keys of a sequence are split into ranges. A query attends to one range at a time, which gives a
state: the sums of values times weights, the largest score, and the sum of the weights relative to
it. States are merged in the order of the keys, so the bits of a result depend on its own sequence
alone. Some tokens go over the keys together; a key is read only if one of them attends to it.

Arithmetic takes about as long as memory, so memory is asked for all the time: for the values of a
range while its keys are multiplied, and for the keys of the next range, be it that of another head
or sequence, while the values are added.
"""

from __future__ import annotations

from functools import cache, partial
from math import factorial, log
from typing import Any, NamedTuple

import numpy as np
from numba import types

from rope_cpu.array_types import VALUE_FORMATS, CacheKind
from rope_cpu.kernels import compile
from rope_cpu.kernels.append import cache_types
from rope_cpu.kernels.head_vectors import transform
from rope_cpu.kernels.rotate import ELEMENT, HEAD, TOKEN, View, row_offset, view, view_type
from rope_cpu.kernels.vectors import (
    ALIGNMENT,
    address,
    advance,
    at,
    cast,
    elements,
    four,
    has_feature,
    joined,
    larger,
    load,
    load_value,
    muladd,
    pointer,
    prefetch,
    sixteen_sums,
    smaller,
    splat,
    store,
    store_quarters,
)

RANGE = 256  # keys: they and their values stay in the second cache of a core
ROWS = 4  # queries that attend at a time

# Elements that are multiplied or added at a time. The operands and sums of four rows fit in the
# registers: with AVX-512 there are 32 of 16 float32, else 16 of 8.
_PRODUCT_LANES = 16 if has_feature("avx512f") else 8
_SUM_LANES = 64 if has_feature("avx512f") else 16

# float32 from the scores of a query to those of the next, and int64 from the offsets of keys to
# those of values. Four keys are multiplied at a time: the last one repeatedly if there are fewer.
_ROOM = RANGE + 3

_LINE = 64  # bytes of a cache line

# The device functions take pointers, not arrays: slices of arrays would count references, compile
# for twice as long, and keep LLVM from vectorising loops that start at another index than 0, as
# negative ones are allowed.


class Item(NamedTuple):
    """Some new tokens of one sequence, and the keys that they go over.

    Each field is an int64, or the column of that field in an array of items.
    """

    sequence: Any
    token: Any  # the first, among the tokens of all sequences
    tokens: Any
    position: Any  # of the first token
    window: Any
    start: Any  # the first key, which begins a range
    stop: Any  # after the last key
    state: Any  # of the first token
    step: Any  # from the state of a token to that of the next


ITEM = np.dtype([(name, "i8") for name in Item._fields])


class Step(NamedTuple):
    """The arrays of a step and its numbers.

    Parts have views in place of the arrays of the cache, and pointers in place of the others.
    """

    q: Any  # float32 (tokens, heads, head_dim)
    key: Any  # those of the cache, as for `append_kernel`
    value: Any
    key_scale: Any
    value_scale: Any
    pages: Any  # int64 (sequences, pages)
    items: Any  # int64, of the dtype `ITEM`
    first_states: Any  # int64 (tokens + 1,), the first state of each token; the number of all
    sinks: Any  # float32 (heads,), -inf for none
    states: Any  # float32 (states, heads, value width + 2)
    scratch: Any  # int64 (threads, `scratch_size`)
    out: Any  # float32 (tokens, heads, value width), the results
    tokens: Any
    heads: Any
    value_dim: Any
    columns: Any  # of the pages
    count: Any  # of the items
    room: Any  # of a thread in the scratch memory
    rows: Any  # the number of queries of the largest item, filled up to a multiple of `ROWS`
    scale: Any  # float32
    softcap: Any  # float32, 0 for none


class _Vectors(NamedTuple):
    """The cached keys or values of one head in a range."""

    cached: Any  # view (pages, page_size, heads, width), of bytes for 4 bits
    width: Any  # in elements
    scale: Any  # view (pages, page_size, heads, groups of a head vector), empty without scales
    offsets: Any  # int64 (_ROOM,), in bytes
    scales: Any  # float32 (RANGE, groups), where its scales are loaded to
    stop: Any  # after the last one of the range


class _Scratch(NamedTuple):
    """The memory of a thread.

    The queries of an item are numbered by token and then by head, and divided into groups of
    `ROWS`. Queries without results fill the last group.
    """

    q: Any  # float32 (queries, head_dim), times the scale
    scores: Any  # float32 (queries, _ROOM)
    added: Any  # float32 (queries, value width + 2), the states of a range
    scales: Any  # float32 (2 + groups, RANGE), of keys, of values, and of groups of values
    offsets: Any  # int64 (2, 2, _ROOM), of keys and values, of a range and of the next
    seen: Any  # int64 (queries, 2), where the keys of each query start and stop


_LOWEST = np.finfo(np.float32).min
_LOG2_E = np.float32(1 / log(2))
_INTEGER_IN_LOW_BITS = np.float32(1.5 * 2**23)  # rounds what it is added to
_TAYLOR = tuple(np.float32(log(2) ** n / factorial(n)) for n in range(7, 0, -1))  # of 2^x - 1


@partial(compile.device_function, fastmath={"contract"})
def _split_exp(x):
    """Return 2^k and m with e^x = 2^k + 2^k·m and |m| < 0.42; x is limited to ±87.

    The relative error of e^x is some 2^-24 · |x|. That of a weight, whose x ≤ 0, is at most 2^-24
    of the largest weight, 1.
    """
    x = np.float32(-87) if x < np.float32(-87) else x  # `max` would lose NaN
    x = np.float32(87) if x > np.float32(87) else x
    y = x * _LOG2_E
    shifted = y + _INTEGER_IN_LOW_BITS
    fraction = y - (shifted - _INTEGER_IN_LOW_BITS)
    series = np.float32(0)
    for coefficient in _TAYLOR:
        series = series * fraction + coefficient
    power_bits = (cast(np.int32, np.float32(shifted)) + 127) << 23
    return cast(np.float32, np.int32(power_bits)), series * fraction


@partial(compile.device_function, fastmath={"contract"})
def _exp(x):
    power, m = _split_exp(x)
    return power * m + power


@partial(compile.device_function, fastmath={"contract"})
def _tanh(x):
    power, m = _split_exp(x + x)
    e = power * m + (power - np.float32(1))  # e^2x - 1, precise near 0
    return e / (e + np.float32(2))


@compile.device_function
def _locate(vectors, pages, head, start, stop):
    """Write the offsets of the keys start … stop − 1 of a sequence, or of values.

    That of the last one is written three times more. The scales are prefetched.
    """
    cached = vectors.cached
    scale = vectors.scale
    page_size = cached.shape[TOKEN]
    tokens_of_line = larger(_LINE // larger(abs(scale.strides[TOKEN]), 1), 1)
    index = start
    while index < stop:
        page = pages[index // page_size]
        place = index % page_size
        count = smaller(page_size - place, stop - index)
        offset = row_offset(cached, page, place, head)
        offsets = at(vectors.offsets, index % RANGE)
        for n in range(count):
            offsets[n] = offset + n * cached.strides[TOKEN]
        if scale.shape[TOKEN] > 0:
            first = advance(scale.pointer, row_offset(scale, page, place, head))
            for n in range(0, count, tokens_of_line):
                prefetch(advance(first, n * scale.strides[TOKEN]))
        index += count
    last = at(vectors.offsets, (stop - 1) % RANGE)
    for n in range(1, 4):
        last[n] = last[0]


@compile.device_function
def _copy_scales(start, count, out):
    """Write neighbouring scales to float32."""
    for i in range(0, count & -16, 16):
        store(out, i, load(start, i, 16), False)
    for i in range(count & -16, count):
        store(out, i, load(start, i, 1), False)


@compile.device_function
def _load_scales(vectors, pages, head, start, stop):
    """Load the scales, if any, of the keys start … stop − 1 of a sequence, or of its values."""
    scale = vectors.scale
    page_size = scale.shape[TOKEN]
    groups = scale.shape[ELEMENT]
    row = groups * scale.itemsize
    index = start
    while page_size > 0 and index < stop:
        place = index % page_size
        count = smaller(page_size - place, stop - index)
        first = advance(scale.pointer, row_offset(scale, pages[index // page_size], place, head))
        out = at(vectors.scales, index % RANGE * groups)
        if scale.strides[TOKEN] == row:
            _copy_scales(first, count * groups, out)
        else:
            for n in range(count):
                _copy_scales(advance(first, n * scale.strides[TOKEN]), groups, at(out, n * groups))
        index += count


@compile.device_function
def _vector(vectors, j):
    """Return the pointer to key or value j of a range."""
    return advance(vectors.cached.pointer, vectors.offsets[j])


def _make_products(lanes):
    """Return the device function that multiplies elements of four queries with those of four keys.

    It returns the vector of the four sums of products of each query.
    """
    all_lanes = 4 * lanes

    @partial(compile.device_function, variant=f"{lanes}", inline=True)
    def load_joined(starts, i):
        a, b, c, d = starts
        return joined((load(a, i, lanes), load(b, i, lanes), load(c, i, lanes), load(d, i, lanes)))

    @partial(compile.device_function, variant=f"{lanes}")
    def products(queries, keys, first, stop):
        q0, q1, q2, q3 = queries
        s0 = s1 = s2 = s3 = splat(np.float32(0), all_lanes)
        for i in range(first, stop, lanes):
            x = load_joined(keys, i)
            s0 = muladd(load_joined((q0, q0, q0, q0), i), x, s0)
            s1 = muladd(load_joined((q1, q1, q1, q1), i), x, s1)
            s2 = muladd(load_joined((q2, q2, q2, q2), i), x, s2)
            s3 = muladd(load_joined((q3, q3, q3, q3), i), x, s3)
        return sixteen_sums(joined((s0, s1, s2, s3)))

    return products


_products_of_many = _make_products(_PRODUCT_LANES)
_products_of_1 = _make_products(1)


@partial(compile.device_function, inline=True)
def _multiply(scratch, keys, values, rows, start, stop):
    """Write the products of queries with the keys start … stop − 1 of a range to their scores.

    Meanwhile the values are prefetched.
    """
    width = keys.width
    wide = width & -_PRODUCT_LANES
    size = values.cached.shape[ELEMENT] * values.cached.itemsize
    for j in range(start, stop, 4):
        for n in range(j, j + 4):
            for line in range(0, size, _LINE):
                prefetch(advance(_vector(values, n), line))
        k0 = _vector(keys, j)
        k1 = _vector(keys, j + 1)
        k2 = _vector(keys, j + 2)
        k3 = _vector(keys, j + 3)
        for row in range(0, rows, ROWS):
            queries = four(at(scratch.q, row * width), width)
            out = four(at(scratch.scores, row * _ROOM + j), _ROOM)
            x = _products_of_many(queries, (k0, k1, k2, k3), 0, wide)
            if wide < width:
                x = x + _products_of_1(queries, (k0, k1, k2, k3), wide, width)
            store_quarters(out, x)


@partial(compile.device_function, inline=True)
def _ordered(bits):
    """Return an integer for the bits of a float32, ordered as the float32 are; and back again."""
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@compile.device_function
def _largest(scores, start, stop):
    """Return the largest score; NaN may be the largest. LLVM vectorises a maximum of integers."""
    bits = cast(np.int32, scores)
    largest = _ordered(cast(np.int32, _LOWEST))
    for j in range(start, stop):
        score = _ordered(bits[j])
        largest = score if score > largest else largest
    return cast(np.float32, _ordered(largest))


@partial(compile.device_function, fastmath={"contract", "reassoc"})
def _weigh(scores, scales, start, stop, softcap):
    """Turn the products of a query into weights times scales of values.

    scales: of keys, and then of values. Return the largest score, and the sum of the weights.
    """
    value_scales = at(scales, RANGE)
    for j in range(start, stop):
        score = scores[j] * scales[j]
        # The difference of two scores of -inf would be NaN. `max` would lose NaN.
        scores[j] = _LOWEST if score < _LOWEST else score
    if softcap > 0:
        for j in range(start, stop):
            scores[j] = softcap * _tanh(scores[j] / softcap)
    largest = _largest(scores, start, stop)
    total = np.float32(0)
    for j in range(start, stop):
        weight = _exp(scores[j] - largest)
        total += weight
        scores[j] = weight * value_scales[j]
    return largest, total


@compile.device_function
def _common(seen, row):
    """Return where the values that all queries of a group attend to start and stop.

    No query of a group starts or stops after a later one.
    """
    stop = seen[2 * (row & -ROWS) + 1]
    return smaller(seen[2 * (row | (ROWS - 1))], stop), stop


def _make_add_common(lanes):
    """Return the device function that adds weighted values to elements i … end − 1 of sums.

    For each group of queries, they are the values that all of them attend to. Weights have the
    place of the scores. Meanwhile the keys of the next range are prefetched, a part of each key
    with each part of the elements.
    """

    # A plain loop over elements would be slower: LLVM would keep the sums in memory.
    @partial(compile.device_function, variant=f"{lanes}")
    def add_common(weights, values, seen, rows, i, end, sums, next_keys):
        width = values.width
        size = width + 2
        key_size = next_keys.cached.shape[ELEMENT] * next_keys.cached.itemsize
        groups = values.scale.shape[ELEMENT]
        for element in range(i, end, lanes):
            first_byte = key_size * element // width & -_LINE
            stop_byte = key_size * (element + lanes) // width & -_LINE
            if element + lanes == width:
                stop_byte = key_size
            for row in range(0, rows, ROWS):
                start, stop = _common(seen, row)
                asked = next_keys.stop if row == 0 else 0
                w0, w1, w2, w3 = four(at(weights, row * _ROOM), _ROOM)
                out = four(at(sums, row * size + element), size)
                s0 = load(out[0], 0, lanes)
                s1 = load(out[1], 0, lanes)
                s2 = load(out[2], 0, lanes)
                s3 = load(out[3], 0, lanes)
                for j in range(start, stop):
                    if j < asked:
                        key = _vector(next_keys, j)
                        for line in range(first_byte, stop_byte, _LINE):
                            prefetch(advance(key, line))
                    scales = at(values.scales, j * groups)
                    x = load_value(_vector(values, j), element, lanes, scales)
                    s0 = muladd(splat(w0[j], lanes), x, s0)
                    s1 = muladd(splat(w1[j], lanes), x, s1)
                    s2 = muladd(splat(w2[j], lanes), x, s2)
                    s3 = muladd(splat(w3[j], lanes), x, s3)
                store_quarters(out, joined((s0, s1, s2, s3)))

    return add_common


_add_common_many = _make_add_common(_SUM_LANES)
_add_common_16 = _make_add_common(16)
_add_common_1 = _make_add_common(1)


@compile.device_function
def _add_to_one(weights, values, start, stop, sums):
    """Add the weighted values start … stop − 1 of a range to the sums of one query."""
    for j in range(start, stop):
        value = _vector(values, j)
        scales = at(values.scales, j * values.scale.shape[ELEMENT])
        for i in range(values.width):
            x = load_value(value, i, 1, scales)
            store(sums, i, muladd(splat(weights[j], 1), x, load(sums, i, 1)), False)


@partial(compile.device_function, inline=True)
def _add_values(weights, values, seen, rows, sums, next_keys):
    """Write the sums of weighted values of each query, added in their order.

    seen: for each query where its values start and stop. A value outside is not multiplied by a
    weight of 0: it may be NaN.
    """
    width = values.width
    wide = width & -_SUM_LANES
    size = width + 2
    for row in range(rows):
        for i in range(width):
            sums[row * size + i] = 0
        stop = _common(seen, row)[0]
        own = at(weights, row * _ROOM)
        _add_to_one(own, values, seen[2 * row], stop, at(sums, row * size))
    _add_common_many(weights, values, seen, rows, 0, wide, sums, next_keys)
    _add_common_16(weights, values, seen, rows, wide, width & -16, sums, next_keys)
    _add_common_1(weights, values, seen, rows, width & -16, width, sums, next_keys)
    for row in range(rows):
        start = larger(seen[2 * row], _common(seen, row)[1])
        own = at(weights, row * _ROOM)
        _add_to_one(own, values, start, seen[2 * row + 1], at(sums, row * size))


@compile.device_function
def _write_scaled(x, factor, out, count):
    """Write elements times a factor."""
    for i in range(count):
        out[i] = x[i] * factor


@partial(compile.device_function, fastmath={"contract"})
def _merge(state, other, width):
    """Add to a state that of later keys."""
    largest = max(state[width], other[width])
    kept = _exp(state[width] - largest)
    added = _exp(other[width] - largest)
    state[width] = largest
    state[width + 1] = kept * state[width + 1] + added * other[width + 1]
    for i in range(width):
        state[i] = kept * state[i] + added * other[i]


@partial(compile.device_function, inline=True)
def _attend_range(step, item, head, base, shared, scratch, current, next_keys):
    """Attend to the range of keys from `base` on; leave the states in the scratch memory.

    shared: number of query heads of a key head. Keys are counted from the first of the sequence,
    those of `seen` from `base`:

        base ≤ start ≤ first … end ≤ stop ≤ base + RANGE
                       └ a token ┘
               └─────── the item ───────┘

    A token that attends to no key of the range has `end` = `first`, which may be after `stop`.
    """
    keys, values = current
    seen = scratch.seen
    start, stop = _bounds(item, base)
    pages = at(step.pages, item.sequence * step.columns)
    _load_scales(keys, pages, head, start, stop)
    _load_scales(values, pages, head, start, stop)
    rows = item.tokens * shared
    filled = (rows + ROWS - 1) & -ROWS
    _multiply(scratch, keys, values, filled, start - base, stop - base)
    for row in range(filled):
        position = item.position + smaller(row, rows - 1) // shared
        first = larger(start, position - item.window + 1) - base
        seen[2 * row] = first
        seen[2 * row + 1] = larger(first, smaller(stop, position + 1) - base)
    width = values.width
    for row in range(rows):
        scores = at(scratch.scores, row * _ROOM)
        largest, total = _weigh(
            scores, scratch.scales, seen[2 * row], seen[2 * row + 1], step.softcap
        )
        state = at(scratch.added, row * (width + 2))
        state[width] = largest
        state[width + 1] = total
    _add_values(scratch.scores, values, seen, filled, scratch.added, next_keys)


def scratch_size(rows: int, head_dim: int, value_dim: int, groups: int) -> int:
    """Return how many int64 the scratch memory of a thread takes.

    rows: that of `Step`. groups: of the scales of a value.
    """
    integers = 4 * _ROOM + 2 * rows + ALIGNMENT // 8
    floats = (2 + groups) * RANGE + rows * (head_dim + _ROOM + value_dim + 2)
    return integers + -(-floats // 2)


@partial(compile.device_function, inline=True)
def _scratch_of(step, part):
    """Return the scratch memory of a part, which the caller of the kernel allocated.

    Queries that do not start on a cache line made the products up to 4 % slower.
    """
    head_dim = step.key.shape[ELEMENT]
    start = at(step.scratch, part * step.room)
    q = cast(np.float32, advance(start, -address(start) % ALIGNMENT))
    scores = at(q, step.rows * head_dim)
    added = at(scores, step.rows * _ROOM)
    scales = at(added, step.rows * (step.value_dim + 2))
    groups = step.value_scale.shape[ELEMENT]
    offsets = cast(np.int64, at(scales, (2 + groups) * RANGE))
    seen = at(offsets, 4 * _ROOM)
    for i in range(2 * RANGE):
        scales[i] = 1
    for i in range(step.rows * head_dim):
        q[i] = 0
    return _Scratch(q, scores, added, scales, offsets, seen)


@compile.device_function
def _bounds(item, base):
    """Return where the keys of a range start and stop that an item attends to."""
    start = larger(base, item.position - item.window + 1)
    return start, smaller(base + RANGE, item.stop)


@compile.device_function
def _located(step, item, head, base, scratch, half):
    """Return the keys and values of a range, after their offsets were written.

    half: 0 or 1, of the memory for offsets: the range before has the other one.
    """
    start, stop = _bounds(item, base)
    pages = at(step.pages, item.sequence * step.columns)
    offsets = at(scratch.offsets, half * 2 * _ROOM)
    scales = scratch.scales
    # Scales of groups, of two elements in a byte, are not those that weights are multiplied by.
    value_scales = at(scales, RANGE * elements(step.value.pointer))
    end = stop - base
    width = step.key.shape[ELEMENT]
    keys = _Vectors(step.key, width, step.key_scale, offsets, scales, end)
    values = _Vectors(
        step.value, step.value_dim, step.value_scale, at(offsets, _ROOM), value_scales, end
    )
    _locate(keys, pages, head, start, stop)
    _locate(values, pages, head, start, stop)
    return keys, values


@partial(compile.device_function, inline=True)
def _item(items, index):
    """Return one of the items."""
    start = at(items, 9 * index)
    return Item(
        start[0], start[1], start[2], start[3], start[4], start[5], start[6], start[7], start[8]
    )


@compile.device_function
def _turn(step, part, parts, heads, turn):
    """Return the item and the key head of a turn of a part, which takes `heads` of an item."""
    kv_heads = step.key.shape[HEAD]
    index = (part + turn // heads * parts) * heads + turn % heads
    return _item(step.items, index // kv_heads), index % kv_heads


def _attend_part(arguments, part, parts):
    """Write the states of one of several parts of the items and key heads."""
    step = arguments[0]
    kv_heads = step.key.shape[HEAD]
    head_dim = step.key.shape[ELEMENT]
    width = step.value_dim
    shared = step.heads // kv_heads
    scratch = _scratch_of(step, part)
    # Where heads are neighbours in memory, the processor loads some of the next one ahead. So a
    # thread takes all heads of an item, unless there are too few items to keep all threads busy.
    heads = kv_heads if step.count >= 8 * parts else 1
    turns = (step.count * kv_heads // heads - part + parts - 1) // parts * heads
    if turns <= 0:
        return
    half = 0
    item, head = _turn(step, part, parts, heads, 0)
    current = _located(step, item, head, item.start, scratch, half)
    for turn in range(turns):
        item, head = _turn(step, part, parts, heads, turn)
        # The last turn is followed by none: its own first keys are prefetched once more.
        next_item, next_head = _turn(step, part, parts, heads, smaller(turn + 1, turns - 1))
        for row in range(item.tokens * shared):
            query = (item.token + row // shared) * step.heads + head * shared + row % shared
            x = at(step.q, query * head_dim)
            _write_scaled(x, step.scale, at(scratch.q, row * head_dim), head_dim)
        for base in range(item.start, item.stop, RANGE):
            half = 1 - half
            if base + RANGE < item.stop:
                following = _located(step, item, head, base + RANGE, scratch, half)
            else:
                following = _located(step, next_item, next_head, next_item.start, scratch, half)
            _attend_range(step, item, head, base, shared, scratch, current, following[0])
            for row in range(item.tokens * shared):
                first = item.state + row // shared * item.step
                state_index = first * step.heads + head * shared + row % shared
                state = at(step.states, state_index * (width + 2))
                added = at(scratch.added, row * (width + 2))
                if base == item.start:
                    _write_scaled(added, np.float32(1), state, width + 2)
                else:
                    _merge(state, added, width)
            current = following


def _finish_part(arguments, part, parts):
    """Write the results of some tokens."""
    step = arguments[0]
    width = step.value_dim
    size = step.heads * (width + 2)  # of the states of a token
    for turn in range((step.tokens - part + parts - 1) // parts):
        token = part + turn * parts
        first = step.first_states[token]
        for head in range(step.heads):
            state = at(step.states, first * size + head * (width + 2))
            for other in range(1, step.first_states[token + 1] - first):
                _merge(state, at(state, other * size), width)
            sink = step.sinks[head]
            largest = max(state[width], sink)
            kept = _exp(state[width] - largest)
            total = kept * state[width + 1] + _exp(sink - largest)
            out = at(step.out, (token * step.heads + head) * width)
            _write_scaled(state, kept / total, out, width)


PARTS = {"attend": _attend_part, "finish": _finish_part}


def _attend(attend, finish, arguments, parts):
    """Write the results; see `attention_kernel`."""
    step = Step(*arguments)
    views = (view(step.key), view(step.value), view(step.key_scale), view(step.value_scale))
    indices = (pointer(step.pages), pointer(step.items), pointer(step.first_states))
    memory = (pointer(step.sinks), pointer(step.states), pointer(step.scratch), pointer(step.out))
    for function in (attend, finish):
        compile.run_parts(
            function, (pointer(step.q), *views, *indices, *memory, *arguments[12:]), parts
        )


def _transform(q, width):
    """Multiply float32 queries by the Hadamard matrix of cached keys; see `transform`."""
    transform(pointer(q), q.size, width)


@cache
def transform_kernel() -> Any:
    """Return the compiled kernel that transforms queries in place.

    Its arguments are a contiguous array, whose size is a multiple of 64, and the width of a query.
    """
    signature = (types.float32[::1], types.intp)
    return compile.compile_kernel(_transform, "transform_queries", signature)


def _step_types(kind: CacheKind) -> Step:
    """Return Numba's types of a step."""
    key, value, key_scale, value_scale = cache_types(kind, readonly=True)
    return Step(
        q=types.Array(types.float32, 3, "C", readonly=True, aligned=False),
        key=key,
        value=value,
        key_scale=key_scale,
        value_scale=value_scale,
        pages=types.Array(types.int64, 2, "C", readonly=True),
        items=types.Array(types.int64, 1, "C", readonly=True, aligned=False),
        first_states=types.int64[::1],
        sinks=types.float32[::1],
        states=types.float32[:, :, ::1],
        scratch=types.int64[:, ::1],
        out=types.float32[:, :, ::1],
        tokens=types.intp,
        heads=types.intp,
        value_dim=types.intp,
        columns=types.intp,
        count=types.intp,
        room=types.intp,
        rows=types.intp,
        scale=types.float32,
        softcap=types.float32,
    )


def _type_in_parts(kind: types.Type) -> types.Type:
    """Return the type in parts of an array or number of a step."""
    if not isinstance(kind, types.Array):
        return kind
    return view_type(View, kind.dtype) if kind.ndim == 4 else types.CPointer(kind.dtype)


@cache
def attention_part(kind: CacheKind, name: str) -> Any:
    """Return a compiled part of the kernel for a kind of cache; name: a key of `PARTS`."""
    step = types.NamedTuple(map(_type_in_parts, _step_types(kind)), Step)
    has_scales = any(VALUE_FORMATS[name].scale_dtype is not None for name in kind[:2])
    level = 3 if has_scales else 1  # int8 takes 1.02 of the time at level 1
    return compile.compile_part(PARTS[name], f"attention_{name}_{kind}", step, level)


@cache
def attention_kernel(kind: CacheKind) -> Any:
    """Return the compiled kernel for a kind of cache whose keys are as they are.

    It takes the addresses of the parts "attend" and "finish", a `Step` of checked arrays as a plain
    tuple, whose type Numba finds faster, and the number of threads.
    """
    signature = (types.intp, types.intp, types.Tuple(_step_types(kind)), types.intp)
    return compile.compile_kernel(_attend, f"attention_{kind}", signature)
