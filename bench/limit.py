"""The limit of this machine: how fast as many bytes can be read, scaled and written back in place."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def memory(size: int, past: int = 0) -> NDArray[np.uint8]:
    """Return `size` bytes, all of them touched, that start `past` bytes after the start of a cache line."""
    raw = np.ones(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    return raw[start : start + size]


@cache
def scale(parallel: bool) -> Any:
    """Return the compiled kernel (x, factor) that scales contiguous float32 in place: as plain as a kernel can be."""

    def scale_in_place(x: Any, factor: Any) -> None:
        for i in numba.prange(x.size):
            x[i] *= factor

    scale_in_place.__qualname__ = f"scale_{'parallel' if parallel else 'serial'}"
    kernel = numba.njit(nogil=True, parallel=parallel, error_model="numpy")(scale_in_place)
    with suppress(RuntimeError):  # nowhere to write a cache: compile each time
        kernel.enable_caching()
    kernel.compile(numba.void(numba.float32[::1], numba.float32))
    return kernel


def buffers(moved: int, copies: int) -> list[Array]:
    """Return arrays that scaling in place moves `moved` bytes of, half of them read and half of them written."""
    floats = max(1, moved // 8)
    return [memory(4 * floats).view(np.float32) for _ in range(copies)]
