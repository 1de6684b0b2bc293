"""The kernel that rotates cached keys in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import types

from rope_cpu.kernels import compile
from rope_cpu.kernels.rotate import (
    BATCH,
    ELEMENT,
    ELEMENTS,
    HEAD,
    NUMBERS,
    PAIRINGS,
    PARALLEL_FROM,
    PART,
    TOKEN,
    from_row,
    make_rotate_tile,
    table_from_row,
    table_view,
    view,
)
from rope_cpu.kernels.vectors import pointer


def _make_rotate_on_page(pairing: Callable[[int], Any]) -> Any:
    """Return the device function that rotates the keys of consecutive slots of a page.

    index: of the first token, in the batch rows of the table one after the other.
    """
    rotate_tile = make_rotate_tile(pairing)

    @partial(compile.device_function, variant=pairing.__name__)
    def rotate_on_page(keys, slot, length, table, index, numbers):
        page = slot // keys.shape[TOKEN]
        place = slot % keys.shape[TOKEN]
        row = index // table.shape[TOKEN] if table.shape[BATCH] > 1 else 0
        token = index % table.shape[TOKEN]
        groups = table.shape[HEAD]  # of heads that share cos and sin
        heads = keys.shape[HEAD] // groups
        for group in range(groups):
            x = from_row(keys, page, place, group * heads)
            rows = table_from_row(table, row, token, group)
            start = pointer(numbers)
            rotate_tile(x, x, rows, length, heads, start, numbers.size, None, False)

    return rotate_on_page


# Placeholder for the device function of a pairing: `compile.compile_part` compiles a copy of
# `_rotate_part` whose global of this name is the function that `rotate_cached_part` passes.
rotate_on_page: Any = None


def _rotate_part(arguments, part, parts):
    """Rotate one of several equal parts of the keys of all runs, one after the other.

    Consecutive slots of one page and one batch row are rotated at once: a call for each token and
    its divisions take about as long as the rotation of a token in 16 bits.
    """
    numbers, keys, runs, cos_sin, count = arguments[0]
    begin = count * part // parts
    end = count * (part + 1) // parts
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
            rotate_on_page(view(keys), slot, length, table, index, numbers)
            slot += length
            index += length
            left -= length


def _rotate_cached(numbers, keys, runs, cos_sin, threads):
    """Rotate the keys of runs of slots in place; see `rotate_cached_kernel`."""
    count = np.intp(0)
    for run in range(len(runs)):
        count += runs[run, 1]
    elements = count * keys.shape[HEAD] * keys.shape[ELEMENT]
    parts = threads if elements >= PARALLEL_FROM else np.intp(1)
    compile.run_parts(numbers[PART], (numbers, keys, runs, cos_sin, count), parts)


def _array_types(dtype: str) -> tuple[types.Array, ...]:
    """Return the types of the arrays that the kernel takes, in the order of its arguments."""
    element, table_element = ELEMENTS[dtype]
    keys = types.Array(element, 4, "A", aligned=False)
    runs = types.Array(types.int64, 2, "C")
    cos_sin = types.Array(table_element, 5, "A", readonly=True)
    return NUMBERS, keys, runs, cos_sin


@cache
def rotate_cached_part(dtype: str, pairing: str) -> Any:
    """Return the compiled part of the kernel, for keys of `ELEMENTS` and of `PAIRINGS`."""
    return compile.compile_part(
        _rotate_part,
        f"rotate_cached_part_{dtype}_{pairing}",
        types.Tuple((*_array_types(dtype), types.intp)),
        rotate_on_page=_make_rotate_on_page(PAIRINGS[pairing]),
    )


@cache
def rotate_cached_kernel(dtype: str) -> Any:
    """Return the compiled kernel that rotates the keys of a cache of a dtype in place.

    Its arguments, of which the arrays have been checked:

    - numbers: those of the rotation, as for `rotation_kernel`;
    - keys: (pages, page_size, heads, head_dim), the last axis contiguous;
    - runs: int64 (runs, 3), runs of consecutive slots. The columns are the first slot,
      page · page_size + place; the number of slots; and the index of the first token, with
      batch rows one after the other. No slot is in two runs;
    - cos_sin: (2, batch or 1, tokens, frequency heads, pairs), the last axis contiguous;
    - threads: maximum number of threads.
    """
    signature = (*_array_types(dtype), types.intp)
    return compile.compile_kernel(_rotate_cached, f"rotate_cached_{dtype}", signature)
