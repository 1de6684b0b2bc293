"""The attention kernel: queries of packed tokens over the keys and values of a cache.

The keys of a sequence are split into ranges. A query attends to one range at a time, which gives a
state: the sums of values times weights, the largest score, and the sum of the weights relative to
it. States are merged in the order of the keys, so the bits of a result depend on its own sequence
alone. Some tokens go over the keys together; a key is read only if one of them attends to it.
"""

from __future__ import annotations

from functools import cache, partial
from math import factorial, log
from typing import Any, NamedTuple

import numpy as np
from numba import carray, from_dtype, types

from rope_cpu.kernels import compile
from rope_cpu.kernels.append import cache_type
from rope_cpu.kernels.rotate import ELEMENT, TOKEN, row_offset, view
from rope_cpu.kernels.vectors import (
    ALIGNMENT,
    address,
    advance,
    byte_pointer,
    has_feature,
    joined,
    load,
    muladd,
    pointer,
    prefetch,
    sixteen_sums,
    splat,
    store,
    store_quarters,
)

RANGE = 256  # keys: they and their values stay in the second cache of a core
ROWS = 4  # queries that attend at a time
AHEAD = 12  # keys, by which memory is asked for a key before its use

# Elements that are multiplied or added at a time. The operands and sums of four rows fit in the
# registers: with AVX-512 there are 32 of 16 float32, else 16 of 8.
_PRODUCT_LANES = 16 if has_feature("avx512f") else 8
_SUM_LANES = 64 if has_feature("avx512f") else 16


class Item(NamedTuple):
    """Some new tokens of one sequence, and the keys that they go over.

    Each field is an integer, or the column of that field in an array of items.
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
    """The arrays of a step, and its softcap."""

    q: Any  # float32 (tokens, heads, head_dim)
    scale: Any  # float32
    key: Any  # as in the `Step` of `rope_cpu.kernels.append`
    value: Any
    key_scale: Any
    value_scale: Any
    pages: Any  # int64 (sequences, pages)
    items: Any  # of the dtype `ITEM`
    first_states: Any  # int64 (tokens + 1,), the first state of each token; the number of all
    sinks: Any  # float32 (heads,), -inf for none
    softcap: Any  # float32, 0 for none
    states: Any  # float32 (states, heads, value width + 2)
    rows: Any  # the number of queries of the largest item, filled up to a multiple of `ROWS`
    scratch: Any  # int64 (threads, `scratch_size`)
    out: Any  # float32 (tokens, heads, value width), the results


class _Vectors(NamedTuple):
    """The cached keys or values of one head in a range."""

    cached: Any  # view (pages, page_size, heads, width)
    scale: Any  # view (pages, page_size, heads, 1), empty without scales
    offsets: Any  # int64 (RANGE,), in bytes
    scales: Any  # float32 (RANGE,)


class _Scratch(NamedTuple):
    """The memory of a thread.

    The queries of an item are numbered by token and then by head, and filled up to a multiple of
    `ROWS` by queries without results.
    """

    q: Any  # (queries, head_dim), times the scale
    keys: Any
    values: Any
    scores: Any  # (queries, RANGE + 3)
    seen: Any  # (queries, 2), where the keys of each query start and stop
    added: Any  # (queries, value width + 2), the states of a range


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
    power_bits = (np.float32(shifted).view(np.int32) + 127) << 23
    return np.int32(power_bits).view(np.float32), series * fraction


@partial(compile.device_function, fastmath={"contract"})
def _exp(x):
    power, m = _split_exp(x)
    return power * m + power


@partial(compile.device_function, fastmath={"contract"})
def _tanh(x):
    power, m = _split_exp(x + x)
    e = power * m + (power - np.float32(1))  # e^2x - 1, precise near 0
    return e / (e + np.float32(2))


@partial(compile.device_function, inline=True)
def _locate(vectors, pages, head, start, stop):
    """Write the offsets and scales of the keys start … stop − 1 of a sequence, or of values."""
    cached = vectors.cached
    page_size = cached.shape[TOKEN]
    index = start
    while index < stop:
        page = pages[index // page_size]
        place = index % page_size
        count = min(page_size - place, stop - index)
        offset = row_offset(cached, page, place, head)
        scale = advance(vectors.scale.pointer, row_offset(vectors.scale, page, place, head))
        for n in range(count):
            vectors.offsets[index % RANGE + n] = offset + n * cached.strides[TOKEN]
            if vectors.scale.shape[TOKEN] > 0:
                vectors.scales[index % RANGE + n] = advance(
                    scale, n * vectors.scale.strides[TOKEN]
                )[0]
        index += count


@compile.device_function
def _vector(vectors, j, stop):
    """Return the pointer to key or value j of a range, or the last one, stop − 1, if it is less."""
    return advance(vectors.cached.pointer, vectors.offsets[min(j, stop - 1)])


@compile.device_function
def _prefetch(vectors, j, stop):
    """Load the cache lines of a key or value, of 64 bytes each, ahead of its use."""
    start = _vector(vectors, j, stop)
    size = vectors.cached.shape[ELEMENT] * vectors.cached.itemsize
    for line in range(-(address(start) % 64), size, 64):
        prefetch(advance(start, line))


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


@compile.device_function
def _four(start, step):
    """Return four pointers, `step` bytes apart."""
    return start, advance(start, step), advance(start, 2 * step), advance(start, 3 * step)


@partial(compile.device_function, inline=True)
def _multiply(q, keys, values, start, stop, scores):
    """Write the products of queries with the keys start … stop − 1 of a range.

    Meanwhile memory is asked for the values. scores: (queries, at least stop + 3); the last product
    of a row is repeated up to three times.
    """
    width = q.shape[1]
    for j in range(start, stop, 4):
        for n in range(j, j + 4):
            _prefetch(keys, n + AHEAD, stop)
            _prefetch(values, n, stop)
        k0 = _vector(keys, j, stop)
        k1 = _vector(keys, j + 1, stop)
        k2 = _vector(keys, j + 2, stop)
        k3 = _vector(keys, j + 3, stop)
        for row in range(0, len(q), ROWS):
            queries = _four(pointer(q[row:]), q.strides[0])
            out = _four(pointer(scores[row:, j:]), scores.strides[0])
            x = _products_of_many(queries, (k0, k1, k2, k3), 0, width & -_PRODUCT_LANES)
            y = _products_of_1(queries, (k0, k1, k2, k3), width & -_PRODUCT_LANES, width)
            store_quarters(out, x + y)


# Pointers: a slice of an array would count its references, and LLVM does not vectorise a loop over
# an array from another index than 0, as Numba allows for negative ones.


@partial(compile.device_function, fastmath={"nnan", "nsz"})
def _largest(scores, start, stop):
    """Return the largest score; any number if one is NaN, whose weight is NaN all the same."""
    largest = _LOWEST
    for j in range(start, stop):
        largest = max(largest, scores[j])
    return largest


@partial(compile.device_function, fastmath={"contract", "reassoc"})
def _weigh(scores, key_scales, value_scales, start, stop, softcap):
    """Turn the products of a query into weights times scales of values.

    Return the largest score, and the sum of the weights.
    """
    for j in range(start, stop):
        score = scores[j] * key_scales[j]
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
    stop = seen[row & -ROWS, 1]
    return min(seen[row | (ROWS - 1), 0], stop), stop


def _make_add_common(lanes):
    """Return the device function that adds weighted values to elements i … end − 1 of sums.

    They are the values that the queries of each group have in common.
    """

    # A plain loop over elements would be slower: LLVM would keep the sums in memory.
    @partial(compile.device_function, variant=f"{lanes}")
    def add_common(weights, values, seen, i, end, sums):
        for element in range(i, end, lanes):
            for row in range(0, len(seen), ROWS):
                start, stop = _common(seen, row)
                out = _four(pointer(sums[row:, element:]), sums.strides[0])
                s0 = load(out[0], 0, lanes)
                s1 = load(out[1], 0, lanes)
                s2 = load(out[2], 0, lanes)
                s3 = load(out[3], 0, lanes)
                for j in range(start, stop):
                    x = load(_vector(values, j, stop), element, lanes)
                    s0 = muladd(splat(weights[row, j], lanes), x, s0)
                    s1 = muladd(splat(weights[row + 1, j], lanes), x, s1)
                    s2 = muladd(splat(weights[row + 2, j], lanes), x, s2)
                    s3 = muladd(splat(weights[row + 3, j], lanes), x, s3)
                store_quarters(out, joined((s0, s1, s2, s3)))

    return add_common


_add_common_many = _make_add_common(_SUM_LANES)
_add_common_16 = _make_add_common(16)
_add_common_1 = _make_add_common(1)


@compile.device_function
def _add_to_one(weights, values, start, stop, sums):
    """Add the weighted values start … stop − 1 of a range to the sums of one query."""
    for j in range(start, stop):
        x = _vector(values, j, stop)
        for i in range(sums.size - 2):
            total = load(pointer(sums), i, 1)
            store(pointer(sums), i, muladd(splat(weights[j], 1), load(x, i, 1), total), False)


@partial(compile.device_function, inline=True)
def _add_values(weights, values, seen, sums):
    """Write the sums of weighted values of each query, added in their order.

    seen: for each query where its values start and stop. A value outside is not multiplied by a
    weight of 0: it may be NaN.
    """
    width = values.cached.shape[ELEMENT]
    for row in range(len(seen)):
        sums[row, :width] = 0
        _add_to_one(weights[row], values, seen[row, 0], _common(seen, row)[0], sums[row])
    _add_common_many(weights, values, seen, 0, width & -_SUM_LANES, sums)
    _add_common_16(weights, values, seen, width & -_SUM_LANES, width & -16, sums)
    _add_common_1(weights, values, seen, width & -16, width, sums)
    for row in range(len(seen)):
        start = max(seen[row, 0], _common(seen, row)[1])
        _add_to_one(weights[row], values, start, seen[row, 1], sums[row])


@compile.device_function
def _write_scaled(x, factor, out):
    """Write as many elements times a factor as `out` has."""
    for i in range(out.size):
        out[i] = x[i] * factor


@partial(compile.device_function, fastmath={"contract"})
def _merge(state, other):
    """Add to a state that of later keys."""
    largest = max(state[-2], other[-2])
    kept = _exp(state[-2] - largest)
    added = _exp(other[-2] - largest)
    state[-2] = largest
    state[-1] = kept * state[-1] + added * other[-1]
    for i in range(state.size - 2):
        state[i] = kept * state[i] + added * other[i]


@partial(compile.device_function, inline=True)
def _attend_range(step, item, head, base, shared, scratch):
    """Attend to the range of keys from `base` on; leave the states in the scratch memory.

    shared: number of query heads of a key head. Keys by their index in the sequence; those of
    `seen` are relative to `base`:

        base ≤ start ≤ first … end ≤ stop ≤ base + RANGE
               └ keys of any token ┘
                       └ keys of one token
    """
    keys = scratch.keys
    values = scratch.values
    start = max(base, item.position - item.window + 1)
    stop = min(base + RANGE, item.stop)
    _locate(keys, step.pages[item.sequence], head, start, stop)
    _locate(values, step.pages[item.sequence], head, start, stop)
    rows = item.tokens * shared
    seen = scratch.seen[: -(-rows // ROWS) * ROWS]
    _multiply(scratch.q[: len(seen)], keys, values, start - base, stop - base, scratch.scores)
    for row in range(len(seen)):
        position = item.position + min(row, rows - 1) // shared
        seen[row, 0] = max(start, position - item.window + 1) - base
        seen[row, 1] = max(seen[row, 0], min(stop, position + 1) - base)
    for row in range(rows):
        scores = advance(pointer(scratch.scores), row * scratch.scores.strides[0])
        scales = (pointer(keys.scales), pointer(values.scales))
        largest, total = _weigh(scores, *scales, seen[row, 0], seen[row, 1], step.softcap)
        scratch.added[row, -2] = largest
        scratch.added[row, -1] = total
    _add_values(scratch.scores, values, seen, scratch.added)


def scratch_size(rows: int, head_dim: int, value_dim: int) -> int:
    """Return how many int64 the scratch memory of a thread takes; rows: that of `Step`."""
    integers = 2 * RANGE + 2 * rows + ALIGNMENT // 8
    floats = 2 * RANGE + rows * (head_dim + RANGE + 3 + value_dim + 2)
    return integers + -(-floats // 2)


@compile.device_function
def _scratch_of(step, part):
    """Return the scratch memory of a part, which the caller of the kernel allocated.

    Queries that do not start on a cache line made the products up to 4 % slower.
    """
    memory = advance(byte_pointer(pointer(step.scratch)), part * step.scratch.strides[0])
    memory = advance(memory, -address(memory) % ALIGNMENT)
    q = carray(memory, (step.rows, step.q.shape[2]), np.float32)
    memory = advance(memory, q.nbytes)
    scores = carray(memory, (step.rows, RANGE + 3), np.float32)
    memory = advance(memory, scores.nbytes)
    added = carray(memory, (step.rows, step.states.shape[2]), np.float32)
    memory = advance(memory, added.nbytes)
    scales = carray(memory, (2, RANGE), np.float32)
    memory = advance(memory, scales.nbytes)
    offsets = carray(memory, (2, RANGE), np.int64)
    memory = advance(memory, offsets.nbytes)
    seen = carray(memory, (step.rows, 2), np.int64)
    scales[:] = 1
    q[:] = 0
    keys = _Vectors(view(step.key), view(step.key_scale), offsets[0], scales[0])
    values = _Vectors(view(step.value), view(step.value_scale), offsets[1], scales[1])
    return _Scratch(q, keys, values, scores, seen, added)


def _attend_part(arguments, part, parts):
    """Write the states of one of several parts of the items and key heads."""
    step = Step(*arguments[0])
    kv_heads = step.key.shape[2]
    shared = step.q.shape[1] // kv_heads
    scratch = _scratch_of(step, part)
    # Where heads are neighbours in memory, the processor loads some of the next one ahead. So a
    # thread takes all heads of an item, unless there are too few items to keep all threads busy.
    heads = kv_heads if len(step.items) >= 8 * parts else 1
    groups = (len(step.items) * kv_heads // heads - part + parts - 1) // parts
    for turn in range(groups * heads):
        index = (part + turn // heads * parts) * heads + turn % heads
        item = step.items[index // kv_heads]
        head = index % kv_heads
        for token, n in np.ndindex(item.tokens, shared):
            query = step.q[item.token + token, head * shared + n]
            _write_scaled(query, step.scale, scratch.q[token * shared + n])
        for base in range(item.start, item.stop, RANGE):
            _attend_range(step, item, head, base, shared, scratch)
            for token, n in np.ndindex(item.tokens, shared):
                state = step.states[item.state + token * item.step, head * shared + n]
                added = scratch.added[token * shared + n]
                if base == item.start:
                    _write_scaled(added, np.float32(1), state)
                else:
                    _merge(state, added)


def _finish_part(arguments, part, parts):
    """Write the results of some tokens."""
    step = Step(*arguments[0])
    for turn in range((len(step.out) - part + parts - 1) // parts):
        token = part + turn * parts
        first = step.first_states[token]
        for head, sink in enumerate(step.sinks):
            state = step.states[first, head]
            for other in range(first + 1, step.first_states[token + 1]):
                _merge(state, step.states[other, head])
            largest = max(state[-2], sink)
            kept = _exp(state[-2] - largest)
            total = kept * state[-1] + _exp(sink - largest)
            _write_scaled(state, kept / total, step.out[token, head])


PARTS = {"attend": _attend_part, "finish": _finish_part}


def _attend(attend, finish, arguments, parts):
    """Write the results; see `attention_kernel`."""
    for function in (attend, finish):
        compile.run_parts(function, arguments, parts)


def _step_types(dtype: str) -> Step:
    """Return Numba's types of a step."""
    cached = cache_type(dtype, readonly=True)
    scale = types.Array(types.float32, 4, "A", readonly=True, aligned=False)
    return Step(
        q=types.Array(types.float32, 3, "C", readonly=True, aligned=False),
        scale=types.float32,
        key=cached,
        value=cached,
        key_scale=scale,
        value_scale=scale,
        pages=types.Array(types.int64, 2, "C", readonly=True),
        items=types.Array(from_dtype(ITEM), 1, "C", readonly=True, aligned=False),
        first_states=types.int64[::1],
        sinks=types.float32[::1],
        softcap=types.float32,
        states=types.float32[:, :, ::1],
        rows=types.intp,
        scratch=types.int64[:, ::1],
        out=types.float32[:, :, ::1],
    )


@cache
def attention_part(dtype: str, name: str) -> Any:
    """Return a compiled part of the kernel for caches of a dtype; name: a key of `PARTS`."""
    step = types.Tuple(_step_types(dtype))
    level = 3 if dtype == "int8" else 1  # int8 takes 1.02 of the time at level 1
    return compile.compile_part(PARTS[name], f"attention_{name}_{dtype}", step, level)


@cache
def attention_kernel(dtype: str) -> Any:
    """Return the compiled kernel for caches of a dtype, a key of `CACHE_FORMATS`.

    It takes the addresses of the parts "attend" and "finish", a `Step` of checked arrays as a plain
    tuple, whose type Numba finds faster, and the number of threads.
    """
    signature = (types.intp, types.intp, types.Tuple(_step_types(dtype)), types.intp)
    return compile.compile_kernel(_attend, f"attention_{dtype}", signature)
