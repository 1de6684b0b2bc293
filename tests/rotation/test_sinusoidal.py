"""Sinusoidal tables against their formula, and the two properties the documents derive."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from refusals import assert_refused

from rope_cpu import sinusoidal


def formula(position, column, dim, base, interleaved):
    sines = (dim + 1) // 2
    if interleaved:
        i = column // 2
        function = (mpmath.sin, mpmath.cos)[column % 2]
    else:
        i = column % sines
        function = (mpmath.sin, mpmath.cos)[column // sines]
    with mpmath.workprec(120):
        return function(position / mpmath.power(base, mpmath.mpf(2 * i) / dim))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [1, 2, 7, 64])
@pytest.mark.parametrize("base", [10000.0, 500.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_table_is_the_formula(interleaved, dim, base, dtype):
    table = sinusoidal(40, dim, base=base, interleaved=interleaved, dtype=dtype)
    assert (table.shape, table.dtype) == ((40, dim), dtype)
    exact = [[float(formula(p, c, dim, base, interleaved)) for c in range(dim)] for p in range(40)]
    # One rounding to dtype of a value near 1, and float64 angles up to 40 with a few roundings.
    np.testing.assert_allclose(
        table.astype(float), exact, rtol=0, atol=np.finfo(dtype).eps / 2 + 40 * 2**-51
    )


def test_far_rows():
    row = sinusoidal(100_001, 4)[100_000]
    exact = [float(formula(100_000, c, 4, 10000.0, True)) for c in range(4)]
    np.testing.assert_allclose(row, exact, rtol=0, atol=2**-24)


def test_tables_of_bfloat16_are_rounded_once():
    table = sinusoidal(3000, 16, dtype="bfloat16")
    exact = sinusoidal(3000, 16, dtype=np.float64)
    # Half a unit in the last of 8 bits, of values up to 1: rounding to float32 first exceeds it.
    half = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-100))) - 8)
    assert (np.abs(table.astype(np.float64) - exact) <= half).all()


REFUSED = [
    (lambda: sinusoidal(-1, 4), ValueError, "num_positions"),
    (lambda: sinusoidal(4, 0), ValueError, "dim"),
    (lambda: sinusoidal(4, 4.0), TypeError, "dim"),
    (lambda: sinusoidal(4, 4, base=0.0), ValueError, "base"),
    (lambda: sinusoidal(3, 4, dtype=int), TypeError, "dtype"),
    (lambda: sinusoidal(3, 4, dtype=None), TypeError, "dtype"),
    (lambda: sinusoidal(3, 4, interleaved="no"), TypeError, "interleaved"),
    (lambda: sinusoidal(3, 4, base="2"), TypeError, "base"),
    (lambda: sinusoidal(3, 8, base=1e-300), ValueError, "base"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
