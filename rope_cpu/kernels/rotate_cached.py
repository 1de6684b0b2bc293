"""The kernel that rotates cached keys in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import prange, types

from rope_cpu.kernels import compile
from rope_cpu.kernels.rotate import (
    BATCH,
    ELEMENT,
    ELEMENTS,
    HEAD,
    PAIRINGS,
    PARALLEL_FROM,
    TOKEN,
    make_rotate_tile,
    row_offset,
    table_view,
    tile_of,
    view,
)
from rope_cpu.kernels.vectors import advance, call_at


def _make_rotate_on_page(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates the keys of consecutive slots of a page.

    index: of the first token, in the batch rows of the table one after the other.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_on_page(keys, slot, length, table, index, block_pairs):
        page = slot // keys.shape[TOKEN]
        place = slot % keys.shape[TOKEN]
        row = index // table.shape[TOKEN] if table.shape[BATCH] > 1 else 0
        token = index % table.shape[TOKEN]
        groups = table.shape[HEAD]  # of heads that share cos and sin
        heads = keys.shape[HEAD] // groups
        tile = tile_of(length, heads, keys, keys, table, block_pairs)
        for group in range(groups):
            x = advance(keys.pointer, row_offset(keys, page, place, group * heads))
            offset = row_offset(table, row, token, group)
            cos = advance(table.cos, offset)
            sin = advance(table.sin, offset)
            rotate_tile(x, x, cos, sin, tile, None, False)

    return rotate_on_page


# Placeholder for the device function of a pairing: `compile.compile_part` compiles a copy of
# `_rotate_part` whose global of this name is the function that `rotate_cached_part` passes.
rotate_on_page: Any = None


def _rotate_part(keys, runs, cos_sin, block_pairs, begin, end):
    """Rotate keys number `begin` … `end` − 1 of all runs, one after the other.

    Consecutive slots of one page and one batch row are rotated at once: a call for each token and
    its divisions take about as long as the rotation of a token in 16 bits.
    """
    table = table_view(cos_sin)
    page_size = keys.shape[TOKEN]
    tokens = table.shape[TOKEN]
    number = np.intp(0)  # of keys in the runs before
    for run in range(len(runs)):
        skipped = max(begin - number, 0)
        left = min(end - number, runs[run, 1]) - skipped
        number += runs[run, 1]
        slot = runs[run, 0] + skipped
        index = runs[run, 2] + skipped
        while left > 0:
            length = min(left, page_size - slot % page_size, tokens - index % tokens)
            rotate_on_page(view(keys), slot, length, table, index, block_pairs)
            slot += length
            index += length
            left -= length


@partial(compile.device_function, parallel=True)
def _rotate_in_parallel(rotate_part, arrays, count, parts):
    """Rotate several parts at a time."""
    for index in prange(parts):
        part = np.intp(index)
        bounds = (count * part // parts, count * (part + 1) // parts)
        call_at(rotate_part, (*arrays, *bounds))


def _rotate_cached(rotate_part, keys, runs, cos_sin, block_pairs, threads):
    """Rotate the keys of runs of slots in place; see `rotate_cached_kernel`."""
    arrays = (keys, runs, cos_sin, block_pairs)
    count = np.intp(0)
    for run in range(len(runs)):
        count += runs[run, 1]
    if threads > 1 and count * keys.shape[HEAD] * keys.shape[ELEMENT] >= PARALLEL_FROM:
        _rotate_in_parallel(rotate_part, arrays, count, threads)
    else:
        call_at(rotate_part, (*arrays, np.intp(0), count))


def _array_types(dtype: str) -> tuple[types.Array, ...]:
    """Return the types of the arrays that the kernel takes, in the order of its arguments."""
    element, table_element = ELEMENTS[dtype]
    keys = types.Array(element, 4, "A", aligned=False)
    runs = types.Array(types.int64, 2, "C")
    cos_sin = types.Array(table_element, 5, "A", readonly=True)
    block_pairs = types.Array(types.int64, 1, "C", readonly=True)
    return keys, runs, cos_sin, block_pairs


@cache
def rotate_cached_part(dtype: str, pairing: str) -> Any:
    """Return the compiled part of the kernel, for keys of `ELEMENTS` and of `PAIRINGS`."""
    return compile.compile_part(
        _rotate_part,
        f"rotate_cached_part_{dtype}_{pairing}",
        (*_array_types(dtype), types.intp, types.intp),
        rotate_on_page=_make_rotate_on_page(PAIRINGS[pairing]),
    )


@cache
def rotate_cached_kernel(dtype: str) -> Any:
    """Return the compiled kernel that rotates the keys of a cache of a dtype in place.

    Its arguments, of which the arrays have been checked:

    - rotate_part: the address of the part for a pairing;
    - keys: (pages, page_size, heads, head_dim), the last axis contiguous;
    - runs: int64 (runs, 3), runs of consecutive slots. The columns are the first slot,
      page · page_size + place; the number of slots; and the index of the first token, with
      batch rows one after the other. No slot is in two runs;
    - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), the last axis contiguous;
    - block_pairs: int64 (blocks,), the number of pairs of each block of a head vector;
    - threads: maximum number of threads.
    """
    signature = (types.intp, *_array_types(dtype), types.intp)
    return compile.compile_kernel(_rotate_cached, f"rotate_cached_{dtype}", signature)
