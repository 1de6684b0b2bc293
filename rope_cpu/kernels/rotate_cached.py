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
    Tile,
    make_rotate_tile,
    row_offset,
    table_view,
    view,
)
from rope_cpu.kernels.vectors import advance, pointer


def _make_rotate_runs(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates one of several equal parts of the keys.

    Keys that follow each other on a page are rotated at once: a call for each token and its
    divisions take about as long as the rotation of a token in 16 bits.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_on_page(keys, slot, index, length, table, block_pairs):
        page = slot // keys.shape[TOKEN]
        place = slot % keys.shape[TOKEN]
        row = index // table.shape[TOKEN] if table.shape[BATCH] > 1 else 0
        token = index % table.shape[TOKEN]
        groups = table.shape[HEAD]  # of heads that share cos and sin
        heads = keys.shape[HEAD] // groups
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
        for group in range(groups):
            x = advance(keys.pointer, row_offset(keys, page, place, group * heads))
            offset = row_offset(table, row, token, group)
            cos = advance(table.cos, offset)
            sin = advance(table.sin, offset)
            rotate_tile(x, x, cos, sin, tile, None, False)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_runs(keys, runs, table, block_pairs, begin, end):
        """Rotate the keys from number `begin` to `end` of those of all runs."""
        tokens = table.shape[TOKEN]
        page_size = keys.shape[TOKEN]
        number = np.intp(0)  # of keys in the runs before
        for run in range(len(runs)):
            skipped = max(begin - number, 0)
            left = min(end - number, runs[run, 1]) - skipped
            number += runs[run, 1]
            slot = runs[run, 0] + skipped
            index = runs[run, 2] + skipped
            while left > 0:
                length = min(left, page_size - slot % page_size, tokens - index % tokens)
                rotate_on_page(keys, slot, index, length, table, block_pairs)
                slot += length
                index += length
                left -= length

    return rotate_runs


def _make_rotate_in_parallel(rotate_runs: Any, variant: str) -> Any:
    """Return the device function that works on several parts at a time."""

    @partial(compile.device_function, variant=variant, parallel=True)
    def rotate_in_parallel(keys, runs, cos_sin, block_pairs, count, parts):
        for index in prange(parts):
            part = np.intp(index)
            begin = count * part // parts
            end = count * (part + 1) // parts
            rotate_runs(view(keys), runs, table_view(cos_sin), block_pairs, begin, end)

    return rotate_in_parallel


# Placeholders for the device functions of one dtype and pairing, as in `rope_cpu.kernels.rotate`.
rotate_runs: Any = None
rotate_in_parallel: Any = None


def _rotate_cached(keys, runs, cos_sin, block_pairs, threads):
    """Rotate the keys of runs of slots in place; see `rotate_cached_kernel`."""
    count = np.intp(0)
    for run in range(len(runs)):
        count += runs[run, 1]
    if threads > 1 and count * keys.shape[HEAD] * keys.shape[ELEMENT] >= PARALLEL_FROM:
        rotate_in_parallel(keys, runs, cos_sin, block_pairs, count, threads)
    else:
        rotate_runs(view(keys), runs, table_view(cos_sin), block_pairs, np.intp(0), count)


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
        Called with arrays that have been checked:

        - keys: (pages, page_size, heads, head_dim), the last axis contiguous;
        - runs: int64 (runs, 3), of consecutive slots: the first, page · page_size + place, their
          number, and the index of the first token in the batch rows of cos and sin, one after the
          other; none in two runs;
        - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), C-contiguous;
        - block_pairs: int64 (blocks,), the number of pairs of each block of a head vector;
        - threads: maximum number of threads.
    """
    element, table_element = ELEMENTS[dtype]
    keys = types.Array(element, 4, "A", aligned=False)
    runs = types.Array(types.int64, 2, "C")
    cos_sin = types.Array(table_element, 5, "A", readonly=True)
    block_pairs = types.Array(types.int64, 1, "C", readonly=True)
    part = _make_rotate_runs(PAIRINGS[pairing])
    return compile.compile_kernel(
        _rotate_cached,
        f"rotate_cached_{dtype}_{pairing}",
        (keys, runs, cos_sin, block_pairs, types.intp),
        rotate_runs=part,
        rotate_in_parallel=_make_rotate_in_parallel(part, pairing),
    )
