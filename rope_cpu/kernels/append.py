"""The append kernel: from the projections of a step to its queries and the caches in one pass.

Queries are normalised, rotated and written to an array. Keys are normalised, rotated and written to
their slots of a cache, and values are normalised and written to theirs. The functions from the
inside out:

- `rope_cpu.kernels.head_vectors` has the norm, the copy and the rounding to int8;
- `_make_write_heads` makes the function that normalises, rotates and copies those of one token,
  and `_make_write_slot` the one that writes them to a slot of the cache;
- `_append_part` is the loop over the tokens of one part, the work of a thread;
- `_append` is the entry point: it checks the arrays and splits the work between threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numba import prange, types

from rope_cpu.kernels import compile
from rope_cpu.kernels.head_vectors import (
    Heads,
    Norm,
    copy_elements,
    from_head,
    quantise,
    scratch_rows,
    write_factors,
)
from rope_cpu.kernels.rotate import (
    BATCH,
    DONE,
    ELEMENT,
    ELEMENTS,
    HEAD,
    INVALID,
    PAIRINGS,
    PARALLEL_FROM,
    TOKEN,
    Tile,
    View,
    are_disjoint,
    fits,
    make_rotate_tile,
    overlaps_itself,
    row_offset,
    table_view,
    view,
)
from rope_cpu.kernels.vectors import address, advance, byte_pointer, call_at, pointer

# Numba's types of the cache elements for each dtype.
CACHE_ELEMENTS = {
    "float32": types.float32,
    "float16": types.int16,
    "bfloat16": types.uint16,
    "int8": types.int8,
}

_ZERO = np.float32(0)

# float32 between the scratch memory of two threads, so that they write to no common cache line.
_CACHE_LINES = 64

# The rows of the array of norms. As literals each would be one more specialisation to compile.
_QUERIES = np.intp(0)
_KEYS = np.intp(1)
_VALUES = np.intp(2)


class Step(NamedTuple):
    """The arrays of a step. Those of q, k and v are (batch, tokens, heads, width)."""

    q: Any
    k: Any  # of the width of q; k and v may have no heads
    v: Any
    q_out: Any  # may be q itself
    key: Any  # (pages, page_size, heads, width); may be k if there are no slots
    value: Any
    key_scale: Any  # float32 (pages, page_size, heads); (0, 0, 0) for other dtypes than int8
    value_scale: Any
    # int64 (batch, tokens), page · page_size + place, checked; negative: not kept. Empty: token t
    # of row n goes to page n, place t.
    slots: Any
    cos_sin: Any  # float32 (2, batch or 1, tokens, frequency heads, pairs)
    # float32 (3, at least width + 1), the RMS norms of q, k and v: a factor for each element and
    # then eps, which is 0 where there is no norm; (0, 0) if there is none at all.
    norms: Any
    block_pairs: Any  # int64 (blocks,), the number of pairs of each block of a head vector


class Cache(NamedTuple):
    """The cached keys or values."""

    array: Any  # view (pages, page_size, heads, width)
    scale: Any  # pointer to float32, used with int8 alone
    scale_strides: Any  # (pages, page_size, heads)


class TokenRotation(NamedTuple):
    """The rotation of one token."""

    cos: Any  # pointer
    sin: Any  # pointer
    groups: Any  # of heads that share cos and sin
    group_stride: Any
    itemsize: Any
    block_pairs: Any  # pointer
    blocks: Any
    rotary_dim: Any


@compile.device_function
def _heads_of(x, row, column):
    """Return the head vectors of a token of an array, or of a place on a page of a cache."""
    start = advance(x.pointer, row_offset(x, row, column, 0))
    return Heads(start, x.shape[HEAD], x.shape[ELEMENT], x.strides[HEAD], x.itemsize)


@compile.device_function
def cache_of(array, scale):
    """Return the cached keys or values of an array and its scales."""
    return Cache(view(array), pointer(scale), scale.strides)


@compile.device_function
def _norm_of(norms, which, width, factors):
    """Return the norm of a row of `norms`: `width` weights and then eps, which is 0 for none.

    which: `_QUERIES`, `_KEYS` or `_VALUES`.
    """
    if norms.size == 0:
        return Norm(False, factors, pointer(norms), _ZERO)
    eps = norms[which, width]
    weight = advance(pointer(norms), which * norms.strides[0])
    return Norm(eps > _ZERO, factors, weight, eps)


@compile.device_function
def _rotation_of(table, row, token, block_pairs, rotary_dim):
    """Return the rotation of a token; without pairs if rotary_dim is 0."""
    offset = row_offset(table, row, token, 0)
    return TokenRotation(
        advance(table.cos, offset),
        advance(table.sin, offset),
        table.shape[HEAD],
        table.strides[HEAD],
        table.itemsize,
        pointer(block_pairs),
        block_pairs.size,
        rotary_dim,
    )


# From the head vectors of one token to their place.


def _make_write_heads(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that normalises, rotates and copies head vectors to others."""
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__, inline=True)
    def write_heads(x, out, norm, rotation):
        if norm.is_given:
            write_factors(x, norm)
        if rotation.rotary_dim > 0:
            heads = x.count // rotation.groups
            tile = Tile(
                1,
                heads,
                0,
                x.stride,
                0,
                out.stride,
                0,
                x.itemsize,
                out.itemsize,
                rotation.itemsize,
                rotation.block_pairs,
                rotation.blocks,
            )
            for group in range(rotation.groups):
                first = group * heads
                source = advance(x.pointer, first * x.stride)
                target = advance(out.pointer, first * out.stride)
                cos = advance(rotation.cos, group * rotation.group_stride)
                sin = advance(rotation.sin, group * rotation.group_stride)
                rotate_tile(source, target, cos, sin, tile, from_head(norm, first), False)
        copy_elements(x, out, norm, rotation.rotary_dim)

    return write_heads


def _make_write_slot(pairing: Callable[[int], Any], write_heads: Any) -> Any:
    """Return the device function that writes the head vectors of a token to a slot."""

    @partial(compile.device_function, variant=pairing.__name__, inline=True)
    def write_slot(x, cache, page, place, norm, rotation, scratch):
        write_heads(x, _heads_of(cache.array, page, place), norm, rotation)

    return write_slot


def _make_write_slot_int8(pairing: Callable[[int], Any], write_heads: Any) -> Any:
    """Return the same for int8: head vectors go to scratch memory as float32, and are rounded."""

    @partial(compile.device_function, variant=pairing.__name__, inline=True)
    def write_slot_int8(x, cache, page, place, norm, rotation, scratch):
        rows = scratch_rows(x, scratch)
        write_heads(x, rows, norm, rotation)
        strides = cache.scale_strides
        scale = advance(cache.scale, page * strides[0] + place * strides[1])
        quantise(rows, _heads_of(cache.array, page, place), scale, strides[2], scratch)

    return write_slot_int8


# Placeholders for the device functions of one input dtype, cache dtype and pairing:
# `compile.compile_part` compiles a copy of `_append_part` whose globals of these names are the
# functions that `append_part` passes.
write_heads: Any = None
write_slot: Any = None


def _append_part(step, scratch, part, parts):
    """Write one of several equal parts of the tokens. scratch: that of `_append`."""
    table = table_view(step.cos_sin)
    keys = cache_of(step.key, step.key_scale)
    values = cache_of(step.value, step.value_scale)
    memory = advance(pointer(scratch), part * (scratch.size // parts) * scratch.itemsize)
    rotary_dim = np.intp(0)
    for block in range(step.block_pairs.size):
        rotary_dim += 2 * step.block_pairs[block]
    q_norm = _norm_of(step.norms, _QUERIES, step.q.shape[ELEMENT], memory)
    k_norm = _norm_of(step.norms, _KEYS, step.q.shape[ELEMENT], memory)
    v_norm = _norm_of(step.norms, _VALUES, step.v.shape[ELEMENT], memory)
    tokens = step.q.shape[TOKEN]
    count = step.q.shape[BATCH] * tokens
    page_size = step.key.shape[TOKEN]
    for index in range(count * part // parts, count * (part + 1) // parts):
        n = index // tokens
        token = index % tokens
        row = n if table.shape[BATCH] > 1 else 0
        rotation = _rotation_of(table, row, token, step.block_pairs, rotary_dim)
        q_heads = _heads_of(view(step.q), n, token)
        write_heads(q_heads, _heads_of(view(step.q_out), n, token), q_norm, rotation)
        slot = step.slots[n, token] if step.slots.size > 0 else index
        if slot >= 0:
            page = slot // page_size
            place = slot % page_size
            k_heads = _heads_of(view(step.k), n, token)
            write_slot(k_heads, keys, page, place, k_norm, rotation, memory)
            v_heads = _heads_of(view(step.v), n, token)
            unrotated = _rotation_of(table, row, token, step.block_pairs, 0)
            write_slot(v_heads, values, page, place, v_norm, unrotated, memory)


@partial(compile.device_function, parallel=True)
def _append_in_parallel(append_part, step, scratch, parts):
    """Write several parts at a time."""
    for index in prange(parts):
        call_at(append_part, (step, scratch, np.intp(index), parts))


@compile.device_function
def _scratch_size(step):
    """Return the number of float32 that a part needs besides the arrays of the step.

    They are a number for each head, first its factor of the norm and then that of int8, and for
    int8 room for the head vectors of a token.
    """
    if step.norms.size + step.key_scale.size == 0:
        return np.intp(0)
    heads = max(step.q.shape[HEAD], step.k.shape[HEAD], step.v.shape[HEAD])
    width = max(step.q.shape[ELEMENT], step.v.shape[ELEMENT])
    return heads * (1 + width) + _CACHE_LINES


# Checks of shapes and aliasing.


@compile.device_function
def _memory_of(x):
    """Return the view of an array as bytes: one type for all dtypes, so checks compile once."""
    return View(byte_pointer(pointer(x)), x.shape, x.strides, x.itemsize)


@compile.device_function
def _are_apart(x, y):
    """Return True if two arrays certainly share no element; one may have no heads."""
    return x.shape[HEAD] == 0 or y.shape[HEAD] == 0 or are_disjoint(x, y)


@compile.device_function
def _scale_is_apart(scale, others):
    """Return True if the scales of a cache certainly share no element with the other arrays."""
    if scale.size == 0:
        return True
    shape = (scale.shape[0], scale.shape[1], scale.shape[2], np.intp(1))
    strides = (scale.strides[0], scale.strides[1], scale.strides[2], scale.itemsize)
    x = View(byte_pointer(pointer(scale)), shape, strides, scale.itemsize)
    for other in others:  # noqa: SIM110 - Numba compiles no `all` over a generator
        if not _are_apart(x, other):
            return False
    return True


@compile.device_function
def _fits_cache(x, cache, q, q_out, in_order):
    """Return True if the keys or values of a step can be written to their cache.

    in_order: token t of batch row n goes to page n, place t. Then the cache may be x itself,
    because each token is read before it is written.
    """
    if x.shape[BATCH] != q.shape[BATCH] or x.shape[TOKEN] != q.shape[TOKEN]:
        return False
    if x.shape[HEAD] != cache.shape[HEAD] or x.shape[ELEMENT] != cache.shape[ELEMENT]:
        return False
    if x.strides[ELEMENT] != x.itemsize or cache.strides[ELEMENT] != cache.itemsize:
        return False
    if not _are_apart(cache, q) or not _are_apart(cache, q_out) or not _are_apart(q_out, x):
        return False
    if in_order:
        if cache.shape[BATCH] != x.shape[BATCH] or cache.shape[TOKEN] != x.shape[TOKEN]:
            return False
        if overlaps_itself(cache):
            return False
        if address(x.pointer) == address(cache.pointer) and x.strides == cache.strides:
            return True
    return _are_apart(cache, x)


@compile.device_function
def _all_fit(inputs, outputs, slots, table, head_dim):
    """Return True if all arrays fit each other, and if none that is written shares memory."""
    q, k, v = inputs
    q_out, key, value = outputs
    in_order = slots.size == 0
    if not fits(q, q_out, table, head_dim):
        return False
    if not in_order and slots.shape != (q.shape[BATCH], q.shape[TOKEN]):
        return False
    if k.shape[HEAD] > 0 and (k.shape[ELEMENT] != head_dim or k.shape[HEAD] % table.shape[HEAD]):
        return False
    if not _fits_cache(k, key, q, q_out, in_order) or not _fits_cache(v, value, q, q_out, in_order):
        return False
    return _are_apart(key, v) and _are_apart(value, k)


def _append(
    append_part,
    q,
    k,
    v,
    q_out,
    key,
    value,
    key_scale,
    value_scale,
    slots,
    cos_sin,
    norms,
    block_pairs,
    head_dim,
    threads,
):
    """Write q to q_out, and k and v to their slots; see `append_kernel`."""
    table = table_view(cos_sin)
    inputs = (_memory_of(q), _memory_of(k), _memory_of(v))
    outputs = (_memory_of(q_out), _memory_of(key), _memory_of(value))
    if not _all_fit(inputs, outputs, slots, table, head_dim):
        return INVALID
    for scale in (key_scale, value_scale):
        if not _scale_is_apart(scale, (*inputs, outputs[0])):
            return INVALID
    step = Step(
        q, k, v, q_out, key, value, key_scale, value_scale, slots, cos_sin, norms, block_pairs
    )
    parts = threads if q.size + k.size + v.size >= PARALLEL_FROM else 1
    # Of all parts, in one array: what a part raised inside a prange would be lost.
    scratch = np.empty(parts * _scratch_size(step), np.float32)
    if parts > 1:
        _append_in_parallel(append_part, step, scratch, parts)
    else:
        call_at(append_part, (step, scratch, np.intp(0), np.intp(1)))
    return DONE


def _step_types(dtype: str, cache_dtype: str) -> Step:
    """Return Numba's types of the arrays of a step."""
    x = types.Array(ELEMENTS[dtype][0], 4, "A", readonly=True, aligned=False)
    kept = types.Array(CACHE_ELEMENTS[cache_dtype], 4, "A", aligned=False)
    scale = types.Array(types.float32, 3, "A", aligned=False)
    return Step(
        q=x,
        k=x,
        v=x,
        q_out=types.Array(ELEMENTS[dtype][0], 4, "A", aligned=False),
        key=kept,
        value=kept,
        key_scale=scale,
        value_scale=scale,
        slots=types.Array(types.int64, 2, "A", readonly=True, aligned=False),
        cos_sin=types.Array(types.float32, 5, "A", readonly=True),
        norms=types.Array(types.float32, 2, "C", readonly=True),
        block_pairs=types.Array(types.int64, 1, "C", readonly=True),
    )


@cache
def append_part(dtype: str, cache_dtype: str, pairing: str) -> Any:
    """Return the compiled part of the append kernel for a key of `PAIRINGS`.

    dtype: of q, k, v and q_out, not float64. cache_dtype: a key of `CACHE_ELEMENTS`.
    """
    write_heads = _make_write_heads(PAIRINGS[pairing])
    make_write_slot = _make_write_slot_int8 if cache_dtype == "int8" else _make_write_slot
    step = types.NamedTuple(_step_types(dtype, cache_dtype), Step)
    scratch = types.Array(types.float32, 1, "C")
    return compile.compile_part(
        _append_part,
        f"append_part_{dtype}_{cache_dtype}_{pairing}",
        (step, scratch, types.intp, types.intp),
        write_heads=write_heads,
        write_slot=make_write_slot(PAIRINGS[pairing], write_heads),
    )


@cache
def append_kernel(dtype: str, cache_dtype: str) -> Any:
    """Return the compiled kernel from inputs of one dtype to caches of one dtype.

    It returns `DONE`, or `INVALID` with nothing written if the arrays do not pass its checks. Its
    arguments:

    - append_part: the address of the part for a pairing;
    - the arrays of a `Step`, in their order: a call for one token takes 3.6 µs with each as an
      argument, 4.1 by keyword, and 4.9 with all in a tuple;
    - head_dim: elements of a head vector;
    - threads: maximum number of threads.
    """
    signature = (types.intp, *_step_types(dtype, cache_dtype), types.intp, types.intp)
    return compile.compile_kernel(_append, f"append_{dtype}_{cache_dtype}", signature)
