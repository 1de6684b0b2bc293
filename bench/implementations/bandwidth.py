"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from rope_cpu.kernels import threads

from ..workload import memory

Array = NDArray[Any]

_UNIT = 2**14  # elements that are gone through at a time
# Elements that fit the first cache, how many times they are scaled there, and for how many such units, to keep each
# core busy for some 20 µs.
_CORE_UNIT, _CORE_TIMES, _CORE_UNITS = 2**12, 64, 8

threads.load_tbb()  # before Numba starts its threads, as kernels do


@njit(error_model="numpy")
def _scale_in_place(x, factor, unit, times):  # type: ignore[no-untyped-def]
    for first in range(0, x.size, unit):
        part = x[first : first + unit]
        for _ in range(times):
            for i in range(part.size):
                part[i] *= factor


@njit(error_model="numpy")
def _scale_into(x, out, factor):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        out[i] = x[i] * factor


@njit(parallel=True, nogil=True, error_model="numpy", cache=True)
def _scale(x, out, in_place, factor, unit, times, parts):  # type: ignore[no-untyped-def]
    # The two loops differ because LLVM makes vectors only of one that is known to write elsewhere, or in place.
    if parts > 1:
        for part in prange(parts):
            start, stop = x.size * part // parts, x.size * (part + 1) // parts
            if in_place:
                _scale_in_place(x[start:stop], factor, unit, times)
            else:
                _scale_into(x[start:stop], out[start:stop], factor)
    elif in_place:
        _scale_in_place(x, factor, unit, times)
    else:
        _scale_into(x, out, factor)


def scale(x: Array, out: Array, factor: Array, parallel: bool, unit: int = _UNIT, times: int = 1) -> None:
    """Write contiguous float32 times factor[0] to out, which may be x; in place `unit` at a time, each so often."""
    _scale(x, out, out is x, factor[0], unit, times, threads.usable() if parallel else 1)


def scale_in_cores(x: Array, factor: Array, parallel: bool) -> None:
    """Keep cores busy with what lies in their first cache; x: from `core_buffer`."""
    scale(x, x, factor, parallel, _CORE_UNIT, _CORE_TIMES)


def core_buffer() -> Array:
    """Return what `scale_in_cores` takes."""
    return memory(4 * _CORE_UNIT * _CORE_UNITS).view(np.float32)


def scale_new(floats: int, factor: Array, parallel: bool) -> Array:
    """Multiply so many float32 of new memory by factor[0]; what they are does not matter."""
    x = np.empty(floats, np.float32)
    scale(x, x, factor, parallel)
    return x


def buffers(bytes_accessed: int, copies: int) -> list[Array]:
    """Return arrays that scaling in place accesses so many bytes of, half of them read and half written."""
    floats = max(1, bytes_accessed // 8)
    return [memory(4 * floats).view(np.float32) for _ in range(copies)]
