"""The limit of this machine: the time to read as many bytes, scale them and write them back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

from rope_cpu.array_types import Array
from rope_cpu.kernels.threads import load_tbb

from .workload import allocate

_FLOAT_BYTES = 4
_ONE = np.float32(1)  # an argument, since LLVM would drop a multiplication by a constant 1

load_tbb()  # Numba's threads start with the first parallel call, which may be one of this module


@njit(error_model="numpy")
def _scale_block(x, factor):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] *= factor


@njit(parallel=True, nogil=True, error_model="numpy")
def _scale(x, factor, threads):  # type: ignore[no-untyped-def]
    if threads > 1:
        for n in prange(threads):
            start = x.size * n // threads
            stop = x.size * (n + 1) // threads
            _scale_block(x[start:stop], factor)
    else:
        _scale_block(x, factor)


def scale(x: Array, threads: int, factor: Any = _ONE) -> None:
    """Multiply float32 `x` by a factor in place."""
    _scale(x, factor, threads)


def arrays(bytes_accessed: int, copies: int) -> list[Array]:
    """Return float32 arrays; scaling one reads and writes `bytes_accessed` bytes together."""
    floats = max(1, bytes_accessed // (2 * _FLOAT_BYTES))
    return [allocate(_FLOAT_BYTES * floats).view(np.float32) for _ in range(copies)]
