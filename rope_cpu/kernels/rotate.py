"""The rotation kernel: each pair (a, b) of a head vector becomes (a·cos − b·sin, b·cos + a·sin).

From the inside out: `half_split` and `interleaved` rotate some pairs of several tokens and heads; `_part_of` makes of
them what goes through an array; `_rotate` checks whether q and k can be rotated as they stand, and divides them between
threads. Arrays are (batch, tokens, heads, elements), the last axis contiguous; steps are strides, in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from math import gcd
from typing import Any

import numpy as np
from numba import prange, types

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
    store,
    swapped,
)

DONE, INVALID = (
    0,
    1,
)  # what a kernel returns; INVALID: nothing was written, as something does not fit

# Numba's types of the elements, and of cos and sin, of each dtype: 16-bit floats are integers of their bits.
ELEMENTS = {
    "float32": (types.float32, types.float32),
    "float64": (types.float64, types.float64),
    "float16": (types.int16, types.float32),
    "bfloat16": (types.uint16, types.float32),
}

# Fewer elements than these are rotated faster than a second thread starts.
_PARALLEL_FROM = 2**19


def half_split(lanes: int) -> Any:
    """Return the function that rotates the pairs (i, i + pairs), `lanes` of them from i on."""

    @compile.inner
    def rotate(
        x, out, cos, sin, i, pairs, tokens, heads, steps, out_steps, table_step, past_caches
    ):
        for _ in range(tokens):
            c, s = load(cos, i, lanes), load(sin, i, lanes)
            row, out_row = x, out
            for _ in range(heads):
                a, b = load(row, i, lanes), load(row, i + pairs, lanes)
                store(out_row, i, a * c - b * s, past_caches)
                store(out_row, i + pairs, muladd(b, c, a * s), past_caches)
                row, out_row = advance(row, steps[2]), advance(out_row, out_steps[2])
            x, out = advance(x, steps[1]), advance(out, out_steps[1])
            cos, sin = advance(cos, table_step), advance(sin, table_step)

    return rotate


def interleaved(lanes: int) -> Any:
    """Return the function that rotates the pairs (2i, 2i + 1), `lanes` of them from i on."""
    both = 2 * lanes

    @compile.inner
    def rotate(
        x, out, cos, sin, i, pairs, tokens, heads, steps, out_steps, table_step, past_caches
    ):
        for _ in range(tokens):
            c, s = doubled(load(cos, i, lanes)), even_negated(doubled(load(sin, i, lanes)))
            row, out_row = x, out
            for _ in range(heads):
                ab = load(row, 2 * i, both)
                store(out_row, 2 * i, muladd(ab, c, swapped(ab) * s), past_caches)
                row, out_row = advance(row, steps[2]), advance(out_row, out_steps[2])
            x, out = advance(x, steps[1]), advance(out, out_steps[1])
            cos, sin = advance(cos, table_step), advance(sin, table_step)

    # 64 pairs at a time would need more registers than there are: float32 took 1.2 to 1.4 times as long.
    @compile.inner
    def rotate_64(
        x, out, cos, sin, i, pairs, tokens, heads, steps, out_steps, table_step, past_caches
    ):
        for _ in range(tokens):
            c1, s1 = doubled(load(cos, i, 32)), even_negated(doubled(load(sin, i, 32)))
            c2, s2 = doubled(load(cos, i + 32, 32)), even_negated(doubled(load(sin, i + 32, 32)))
            row, out_row = x, out
            for _ in range(heads):
                ab = load(row, 2 * i, 64)
                store(out_row, 2 * i, muladd(ab, c1, swapped(ab) * s1), past_caches)
                ab = load(row, 2 * i + 64, 64)
                store(out_row, 2 * i + 64, muladd(ab, c2, swapped(ab) * s2), past_caches)
                row, out_row = advance(row, steps[2]), advance(out_row, out_steps[2])
            x, out = advance(x, steps[1]), advance(out, out_steps[1])
            cos, sin = advance(cos, table_step), advance(sin, table_step)

    return rotate_64 if lanes == 64 else rotate


PAIRINGS: dict[str, Callable[[int], Any]] = {"half": half_split, "interleaved": interleaved}


# What may be rotated into what. Arrays come as (pointer, shape, strides, itemsize). Indices of shapes and strides are
# constants: any other index Numba compiles to a branch for each axis.


@compile.inner
def _place(x):
    """Return what the functions below know of an array."""
    return pointer(x), x.shape, x.strides, x.itemsize


@compile.inner
def _extent(x):
    """Return the lowest address of an array, and the one after its last byte."""
    start, (batch, tokens, heads, width), (by_batch, by_token, by_head, _), size = x
    batch, tokens, heads, first = (
        (batch - 1) * by_batch,
        (tokens - 1) * by_token,
        (heads - 1) * by_head,
        address(start),
    )
    last = first + max(batch, 0) + max(tokens, 0) + max(heads, 0)
    return first + min(batch, 0) + min(tokens, 0) + min(heads, 0), last + width * size


@compile.inner
def _share_nothing(x, y):
    """Return True if one array ends before the other, or they lie side by side in the rows of one buffer.

    Their steps are then multiples of a period, in which each has its part: some heads of a token, or one.
    """
    (start, stop), (y_start, y_stop) = _extent(x), _extent(y)
    if stop <= y_start or y_stop <= start:
        return True
    (_, (_, _, heads, width), steps, size), (_, (_, _, y_heads, _), y_steps, _) = x, y
    if steps[0] != y_steps[0] or steps[1] != y_steps[1] or steps[2] < 0 or y_steps[2] < 0:
        return False
    between, row, period = y_start - start, width * size, gcd(steps[0], steps[1])
    if period > 0:
        past = between % period
        if (heads - 1) * steps[2] + row <= past and past + (y_heads - 1) * y_steps[
            2
        ] + row <= period:
            return True
    period = gcd(period, steps[2])
    return steps[2] == y_steps[2] and period > 0 and row <= between % period <= period - row


@compile.inner
def _overlaps_itself(x):
    """Return True unless the rows along each axis lie within one step along another."""
    _, (batch, tokens, heads, width), (by_batch, by_token, by_head, _), size = x
    by_batch, by_token, by_head, row = abs(by_batch), abs(by_token), abs(by_head), width * size
    nested = by_batch * batch <= by_token or by_token * tokens <= by_batch
    nested &= by_batch * batch <= by_head or by_head * heads <= by_batch
    nested &= by_token * tokens <= by_head or by_head * heads <= by_token
    apart = (
        (batch == 1 or by_batch >= row)
        and (tokens == 1 or by_token >= row)
        and (heads == 1 or by_head >= row)
    )
    return not (nested and apart)


@compile.inner
def _fits(x, out, cos, head_dim):
    """Return True if an array can be rotated into another, which may be the same; cos: its shape."""
    _, (batch, tokens, heads, width), strides, size = x
    if x[1] != out[1] or width != head_dim or tokens != cos[1] or heads % cos[2]:
        return False
    if (cos[0] != 1 and batch != cos[0]) or batch * tokens * heads == 0:
        return False
    if strides[3] != size or out[2][3] != size or _overlaps_itself(out):
        return False
    return (address(x[0]) == address(out[0]) and strides == out[2]) or _share_nothing(x, out)


@compile.inner
def _all_fit(q, k, q_out, k_out, cos, head_dim, arrays):
    """Return True if q and k, or q alone, can be rotated into their outputs."""
    if not _fits(q, q_out, cos, head_dim):
        return False
    if arrays == 1:
        return True
    if not _fits(k, k_out, cos, head_dim) or k[1][0] != q[1][0]:
        return False
    return _share_nothing(q_out, k_out) and _share_nothing(q_out, k) and _share_nothing(q, k_out)


@compile.inner
def _goes_past_caches(x, out, pairs, cache_bytes):
    """Return True if results elsewhere are too large to stay in the caches, and all their vectors are aligned."""
    (_, (batch, tokens, heads, width), _, size), (start, _, steps, _) = x, out
    if 2 * batch * tokens * heads * width * size <= cache_bytes or address(x[0]) == address(start):
        return False
    return (address(start) | steps[0] | steps[1] | steps[2] | pairs * size) & (ALIGNMENT - 1) == 0


@compile.inner
def _line(shape, steps, groups, parts):
    """Return how many tokens and heads make a line, which is rotated at once.

    A line is a token and the heads that share its cos and sin; or, where the tokens of a head lie closer together and
    there are heads for every part, all tokens of a head, or of two: each cos and sin is then read once for both.
    """
    batch, tokens, heads, _ = shape
    share = heads // groups
    if tokens == 1 or abs(steps[1]) >= abs(steps[2]) or batch * heads < parts:
        return 1, share
    return tokens, 2 if share % 2 == 0 and batch * heads % (2 * parts) == 0 else 1


def _part_of(pairing: Callable[[int], Any]) -> Any:
    """Return the function that rotates one of several parts of an array: some tokens, or some heads.

    Lines, `ts` tokens of `hs` heads, go 64 pairs at a time, then 32, 8 and one; each takes 0.3 s to compile.
    """
    p64, p32, p8, p1 = (pairing(lanes) for lanes in (64, 32, 8, 1))

    @partial(compile.inner, of=pairing.__name__)
    def rotate_part(x, out, cos_sin, sizes, part, parts):
        (x_start, shape, steps, size), (out_start, _, out_steps, _) = x, out
        (
            cos_start,
            (_, table_rows, _, groups, _),
            (to_sin, by_row, by_token, by_group, _),
            real_size,
        ) = cos_sin
        past_caches = sizes.size == 3 and _goes_past_caches(x, out, sizes[2], sizes[1])
        (batch, tokens, heads, _), (ts, hs) = shape, _line(shape, steps, groups, parts)
        across, share = heads // hs, heads // groups
        lines = (
            tokens // ts * across
        )  # of a batch row; each part takes `each` lines of all rows, the last ones fewer
        each = (batch * lines + parts - 1) // parts
        for n in range(batch):
            table_row, start, stop = (
                n if table_rows > 1 else 0,
                part * each - n * lines,
                (part + 1) * each - n * lines,
            )
            for index in range(start if start > 0 else 0, stop if stop < lines else lines):
                token, head = index // across * ts, index % across * hs
                source = advance(x_start, n * steps[0] + token * steps[1] + head * steps[2])
                target = advance(
                    out_start, n * out_steps[0] + token * out_steps[1] + head * out_steps[2]
                )
                cos = advance(
                    cos_start, table_row * by_row + token * by_token + head // share * by_group
                )
                sin = advance(cos, to_sin)
                for block in range(2, sizes.size):
                    pairs = sizes[block]
                    for i in range(0, pairs & -64, 64):
                        p64(
                            source,
                            target,
                            cos,
                            sin,
                            i,
                            pairs,
                            ts,
                            hs,
                            steps,
                            out_steps,
                            by_token,
                            past_caches,
                        )
                    for i in range(pairs & -64, pairs & -32, 32):
                        p32(
                            source,
                            target,
                            cos,
                            sin,
                            i,
                            pairs,
                            ts,
                            hs,
                            steps,
                            out_steps,
                            by_token,
                            past_caches,
                        )
                    for i in range(pairs & -32, pairs & -8, 8):
                        p8(
                            source,
                            target,
                            cos,
                            sin,
                            i,
                            pairs,
                            ts,
                            hs,
                            steps,
                            out_steps,
                            by_token,
                            past_caches,
                        )
                    for i in range(pairs & -8, pairs):
                        p1(
                            source,
                            target,
                            cos,
                            sin,
                            i,
                            pairs,
                            ts,
                            hs,
                            steps,
                            out_steps,
                            by_token,
                            past_caches,
                        )
                    source, target = (
                        advance(source, 2 * pairs * size),
                        advance(target, 2 * pairs * size),
                    )
                    cos, sin = advance(cos, pairs * real_size), advance(sin, pairs * real_size)

    return rotate_part


def _parallel_of(pairing: Callable[[int], Any], rotate_part: Any) -> Any:
    """Return the function that rotates arrays in several parts at a time."""

    @partial(compile.inner, of=pairing.__name__, parallel=True)
    def rotate_in_parallel(q, k, q_out, k_out, cos_sin, sizes, arrays, parts):
        for part in prange(parts):
            rotate_part(_place(q), _place(q_out), _place(cos_sin), sizes, np.intp(part), parts)
            if arrays == 2:
                rotate_part(_place(k), _place(k_out), _place(cos_sin), sizes, np.intp(part), parts)

    return rotate_in_parallel


rotate_part: Any = None  # these two are of the kernel's own dtype and pairing, see `rotation`
rotate_in_parallel: Any = None


def _rotate(q, k, q_out, k_out, cos_sin, sizes, arrays, threads):
    """Rotate q and k, or q alone, if they can be as they stand; see `rotation`."""
    if not _all_fit(
        _place(q), _place(k), _place(q_out), _place(k_out), cos_sin.shape[1:], sizes[0], arrays
    ):
        return INVALID
    if threads > 1 and q.size + k.size >= _PARALLEL_FROM:
        rotate_in_parallel(q, k, q_out, k_out, cos_sin, sizes, arrays, threads)
        return DONE
    rotate_part(_place(q), _place(q_out), _place(cos_sin), sizes, np.intp(0), np.intp(1))
    if arrays == 2:
        rotate_part(_place(k), _place(k_out), _place(cos_sin), sizes, np.intp(0), np.intp(1))
    return DONE


@cache
def rotation(dtype: str, pairing: str) -> Any:
    """Return the kernel that rotates q and k of a dtype; pairing: a key of PAIRINGS.

    Its arguments: q, k, q_out, k_out (batch, tokens, heads, head_dim), of the element type in ELEMENTS; outputs may be
    the very same arrays. cos_sin: cos and then sin, (2, batch or 1, tokens, frequency heads, pairs). sizes: int64,
    head_dim, the bytes of the last cache, and the pairs of each block. arrays: 1 rotates q alone, 2 rotates q and k.
    threads: on how many at most. It returns DONE, or INVALID: nothing was written, as something does not fit.
    """
    element, real = ELEMENTS[dtype]
    x = types.Array(element, 4, "A", readonly=True, aligned=False)
    out = types.Array(element, 4, "A", aligned=False)
    cos_sin = types.Array(real, 5, "C")
    sizes = types.Array(types.int64, 1, "C", readonly=True)
    signature = (x, x, out, out, cos_sin, sizes, types.intp, types.intp)
    part = _part_of(PAIRINGS[pairing])
    functions = {"rotate_part": part, "rotate_in_parallel": _parallel_of(PAIRINGS[pairing], part)}
    return compile.compiled(_rotate, f"rotate_{dtype}_{pairing}", signature, **functions)
