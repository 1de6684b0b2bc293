"""New arrays for results, the large ones in memory that earlier results no longer use.

The system clears the pages of a large new array when they are first written, which takes longer
than a rotation.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.array_types import DTYPE_NAMES, Array

# Bytes of the smallest results whose memory is kept; malloc itself keeps that of smaller ones.
LARGE = 32 * 2**20
_MOST_BYTES = 256 * 2**20  # of all buffers that are kept
_OF_A_SIZE = 2  # q and k, or the result of this call and of the last one
_CACHE_LINE = 64

# The buffers that no result uses, by id, the newest last. Each operation on it is atomic, because a
# garbage collection can give a buffer back at any time; a lock might be held when a process forks.
_kept: dict[int, NDArray[np.uint8]] = {}


def new_like(x: Array) -> Array:
    """Return a new array, as `np.empty_like` does.

    A large one does not own its memory. It has it from a lease, which all its views keep alive, and
    whose end gives the memory back.
    """
    if x.nbytes < LARGE or type(x) is not np.ndarray or x.dtype not in DTYPE_NAMES:
        return np.empty_like(x)
    try:
        strides = np.empty_like(x).strides  # no page of this array is written
        memory = _buffer(-(-x.nbytes // LARGE) * LARGE)
    except MemoryError:
        _kept.clear()
        return np.empty_like(x)
    # Not a memoryview: arrays would keep the object behind it, and not the memoryview.
    lease: Any = (ctypes.c_char * memory.nbytes).from_buffer(memory.data)
    # Results are used until the process ends, so its end gives nothing back.
    weakref.finalize(lease, _give_back, memory).atexit = False
    return np.ndarray(x.shape, x.dtype, lease, strides=strides)


def _buffer(size: int) -> NDArray[np.uint8]:
    """Return a buffer that was kept, or a new one that starts on a cache line."""
    for kept in list(_kept.values()):
        if kept.nbytes == size and _kept.pop(id(kept), None) is not None:
            return kept
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size]


def _give_back(memory: NDArray[np.uint8]) -> None:
    """Keep a buffer, and free older ones beyond the limits."""
    _kept[id(memory)] = memory
    sizes: list[int] = []
    for kept in reversed(list(_kept.values())):
        if sizes.count(kept.nbytes) < _OF_A_SIZE and sum(sizes) + kept.nbytes <= _MOST_BYTES:
            sizes.append(kept.nbytes)
        else:
            _kept.pop(id(kept), None)
