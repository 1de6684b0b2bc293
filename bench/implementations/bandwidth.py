"""The limit of this machine: the time to read as many bytes, scale them and write them back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from rope_cpu.array_types import Array
from rope_cpu.kernels.threads import load_tbb

from ..workload import allocate

_FLOAT_BYTES = 4
# float32 elements that fit a core's first cache, and how often they are scaled there to keep it
# busy for some 20 µs.
_FIRST_CACHE_FLOATS = 2**12
_FIRST_CACHE_REPEATS = 256
_ONE = np.float32(1)  # an argument, since LLVM would drop a multiplication by a constant 1

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


@njit(parallel=True, nogil=True, error_model="numpy")
def _scale(x, out, in_place, factor, times, threads):  # type: ignore[no-untyped-def]
    if threads > 1:
        for n in prange(threads):
            start = x.size * n // threads
            stop = x.size * (n + 1) // threads
            _scale_block(x[start:stop], out[start:stop], in_place, factor, times)
    else:
        _scale_block(x, out, in_place, factor, times)


def scale(x: Array, out: Array, threads: int, times: int = 1, factor: Any = _ONE) -> None:
    """Write float32 `x` times a factor to `out`; if that is `x`, repeat it `times` times."""
    _scale(x, out, out is x, factor, times, threads)


def scale_in_first_cache(x: Array, threads: int) -> None:
    """Keep cores busy with arrays in their first cache. x: from `first_cache_array`."""
    scale(x, x, threads, _FIRST_CACHE_REPEATS)


def first_cache_array(threads: int) -> Array:
    """Return an array whose share for each thread fits the first cache of its core."""
    return allocate(_FLOAT_BYTES * _FIRST_CACHE_FLOATS * threads).view(np.float32)


def scale_new(floats: int, threads: int) -> Array:
    """Allocate memory and touch it, by scaling its content."""
    x = np.empty(floats, np.float32)
    scale(x, x, threads)
    return x


def arrays(bytes_accessed: int, copies: int) -> list[Array]:
    """Return float32 arrays; scaling one reads and writes `bytes_accessed` bytes together."""
    floats = max(1, bytes_accessed // (2 * _FLOAT_BYTES))
    return [allocate(_FLOAT_BYTES * floats).view(np.float32) for _ in range(copies)]
