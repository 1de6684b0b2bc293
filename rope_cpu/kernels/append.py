"""The append kernel: from the projections of a step to its queries and the caches in one pass.

Queries are normalised, rotated and written to an array. Keys are normalised, rotated and written to
their slots of a cache, and values are normalised and written to theirs. The functions from the
inside out:

- `rope_cpu.kernels.head_vectors` has the norm, the copy and the rounding;
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
from numba import from_dtype, types

from rope_cpu.array_types import GROUP, VALUE_FORMATS, CacheKind
from rope_cpu.kernels import compile
from rope_cpu.kernels.head_vectors import (
    Norm,
    copy_elements,
    from_head,
    quantise,
    quantise_groups,
    scratch_rows,
    transform,
    write_elements,
    write_factors,
)
from rope_cpu.kernels.rotate import (
    BATCH,
    ELEMENT,
    ELEMENTS,
    HEAD,
    HEAD_DIM,
    NUMBERS,
    PAIRINGS,
    PARALLEL_FROM,
    PART,
    ROTARY_DIM,
    TOKEN,
    Table,
    View,
    are_disjoint,
    fits,
    from_row,
    make_rotate_tile,
    overlaps_itself,
    span,
    table_from_row,
    table_view,
    view,
    view_type,
)
from rope_cpu.kernels.vectors import address, advance, at, elements, larger, pointer

_ZERO = np.float32(0)

# float32 between the scratch memory of two threads, so that they write to no common cache line.
_CACHE_LINES = 64

# The rows of the array of norms. As literals each would be one more specialisation to compile.
_QUERIES = np.intp(0)
_KEYS = np.intp(1)
_VALUES = np.intp(2)


class Step(NamedTuple):
    """What a thread needs for its part of a step, without arrays, whose references would count."""

    q: Any  # views; see `append_kernel`
    k: Any
    v: Any
    q_out: Any
    key: Any
    value: Any
    key_scale: Any
    value_scale: Any
    table: Any
    numbers: Any  # pointer
    count: Any  # of the numbers
    slots: Any  # pointer
    slot_strides: Any
    slot_count: Any
    norms: Any  # pointer
    norm_size: Any  # bytes of a norm, 0 if there are none
    scratch: Any  # pointer to float32
    room: Any  # of a thread there


@partial(compile.device_function, inline=True)
def _norm_of(step, which, width, factors):
    """Return the norm of q, k or v, by its row: `width` weights and then eps, which is 0 for none.

    which: `_QUERIES`, `_KEYS` or `_VALUES`.
    """
    weight = advance(step.norms, which * step.norm_size)
    eps = weight[width] if step.norm_size > 0 else _ZERO
    return Norm(eps > _ZERO, factors, weight, eps)


# From the head vectors of one token to their place.


def _make_write_heads(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that normalises, rotates and copies head vectors to others.

    table: from the cos and sin of the token on. count: of the numbers, or 0 to rotate nothing.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def write_heads(x, out, norm, table, numbers, count):
        if norm.is_given:
            write_factors(x, norm)
        if count > 0:
            heads = x.shape[HEAD] // table.shape[HEAD]
            for group in range(table.shape[HEAD]):
                first = group * heads
                source = from_row(x, 0, 0, first)
                target = from_row(out, 0, 0, first)
                rows = table_from_row(table, 0, 0, group)
                factors = from_head(norm, first)
                rotate_tile(source, target, rows, 1, heads, numbers, count, factors, False)
        copy_elements(x, out, norm, numbers[ROTARY_DIM] if count > 0 else 0)

    return write_heads


def _make_write_slot(pairing: str, write_heads: Any) -> Any:
    """Return the device function that writes the head vectors of a token to a slot."""

    @partial(compile.device_function, variant=pairing, inline=True)
    def write_slot(x, kept, scales, norm, table, numbers, count, scratch):
        write_heads(x, kept, norm, table, numbers, count)

    return write_slot


# How float32 head vectors are written to the formats that have scales.
_QUANTISE = {"int8": quantise, "int4": quantise_groups}


def _make_write_slot_from_memory(
    pairing: str, write_heads: Any, stored: str, is_transformed: bool
) -> Any:
    """Return the same by way of scratch memory, where head vectors are float32.

    stored: the format. is_transformed: whether they are multiplied by the Hadamard matrix first.
    """
    write = _QUANTISE.get(stored, write_elements)

    @partial(compile.device_function, variant=f"{pairing}_{stored}_{is_transformed}", inline=True)
    def write_slot_from_memory(x, kept, scales, norm, table, numbers, count, scratch):
        rows = scratch_rows(x, scratch)
        write_heads(x, rows, norm, table, numbers, count)
        if is_transformed:
            transform(rows.pointer, x.shape[HEAD] * x.shape[ELEMENT], x.shape[ELEMENT])
        write(rows, kept, scales, scratch)

    return write_slot_from_memory


# Placeholders for the device functions of one input dtype, kind of cache and pairing:
# `compile.compile_part` compiles a copy of `_append_part` whose globals of these names are the
# functions that `append_part` passes.
write_heads: Any = None
write_key: Any = None
write_value: Any = None


def _append_part(arguments, part, parts):
    """Write one of several equal parts of the tokens."""
    step = arguments[0]
    table = step.table
    numbers = step.numbers
    memory = at(step.scratch, part * step.room)
    q_norm = _norm_of(step, _QUERIES, step.q.shape[ELEMENT], memory)
    k_norm = _norm_of(step, _KEYS, step.q.shape[ELEMENT], memory)
    v_norm = _norm_of(step, _VALUES, step.v.shape[ELEMENT], memory)
    tokens = step.q.shape[TOKEN]
    count = step.q.shape[BATCH] * tokens
    page_size = step.key.shape[TOKEN]
    for index in range(count * part // parts, count * (part + 1) // parts):
        n = index // tokens
        token = index % tokens
        rows = table_from_row(table, n if table.shape[BATCH] > 1 else 0, token, 0)
        q = from_row(step.q, n, token, 0)
        write_heads(q, from_row(step.q_out, n, token, 0), q_norm, rows, numbers, step.count)
        slot = index
        if step.slot_count > 0:
            slot = advance(step.slots, n * step.slot_strides[0] + token * step.slot_strides[1])[0]
        if slot >= 0:
            page = slot // page_size
            place = slot % page_size
            k = from_row(step.k, n, token, 0)
            key = from_row(step.key, page, place, 0)
            key_scale = from_row(step.key_scale, page, place, 0)
            write_key(k, key, key_scale, k_norm, rows, numbers, step.count, memory)
            v = from_row(step.v, n, token, 0)
            value = from_row(step.value, page, place, 0)
            value_scale = from_row(step.value_scale, page, place, 0)
            write_value(v, value, value_scale, v_norm, rows, numbers, np.intp(0), memory)


@partial(compile.device_function, inline=True)
def _scratch_size(inputs):
    """Return the number of float32 that a part needs for norms or for other vectors than given.

    They are a number for each head, first its factor of the norm and then that of int8; room for
    the head vectors of a token, of which `transform` fills up the last 64 elements; and two numbers
    for each group of 4 bits.
    """
    q, k, v = inputs
    heads = larger(q.shape[HEAD], larger(k.shape[HEAD], v.shape[HEAD]))
    width = larger(q.shape[ELEMENT], v.shape[ELEMENT])
    return heads * (1 + width + 2 * (width // GROUP)) + _CACHE_LINES


# Checks of shapes and aliasing.


@compile.device_function
def _fits_cache(x, cache, q, in_order):
    """Return True if the keys or values of a step can be written to their cache.

    in_order: token t of batch row n goes to page n, place t. Then the cache may be x itself,
    because each token is read before it is written.
    """
    if x.shape[BATCH] != q.shape[BATCH] or x.shape[TOKEN] != q.shape[TOKEN]:
        return False
    width = cache.shape[ELEMENT] * elements(cache.pointer)
    if x.shape[HEAD] != cache.shape[HEAD] or x.shape[ELEMENT] != width:
        return False
    if x.strides[ELEMENT] != x.itemsize or cache.strides[ELEMENT] != cache.itemsize:
        return False
    if in_order:
        if cache.shape[BATCH] != x.shape[BATCH] or cache.shape[TOKEN] != x.shape[TOKEN]:
            return False
        if overlaps_itself(cache):
            return False
        if address(x.pointer) == address(cache.pointer) and x.strides == cache.strides:
            return True
    return are_disjoint(span(x), span(cache))


@partial(compile.device_function, inline=True)
def _all_fit(inputs, outputs, slots, table, head_dim):
    """Return True if all arrays fit each other, and if none that is written shares memory."""
    q, k, v = inputs
    q_out, key, value, key_scale, value_scale = outputs
    in_order = slots.size == 0
    if not fits(q, q_out, table, head_dim):
        return False
    if not in_order and slots.shape != (q.shape[BATCH], q.shape[TOKEN]):
        return False
    if k.shape[HEAD] > 0 and (k.shape[ELEMENT] != head_dim or k.shape[HEAD] % table.shape[HEAD]):
        return False
    if not _fits_cache(k, key, q, in_order) or not _fits_cache(v, value, q, in_order):
        return False
    read = (span(q), span(k), span(v))
    written = (span(q_out), span(key), span(value), span(key_scale), span(value_scale))
    for n in range(5):
        if n > 0 and not are_disjoint(written[0], written[n]):
            return False
        for other in range(3):  # an input may be its own output
            if n != other and not are_disjoint(written[n], read[other]):
                return False
    return True


# Placeholder, as above: whether head vectors go to scratch memory.
uses_memory: bool = False


def _append(
    numbers,
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
    threads,
):
    """Write q to q_out, and k and v to their slots; see `append_kernel`."""
    table = table_view(cos_sin)
    inputs = (view(q), view(k), view(v))
    outputs = (view(q_out), view(key), view(value), view(key_scale), view(value_scale))
    if not _all_fit(inputs, outputs, slots, table, numbers[HEAD_DIM]):
        return False
    parts = threads if q.size + k.size + v.size >= PARALLEL_FROM else np.intp(1)
    room = np.intp(0)
    if uses_memory or norms.size > 0:
        room = _scratch_size(inputs)
    scratch = np.empty(parts * room, np.float32)
    indices = (pointer(numbers), numbers.size, pointer(slots), slots.strides, slots.size)
    memory = (pointer(norms), norms.strides[0] * (norms.size > 0), pointer(scratch), room)
    compile.run_parts(numbers[PART], Step(*inputs, *outputs, table, *indices, *memory), parts)
    return scratch.size >= 0  # Numba frees an array after its last use


def cache_types(kind: CacheKind, readonly: bool = False) -> list[types.Array]:
    """Return Numba's types of the arrays of a cache: keys, values, and the scales of each."""
    rows = [VALUE_FORMATS[kind.key], VALUE_FORMATS[kind.value]]
    stored = [from_dtype(row.kernel_dtype) for row in rows]
    scales = [types.int16 if row.scale_dtype == np.float16 else types.float32 for row in rows]
    return [
        types.Array(element, 4, "A", readonly=readonly, aligned=False)
        for element in (*stored, *scales)
    ]


def _array_types(dtype: str, kind: CacheKind) -> tuple[types.Array, ...]:
    """Return the types of the arrays that the kernel takes, in the order of its arguments."""
    x = types.Array(ELEMENTS[dtype][0], 4, "A", readonly=True, aligned=False)
    out = types.Array(ELEMENTS[dtype][0], 4, "A", aligned=False)
    slots = types.Array(types.int64, 2, "A", readonly=True, aligned=False)
    cos_sin = types.Array(types.float32, 5, "A", readonly=True)
    norms = types.Array(types.float32, 2, "C", readonly=True)
    return NUMBERS, x, x, x, out, *cache_types(kind), slots, cos_sin, norms


def _step_type(dtype: str, kind: CacheKind) -> types.NamedTuple:
    """Return Numba's type of a step."""
    x = view_type(View, ELEMENTS[dtype][0])
    cached = [view_type(View, array.dtype) for array in cache_types(kind)]
    table = view_type(Table, types.float32, types.float32)
    indices = types.CPointer(types.int64)
    floats = types.CPointer(types.float32)
    slots = (indices, types.UniTuple(types.intp, 2), types.intp)
    memory = (floats, types.intp, floats, types.intp)
    fields = (x, x, x, x, *cached, table, indices, types.intp, *slots, *memory)
    return types.NamedTuple(fields, Step)


def _uses_memory(stored: str, is_transformed: bool = False) -> bool:
    """Return True if head vectors go to scratch memory before they are written."""
    return is_transformed or VALUE_FORMATS[stored].scale_dtype is not None


def _has_memory(kind: CacheKind) -> bool:
    """Return True if keys or values do."""
    return _uses_memory(kind.key, kind.hadamard) or _uses_memory(kind.value)


@cache
def append_part(dtype: str, kind: CacheKind, pairing: str) -> Any:
    """Return the compiled part of the append kernel for a kind of cache and a key of `PAIRINGS`.

    dtype: of q, k, v and q_out, not float64.
    """
    write_heads = _make_write_heads(PAIRINGS[pairing])

    def writer(stored: str, is_transformed: bool) -> Any:
        if _uses_memory(stored, is_transformed):
            return _make_write_slot_from_memory(pairing, write_heads, stored, is_transformed)
        return _make_write_slot(pairing, write_heads)

    return compile.compile_part(
        _append_part,
        f"append_part_{dtype}_{kind}_{pairing}",
        _step_type(dtype, kind),
        # int8 takes 1.03 of the time at level 1.
        level=3 if _has_memory(kind) else 1,
        write_heads=write_heads,
        write_key=writer(kind.key, kind.hadamard),
        write_value=writer(kind.value, False),
    )


@cache
def append_kernel(dtype: str, kind: CacheKind) -> Any:
    """Return the compiled kernel from inputs of one dtype to caches of one kind.

    It returns True, or False with nothing written if the arrays do not pass its checks. Its
    arguments, of which a call for one token takes 3.6 µs, 4.1 by keyword, and 4.9 as a tuple:

    - numbers: those of the rotation, as for `rotation_kernel`;
    - q, k, v, q_out: (batch, tokens, heads, width); k is of the width of q; k and v may have no
      heads; q_out may be q itself;
    - key, value: (pages, page_size, heads, width), or width / 2 bytes for values of 4 bits; key may
      be k if there are no slots, and value v;
    - key_scale, value_scale: float32 (pages, page_size, heads, 1), empty without scales; for 4 bits
      (pages, page_size, heads, groups), the bits of float16 as int16;
    - slots: int64 (batch, tokens), page · page_size + place, checked; negative: not kept. Empty:
      token t of row n goes to page n, place t;
    - cos_sin: float32 (2, batch or 1, tokens, frequency heads, pairs);
    - norms: float32 (3, at least width + 1), the RMS norms of q, k and v: a factor for each element
      and then eps, which is 0 where there is no norm; (0, 0) if there is none at all;
    - threads: maximum number of threads.
    """
    signature = (*_array_types(dtype, kind), types.intp)
    name = f"append_{dtype}_{kind}"
    return compile.compile_kernel(_append, name, signature, uses_memory=_has_memory(kind))
