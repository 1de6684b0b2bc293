"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, cfunc, types
from numpy.typing import NDArray

from rope_cpu import _threads
from rope_cpu._kernels.compiler import Kernel, built, loaded
from rope_cpu._kernels.entry import object_at, whole
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.objects import location
from rope_cpu._kernels.sharing import share
from rope_cpu._kernels.words import spill

Array = NDArray[Any]

_UNIT = 2**14  # elements that threads share in
# Elements that fit the first cache, how many times they are scaled there, and for how many such units, to keep each
# core busy for some 20 µs.
_CORE_UNIT, _CORE_TIMES, _CORE_UNITS = 2**12, 64, 8


def memory(size: int, past: int = 0) -> NDArray[np.uint8]:
    """Return `size` bytes, all of them touched, that start `past` bytes after the start of a cache line."""
    raw = np.ones(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    return raw[start : start + size]


def _scale(
    x: Integer,
    out: Integer,
    size: Integer,
    factor: Integer,
    unit: Integer,
    times: Integer,
    work: Integer,
    pool: Integer,
) -> int:
    """Have all elements of an array scaled, `unit` at a time."""
    arrays = [location(array)[0] for array in (x, out, factor)]
    job = spill(x.b, (*arrays, spill(x.b, (size, unit, times))))
    share(pool, work, job, (size + unit - 1) // unit, size * times // _UNIT)
    return 0


@cache
def _scaling() -> Kernel:
    """Return the kernel (x, out, size, factor, unit, times, work, pool); work: from `_part`."""
    parameters = object_at, object_at, whole, object_at, whole, whole, whole, whole
    return loaded(built(_scale, "scale", parameters), "scale")


@cache
def _part(elsewhere: bool) -> int:
    """Return where the loop (job, start, stop) is, as plain as can be.

    elsewhere: out is not x. The compiler must know, as it would not make vectors of what may be either.
    """
    word = types.int64

    @cfunc(word(types.CPointer(types.voidptr), word, word), error_model="numpy")
    def part(job, start, stop):  # type: ignore[no-untyped-def]
        size, unit, times = carray(job[3], (3,), np.int64)
        factor = carray(job[2], (1,), np.float32)[0]
        for first in range(start * unit, stop * unit, unit):
            x = carray(job[0], (size,), np.float32)[first : first + unit]
            for _ in range(times):
                if elsewhere:
                    out = carray(job[1], (size,), np.float32)[first : first + unit]
                    for i in range(x.size):
                        out[i] = x[i] * factor
                else:
                    for i in range(x.size):
                        x[i] *= factor
        return 0

    return int(part.address)


def scale(x: Array, out: Array, factor: Array, parallel: bool, unit: int = _UNIT, times: int = 1) -> None:
    """Write contiguous float32 times factor[0] to out, which may be x; `unit` elements at a time, each so often."""
    work, pool = _part(out is not x), _threads.pool() if parallel else 0
    _scaling().call(x, out, x.size, factor, unit, times, work, pool)


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


def buffers(moved: int, copies: int) -> list[Array]:
    """Return arrays that scaling in place moves `moved` bytes of, half of them read and half of them written."""
    floats = max(1, moved // 8)
    return [memory(4 * floats).view(np.float32) for _ in range(copies)]
