"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from rope_cpu.array_types import Array
from rope_cpu.kernels.threads import load_tbb

from ..workload import allocate

# float32 elements that fit a core's first cache, and how often they are scaled there to keep it busy for some 20 µs.
_IN_FIRST_CACHE, _TIMES = 2**12, 256
_ONE = np.float32(1)  # as an argument, or LLVM would drop the multiplication

load_tbb()  # Numba's threads start with the first parallel call, which may be one of this module


@njit(error_model="numpy")
def _scale_block(x, out, in_place, factor, times):  # type: ignore[no-untyped-def]
    # Two loops, since LLVM vectorizes a loop only if it always writes in place, or never.
    for _ in range(times):
        if in_place:
            for i in range(x.size):
                x[i] *= factor
        else:
            for i in range(x.size):
                out[i] = x[i] * factor


@njit(parallel=True, nogil=True, error_model="numpy", cache=True)
def _scale(x, out, in_place, factor, times, threads):  # type: ignore[no-untyped-def]
    if threads > 1:
        for n in prange(threads):
            start, stop = x.size * n // threads, x.size * (n + 1) // threads
            _scale_block(x[start:stop], out[start:stop], in_place, factor, times)
    else:
        _scale_block(x, out, in_place, factor, times)


def scale(x: Array, out: Array, threads: int, times: int = 1, factor: Any = _ONE) -> None:
    """Write contiguous float32 times a factor to `out`, which may be x and is then scaled several times."""
    _scale(x, out, out is x, factor, times, threads)


def scale_in_first_cache(x: Array, threads: int) -> None:
    """Keep cores busy with arrays in their first cache. x: from `first_cache_array`."""
    scale(x, x, threads, _TIMES)


def first_cache_array(threads: int) -> Array:
    """Return an array whose share for each thread fits the first cache of its core."""
    return allocate(4 * _IN_FIRST_CACHE * threads).view(np.float32)


def scale_new(floats: int, threads: int) -> Array:
    """Return new memory that was touched by scaling whatever it holds."""
    x = np.empty(floats, np.float32)
    scale(x, x, threads)
    return x


def arrays(bytes_accessed: int, copies: int) -> list[Array]:
    """Return arrays that scaling accesses so many bytes of, half of them read and half written."""
    floats = max(1, bytes_accessed // 8)
    return [allocate(4 * floats).view(np.float32) for _ in range(copies)]
