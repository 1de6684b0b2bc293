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
    DONE,
    ELEMENT,
    ELEMENTS,
    HEAD,
    INVALID,
    PAIRINGS,
    PARALLEL_FROM,
    TOKEN,
    Tile,
    make_rotate_tile,
    row_offset,
    table_view,
    view,
)
from rope_cpu.kernels.vectors import advance, pointer


@compile.device_function
def _run_length(slots, row, token, most):
    """Return how many tokens, `most` at most, have consecutive slots from `token` on."""
    first = slots[row, token]
    length = 1
    while length < most and slots[row, token + length] == first + length:
        length += 1
    return length


def _make_rotate_slots(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates the keys of one of several parts of the slots.

    Tokens whose slots follow each other on a page are rotated at once: a call for each token and
    its divisions take about as long as the rotation of a token in 16 bits.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_slots(keys, slots, table, block_pairs, part, parts):
        tokens = slots.shape[1]
        page_size = keys.shape[TOKEN]
        groups = table.shape[HEAD]  # of heads that share cos and sin
        heads = keys.shape[HEAD] // groups
        index = slots.size * part // parts
        stop = slots.size * (part + 1) // parts
        while index < stop:
            row = index // tokens
            token = index % tokens
            slot = slots[row, token]
            if slot < 0:
                index += 1
                continue
            page = slot // page_size
            place = slot % page_size
            length = _run_length(
                slots, row, token, min(stop - index, tokens - token, page_size - place)
            )
            tile = Tile(
                length,
                heads,
                keys.strides[TOKEN],
                keys.strides[HEAD],
                keys.strides[TOKEN],
                keys.strides[HEAD],
                table.strides[TOKEN],
                keys.itemsize,
                keys.itemsize,
                table.itemsize,
                pointer(block_pairs),
                block_pairs.size,
            )
            table_row = row if table.shape[BATCH] > 1 else 0
            for group in range(groups):
                x = advance(keys.pointer, row_offset(keys, page, place, group * heads))
                offset = row_offset(table, table_row, token, group)
                cos = advance(table.cos, offset)
                sin = advance(table.sin, offset)
                rotate_tile(x, x, cos, sin, tile, None, False)
            index += length

    return rotate_slots


def _make_rotate_slots_in_parallel(rotate_slots: Any, variant: str) -> Any:
    """Return the device function that works on several parts at a time."""

    @partial(compile.device_function, variant=variant, parallel=True)
    def rotate_slots_in_parallel(keys, slots, cos_sin, block_pairs, parts):
        for index in prange(parts):
            table = table_view(cos_sin)
            rotate_slots(view(keys), slots, table, block_pairs, np.intp(index), parts)

    return rotate_slots_in_parallel


# Placeholders for the device functions of one dtype and pairing, as in `rope_cpu.kernels.rotate`.
rotate_slots: Any = None
rotate_slots_in_parallel: Any = None


def _rotate_cached(keys, slots, cos_sin, block_pairs, head_dim, threads):
    """Rotate the keys of slots in place; see `rotate_cached_kernel`."""
    table = table_view(cos_sin)
    rows = table.shape[BATCH]
    if keys.shape[ELEMENT] != head_dim or keys.shape[HEAD] % table.shape[HEAD]:
        return INVALID
    if keys.strides[ELEMENT] != keys.itemsize:
        return INVALID
    if (rows != 1 and rows != slots.shape[0]) or table.shape[TOKEN] != slots.shape[1]:
        return INVALID
    if threads > 1 and slots.size * keys.shape[HEAD] * head_dim >= PARALLEL_FROM:
        rotate_slots_in_parallel(keys, slots, cos_sin, block_pairs, threads)
        return DONE
    rotate_slots(view(keys), slots, table, block_pairs, np.intp(0), np.intp(1))
    return DONE


@cache
def rotate_cached_kernel(dtype: str, pairing: str) -> Any:
    """Return the compiled kernel that rotates the keys of a cache in place.

    Parameters
    ----------
    dtype : str
        A key of `ELEMENTS`.
    pairing : str
        A key of `PAIRINGS`.

    Returns
    -------
    kernel : numba dispatcher
        Called with

        - keys: (pages, page_size, heads, head_dim);
        - slots: int64 (batch, tokens), page · page_size + place, checked, none twice; negative:
          left out;
        - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), C-contiguous;
        - block_pairs: int64 (blocks,), the number of pairs of each block of a head vector;
        - head_dim: elements of a head vector;
        - threads: maximum number of threads.

        It returns `DONE`, or `INVALID` with nothing written if the arrays do not pass its checks.
    """
    element, table_element = ELEMENTS[dtype]
    keys = types.Array(element, 4, "A", aligned=False)
    slots = types.Array(types.int64, 2, "A", readonly=True, aligned=False)
    cos_sin = types.Array(table_element, 5, "C")
    block_pairs = types.Array(types.int64, 1, "C", readonly=True)
    part = _make_rotate_slots(PAIRINGS[pairing])
    return compile.compile_kernel(
        _rotate_cached,
        f"rotate_cached_{dtype}_{pairing}",
        (keys, slots, cos_sin, block_pairs, types.intp, types.intp),
        rotate_slots=part,
        rotate_slots_in_parallel=_make_rotate_slots_in_parallel(part, pairing),
    )
