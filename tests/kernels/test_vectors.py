"""Conversions of vectors that processors without instructions for them compute."""

import numpy as np
import pytest
from numba import njit

from rope_cpu.kernels import vectors
from rope_cpu.kernels.vectors import load, pointer, store


@pytest.fixture
def copied(monkeypatch):
    """Return the function that copies an array, 16 elements at a time, without instructions."""
    monkeypatch.setattr(vectors, "_converts_float16", lambda: False)

    @njit
    def copy(x, out):
        for i in range(0, x.size, 16):
            store(pointer(out), i, load(pointer(x), i, 16), False)

    return copy


def test_every_float16_as_float32(copied):
    bits = np.arange(2**16).astype(np.uint16)
    halves = bits.view(np.float16)
    result = np.empty(bits.size, np.float32)
    copied(bits.view(np.int16), result)
    assert np.array_equal(result, halves.astype(np.float32), equal_nan=True)
    assert np.array_equal(np.signbit(result), np.signbit(halves))


def test_float32_as_float16(copied, rng):
    """Random bits, and every float16, the middle between it and the next, and their neighbours."""
    halves = np.arange(2**16).astype(np.uint16).view(np.float16).astype(np.float32)
    bits = halves.view(np.uint32)[:, None] + np.array([0, 1, 4095, 4096, 4097], np.uint32)
    tiny = rng.uniform(-(2.0**-13), 2.0**-13, 2**16).astype(np.float32)
    drawn = rng.integers(0, 2**32, 2**16, dtype=np.uint32)
    x = np.concatenate([bits.ravel(), drawn, tiny.view(np.uint32)]).view(np.float32)
    result = np.empty(x.size, np.int16)
    copied(x, result)
    with np.errstate(all="ignore"):
        expected = x.astype(np.float16)
    assert np.array_equal(result.view(np.float16), expected, equal_nan=True)
    assert np.array_equal(np.signbit(result.view(np.float16)), np.signbit(expected))
