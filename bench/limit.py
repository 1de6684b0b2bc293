"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types
from numpy.typing import NDArray

from rope_cpu import _threads
from rope_cpu._compile import SOURCES, address, compiled
from rope_cpu._pool import share
from rope_cpu._words import fetch, pointer, spill

Array = NDArray[Any]

_UNIT = 2**14  # elements that threads share in


def memory(size: int, past: int = 0) -> NDArray[np.uint8]:
    """Return `size` bytes, all of them touched, that start `past` bytes after the start of a cache line."""
    raw = np.ones(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    return raw[start : start + size]


@cache
def _scaling() -> tuple[Any, int]:
    """Return the compiled kernel (x, factor, work, pool), and the `work` it needs: as plain as a kernel can be."""
    sources = SOURCES

    def scale_part(job, start, stop):  # type: ignore[no-untyped-def]
        _ = sources  # a part of the cache key
        at, size, factor_at = fetch(job, 3)
        part = carray(pointer(at, "float32"), (size,))[start * _UNIT : stop * _UNIT]
        factor = carray(pointer(factor_at, "float32"), (1,))[0]
        for i in range(part.size):
            part[i] *= factor
        return 0

    def scale(x, factor, work, pool):  # type: ignore[no-untyped-def]
        _ = sources
        share(pool, work, spill((x.ctypes.data, x.size, factor.ctypes.data)), -(-x.size // _UNIT), x.size // _UNIT)
        return 0

    array, word = types.Array(types.float32, 1, "C"), types.int64
    kernel = compiled(scale, "scale", (array, array, word, word))
    return kernel, address(compiled(scale_part, "scale_part", (word,) * 3))


def scale(x: Array, factor: Array, parallel: bool) -> None:
    """Multiply contiguous float32 by factor[0] in place."""
    kernel, work = _scaling()
    kernel(x, factor, work, _threads.pool() if parallel else 0)


def scale_new(floats: int, factor: Array, parallel: bool) -> Array:
    """Multiply so many float32 of new memory by factor[0]; what they are does not matter."""
    x = np.empty(floats, np.float32)
    scale(x, factor, parallel)
    return x


def buffers(moved: int, copies: int) -> list[Array]:
    """Return arrays that scaling in place moves `moved` bytes of, half of them read and half of them written."""
    floats = max(1, moved // 8)
    return [memory(4 * floats).view(np.float32) for _ in range(copies)]
