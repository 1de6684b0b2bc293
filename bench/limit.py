"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from rope_cpu import _threads
from rope_cpu._kernels.compiler import SOURCES, address, compiled
from rope_cpu._kernels.integers import emitted
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


@intrinsic  # type: ignore[untyped-decorator]
def _floats(typingctx: Any, address: Any) -> Any:
    """Return an address as a pointer to float32."""
    target = types.CPointer(types.float32)
    return target(types.int64), lambda context, b, _, args: b.inttoptr(args[0], context.get_value_type(target))


@emitted(types.UniTuple(types.int64, 6))
def _words(job):  # type: ignore[no-untyped-def]
    """Return what a part of the work is told."""
    return job.words(6)


@emitted(types.int64)
def _scale(x, out, size, factor, unit, times, work, pool):  # type: ignore[no-untyped-def]
    """Have all elements scaled, `unit` at a time."""
    job = spill(x.b, (x, out, size, factor, unit, times))
    share(pool, work, job, (size + unit - 1) // unit, size * times // _UNIT)
    return 0


@cache
def _scaling(elsewhere: bool) -> tuple[Any, int]:
    """Return the kernel (x, out, factor, unit, times, work, pool), as plain as can be, and the `work` it needs.

    elsewhere: out is not x. The compiler must know, as it would not make vectors of what may be either.
    """
    sources = SOURCES

    def scale_part(job, start, stop):  # type: ignore[no-untyped-def]
        _ = sources  # a part of the cache key
        at, to, size, factor_at, unit, times = _words(job)
        factor = carray(_floats(factor_at), (1,))[0]
        for first in range(start * unit, stop * unit, unit):
            part = carray(_floats(at), (size,))[first : first + unit]
            for _ in range(times):
                if elsewhere:
                    out = carray(_floats(to), (size,))[first : first + unit]
                    for i in range(part.size):
                        out[i] = part[i] * factor
                else:
                    for i in range(part.size):
                        part[i] *= factor
        return 0

    def scale(x, out, factor, unit, times, work, pool):  # type: ignore[no-untyped-def]
        _ = sources
        return _scale(x.ctypes.data, out.ctypes.data, x.size, factor.ctypes.data, unit, times, work, pool)

    array, word = types.Array(types.float32, 1, "C"), types.int64
    kernel = compiled(scale, "scale", (array, array, array, word, word, word, word))
    name = "scale_part_elsewhere" if elsewhere else "scale_part"
    return kernel, address(compiled(scale_part, name, (word,) * 3))


def scale(x: Array, out: Array, factor: Array, parallel: bool, unit: int = _UNIT, times: int = 1) -> None:
    """Write contiguous float32 times factor[0] to out, which may be x; `unit` elements at a time, each so often."""
    kernel, work = _scaling(out is not x)
    kernel(x, out, factor, unit, times, work, _threads.pool() if parallel else 0)


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
