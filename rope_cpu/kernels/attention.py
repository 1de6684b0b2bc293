"""The attention kernel: queries of packed tokens over the keys and values of a cache.

The keys of a sequence are split into ranges. Four heads that share a key head attend to one range
at a time, which gives a state: the sums of values times weights, the largest score, and the sum of
the weights relative to it. States are merged in the order of the keys, so the bits of a result
depend on its own sequence alone. A key is read only for a token that attends to it.
"""

from __future__ import annotations

from collections import namedtuple
from functools import cache, partial
from math import factorial, log
from typing import Any

import numpy as np
from numba import from_dtype, prange, types

from rope_cpu.kernels import compile
from rope_cpu.kernels.append import CACHE_ELEMENTS, cache_of
from rope_cpu.kernels.vectors import advance, load, muladd, number, pointer, prefetch, splat, store

RANGE = 256  # keys: they and their values stay in the second cache of a core
HEADS = 4  # that attend at a time
AHEAD = 6  # keys, by which memory is asked for a key before its use

# New tokens of one sequence, and their keys start … stop − 1, of which `start` begins a range.
# position, state: of the first token; the state of the next is `step` further.
ITEM = np.dtype("i8, i8, i8, i8, i8, i8, i8, i8, i8")
ITEM.names = ("sequence", "token", "tokens", "position", "window", "start", "stop", "state", "step")

# The kernel's arguments. The keys of one head in a range, or the values: the cache, and of each the
# offset in bytes, int64 (RANGE,), and the scale, float32 (RANGE,).
_Step = namedtuple(
    "_Step",
    "q key value key_scale value_scale pages items first_states sinks states softcap",
)
_Vectors = namedtuple("_Vectors", "cached offsets scales")

LOWEST = np.finfo(np.float32).min  # not -inf, whose difference from itself is NaN
_ZERO = np.float32(0)
_PER_LN2 = np.float32(1 / log(2))
_LN2_HIGH = np.float32(0.693359375)  # of so few digits that its multiples are exact
_LN2_LOW = np.float32(log(2) - 0.693359375)
_INTEGER_IN_LOW_BITS = np.float32(1.5 * 2**23)  # rounds what it is added to
_TAYLOR = tuple(np.float32(1 / factorial(n)) for n in range(7, 0, -1))


@partial(compile.device_function, fastmath={"contract"})
def _split_exp(x):
    """Return 2^k and m with e^x = 2^k + 2^k·m and |m| < 0.42; x is limited to ±87."""
    x = np.float32(-87) if x < np.float32(-87) else x  # `max` would lose NaN
    x = np.float32(87) if x > np.float32(87) else x
    shifted = x * _PER_LN2 + _INTEGER_IN_LOW_BITS
    k = shifted - _INTEGER_IN_LOW_BITS
    f = (x - k * _LN2_HIGH) - k * _LN2_LOW
    series = _ZERO
    for coefficient in _TAYLOR:
        series = series * f + coefficient
    bits = (np.float32(shifted).view(np.int32) + 127) << 23
    return np.int32(bits).view(np.float32), series * f


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
    """Write the offsets and scales of the keys start … stop − 1 of a sequence, or of values."""
    cached = vectors.cached
    strides = cached.array.strides
    steps = cached.scale_strides
    for index in range(start, stop):
        page = pages[index // cached.array.shape[1]]
        place = index % cached.array.shape[1]
        offset = page * strides[0] + place * strides[1] + head * strides[2]
        vectors.offsets[index % RANGE] = offset
        vectors.scales[index % RANGE] = 1
        if cached.array.itemsize == 1:
            scale = advance(cached.scale, page * steps[0] + place * steps[1] + head * steps[2])
            vectors.scales[index % RANGE] = scale[0]


@compile.device_function
def _prefetch(vectors, j, stop):
    """Load a later vector of a range ahead of its use.

    In a cache of pages whose heads lie side by side, each vector is in another page of memory.
    There this takes a fifth to a third of the time off.
    """
    later = advance(vectors.cached.array.pointer, vectors.offsets[min(j + AHEAD, stop - 1)])
    for line in range(0, vectors.cached.array.shape[3] * vectors.cached.array.itemsize, 64):
        prefetch(advance(later, line))


@partial(compile.device_function, fastmath={"contract", "reassoc"})
def _score(q, keys, first, stop, scores):
    """Write the scores of four heads with the keys first … stop − 1 of a range."""
    for j in range(first, stop):
        _prefetch(keys, j, stop)
        key = advance(keys.cached.array.pointer, keys.offsets[j])
        s0 = s1 = s2 = s3 = _ZERO
        for i in range(q.shape[1]):
            s0 += q[0, i] * number(key, i)
            s1 += q[1, i] * number(key, i)
            s2 += q[2, i] * number(key, i)
            s3 += q[3, i] * number(key, i)
        scores[0, j] = s0 * keys.scales[j]
        scores[1, j] = s1 * keys.scales[j]
        scores[2, j] = s2 * keys.scales[j]
        scores[3, j] = s3 * keys.scales[j]


# Loops that LLVM vectorises start at 0: it cannot where Numba allows for negative indices.


@partial(compile.device_function, fastmath={"nnan", "nsz"})
def _largest(scores):
    """Return the largest score; any number if one is NaN, whose weight is NaN all the same."""
    largest = LOWEST
    for j in range(scores.size):
        largest = scores[j] if scores[j] > largest else largest
    return largest


@partial(compile.device_function, fastmath={"contract", "reassoc"})
def _weigh(scores, scales, softcap, state):
    """Turn the scores of one head into weights times scales; begin its state."""
    if softcap > 0:
        for j in range(scores.size):
            scores[j] = softcap * _tanh(scores[j] / softcap)
    largest = _largest(scores)
    total = _ZERO
    for j in range(scores.size):
        weight = _exp(scores[j] - largest)
        total += weight
        scores[j] = weight * scales[j]
    state[-2] = largest
    state[-1] = total


def _make_add_values(lanes):
    """Return the device function that adds elements i … i + lanes − 1 of two values to the sums."""

    # Values are read in their order. A plain loop over elements would be slower by a half, since
    # LLVM checks for every value that the sums are apart from it.
    @partial(compile.device_function, variant=f"{lanes}")
    def add_values(weights, weights_row, first, second, i, sums, sums_row):
        x = load(first, i, lanes)
        y = load(second, i, lanes)
        for head in range(HEADS):
            total = load(sums, head * sums_row + i, lanes)
            total = muladd(splat(weights[head * weights_row], lanes), x, total)
            total = muladd(splat(weights[head * weights_row + 1], lanes), y, total)
            store(sums, head * sums_row + i, total, False)

    return add_values


_add_16 = _make_add_values(16)
_add_1 = _make_add_values(1)


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


@compile.device_function
def _attend_range(step, token, head, first, stop, scratch, states):
    """Add the keys first … stop − 1 of a range to the states of a token's heads."""
    keys, values, scores, added = scratch
    width = states.shape[1] - 2
    for row in range(0, len(states), HEADS):
        _score(step.q[token, head, row:], keys, first, stop, scores)
        added[:] = 0
        for h in range(HEADS):
            _weigh(scores[h, first:stop], values.scales[first:stop], step.softcap, added[h])
        scores[:, stop] = 0  # beside an odd last value
        for j in range(first, stop, 2):
            _prefetch(values, j, stop)
            _prefetch(values, j + 1, stop)
            weights = advance(pointer(scores), 4 * j)
            x = advance(values.cached.array.pointer, values.offsets[j])
            y = advance(values.cached.array.pointer, values.offsets[min(j + 1, stop - 1)])
            sums = pointer(added)
            for i in range(0, width & -16, 16):
                _add_16(weights, scores.shape[1], x, y, i, sums, added.shape[1])
            for i in range(width & -16, width):
                _add_1(weights, scores.shape[1], x, y, i, sums, added.shape[1])
        for h in range(HEADS):
            _merge(states[row + h], added[h])


@compile.device_function
def _attend_item(step, item, head, scratch):
    """Write the states of the tokens of an item, for the heads that share a key head."""
    states = step.states[item.state : item.state + item.tokens * item.step : item.step, head]
    states[:] = 0
    states[:, :, -2] = LOWEST
    pages = step.pages[item.sequence]
    for base in range(item.start, item.stop, RANGE):
        start = max(base, item.position - item.window + 1)
        stop = min(base + RANGE, item.stop)
        _locate(scratch[0], pages, head, start, stop)
        _locate(scratch[1], pages, head, start, stop)
        for t in range(item.tokens):
            first = max(start, item.position + t - item.window + 1) - base
            last = min(stop, item.position + t + 1) - base
            if first < last:
                _attend_range(step, item.token + t, head, first, last, scratch, states[t])


@compile.device_function
def _attend_part(step, part, parts):
    """Write the states of one of several parts of the items and key heads."""
    offsets = np.empty((2, RANGE), np.int64)
    scales = np.empty((2, RANGE), np.float32)
    keys = _Vectors(cache_of(step.key, step.key_scale), offsets[0], scales[0])
    values = _Vectors(cache_of(step.value, step.value_scale), offsets[1], scales[1])
    scores = np.empty((HEADS, RANGE + 1), np.float32)
    added = np.empty((HEADS, (step.states.shape[3] + 15) & -16), np.float32)  # aligned rows
    scratch = (keys, values, scores, added)
    kv_heads = step.q.shape[1]
    for index in range(part, len(step.items) * kv_heads, parts):
        _attend_item(step, step.items[index // kv_heads], index % kv_heads, scratch)


@partial(compile.device_function, fastmath={"contract"})
def _finish_part(step, part, parts):
    """Turn the first state of each of some tokens into their results."""
    for token in range(part, len(step.q), parts):
        first = step.first_states[token]
        for head, row in np.ndindex(step.sinks.shape):
            state = step.states[first, head, row]
            for other in range(first + 1, step.first_states[token + 1]):
                _merge(state, step.states[other, head, row])
            largest = max(state[-2], step.sinks[head, row])
            kept = _exp(state[-2] - largest)
            total = kept * state[-1] + _exp(step.sinks[head, row] - largest)
            for i in range(state.size - 2):
                state[i] *= kept / total


@partial(compile.device_function, parallel=True)
def _run_in_parallel(step, finish, parts):
    for part in prange(parts):
        if finish:
            _finish_part(step, np.intp(part), parts)
        else:
            _attend_part(step, np.intp(part), parts)


def _attend(
    q, key, value, key_scale, value_scale, pages, items, first_states, sinks, states, softcap, parts
):
    """Write the results; see `attention_kernel`."""
    caches = (key, value, key_scale, value_scale)
    step = _Step(q, *caches, pages, items, first_states, sinks, states, softcap)
    if parts > 1:
        _run_in_parallel(step, False, parts)
        _run_in_parallel(step, True, parts)
    else:
        _attend_part(step, np.intp(0), np.intp(1))
        _finish_part(step, np.intp(0), np.intp(1))


@cache
def attention_kernel(dtype: str) -> Any:
    """Return the compiled kernel for caches of a dtype, a key of `CACHE_ELEMENTS`.

    It takes checked arrays: q (tokens, kv_heads, rows, head_dim), queries times the scale, with any
    rows up to a multiple of `HEADS`; key, value and their scales as `append_kernel`; pages, int64
    (sequences, pages); items; first_states, int64 (tokens + 1,), the first state of each token and
    the number of all; sinks (kv_heads, rows), `LOWEST` for none; states (states, kv_heads, rows,
    value width + 2), of which the first of each token becomes its result. Then softcap, 0 for none,
    and the number of threads.
    """
    cached = types.Array(CACHE_ELEMENTS[dtype], 4, "A", readonly=True, aligned=False)
    scale = types.Array(types.float32, 3, "A", readonly=True, aligned=False)
    pages = types.Array(types.int64, 2, "C", readonly=True)
    items = types.Array(from_dtype(ITEM), 1, "C", readonly=True, aligned=False)
    rows = types.float32[:, :, :, ::1]
    others = (pages, items, types.int64[::1], types.float32[:, ::1], rows)
    arrays = (rows, cached, cached, scale, scale, *others)
    return compile.compile_kernel(_attend, f"attend_{dtype}", (*arrays, types.float32, types.intp))
