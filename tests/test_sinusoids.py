"""Sinusoidal tables against their formula, and the two properties the documents derive."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from rope_cpu.sinusoids import add_sinusoidal, sinusoidal


def formula(position, column, dim, base, interleaved):
    sines = (dim + 1) // 2
    if interleaved:
        i, function = column // 2, (mpmath.sin, mpmath.cos)[column % 2]
    else:
        i, function = column % sines, (mpmath.sin, mpmath.cos)[column // sines]
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
    np.testing.assert_allclose(table.astype(float), exact, rtol=0, atol=np.finfo(dtype).eps / 2 + 40 * 2**-51)


def test_far_rows():
    row = sinusoidal(100_001, 4)[100_000]
    exact = [float(formula(100_000, c, 4, 10000.0, True)) for c in range(4)]
    np.testing.assert_allclose(row, exact, rtol=0, atol=2**-24)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_shift_is_linear(interleaved):
    """PE(t + g) is a rotation of PE(t) that depends on g alone."""
    dim, gap = 32, 9
    table = sinusoidal(60, dim, interleaved=interleaved, dtype=np.float64)
    sin = (slice(0, None, 2) if interleaved else slice(dim // 2), slice(1, None, 2) if interleaved else slice(16, None))
    frequency = np.array([10000 ** (-2 * i / dim) for i in range(dim // 2)])
    u, v = np.cos(gap * frequency), np.sin(gap * frequency)
    np.testing.assert_allclose(table[gap:, sin[0]], table[:-gap, sin[0]] * u + table[:-gap, sin[1]] * v, atol=1e-14)
    np.testing.assert_allclose(table[gap:, sin[1]], table[:-gap, sin[1]] * u - table[:-gap, sin[0]] * v, atol=1e-14)


@pytest.mark.parametrize("interleaved", [True, False])
def test_products_depend_on_the_difference_and_are_symmetric(interleaved):
    table = sinusoidal(80, 64, interleaved=interleaved, dtype=np.float64)
    products = table @ table.T
    for gap in (0, 1, 7, 33):
        expected = sum(math.cos(gap * 10000 ** (-2 * i / 64)) for i in range(32))
        np.testing.assert_allclose(np.diagonal(products, gap), expected, atol=1e-13)
        np.testing.assert_allclose(np.diagonal(products, -gap), expected, atol=1e-13)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((-1, 4, {}), ValueError, "`num_positions` is -1"),
        ((4, 0, {}), ValueError, "`dim` is 0"),
        ((4, 4.0, {}), TypeError, "`dim` is 4.0"),
        ((4, 4, {"base": 0.0}), ValueError, "`base` is 0.0"),
    ],
)
def test_refusals(arguments, error, message):
    positions, dim, options = arguments
    with pytest.raises(error, match=message):
        sinusoidal(positions, dim, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(3, 5, 8), (5, 7), (2, 300, 129), (1, 0, 4)])
def test_add_in_place(dtype, shape):
    table = sinusoidal(400, shape[-1], dtype=dtype)
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    expected = x + table[7 : 7 + shape[-2]]
    assert add_sinusoidal(x, table, offset=7) is x
    assert np.array_equal(x, expected)


def test_add_by_ids_into_strided_embeddings():
    random = np.random.default_rng(1)
    table = sinusoidal(50, 6, interleaved=False)
    ids = random.integers(0, 50, size=(3, 4))
    whole = random.normal(size=(4, 3, 18)).astype(np.float32)
    before = whole.copy()
    x = whole.transpose(1, 0, 2)[:, :, 1:13:2]
    add_sinusoidal(x, table, ids)
    expected = before.copy()
    for batch in range(3):
        for token in range(4):
            expected[token, batch, 1:13:2] += table[ids[batch, token]]
    assert np.array_equal(whole, expected)


def test_add_to_embeddings_between_the_rows_of_the_table():
    """They share a buffer and no element."""
    buffer = np.zeros((8, 2, 4), np.float32)
    buffer[:, 0] = table = sinusoidal(8, 4)
    add_sinusoidal(buffer[:5, 1], buffer[:, 0], offset=3)
    assert np.array_equal(buffer[:5, 1], table[3:])
    assert np.array_equal(buffer[:, 0], table)


def embeddings(dtype=np.float32):
    return np.zeros((2, 3, 4), dtype)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, t: add_sinusoidal(x.astype(np.float16), t), TypeError, "`x` is float16"),
        (lambda x, t: add_sinusoidal(x, t.tolist()), TypeError, "`table` is list"),
        (lambda x, t: add_sinusoidal(x, t.astype(float)), ValueError, "of one dtype"),
        (lambda x, t: add_sinusoidal(x[..., :3], t), ValueError, "`x` is float32"),
        (lambda x, t: add_sinusoidal(x, t, [0, 1]), ValueError, "has shape"),
        (lambda x, t: add_sinusoidal(x, t, [0, 1, 8]), ValueError, "from 0 to 8"),
        (lambda x, t: add_sinusoidal(x, t, [0, 1, -1]), ValueError, "from -1"),
        (lambda x, t: add_sinusoidal(x, t, offset=6), ValueError, "`offset` is 6: positions run to 8"),
        (lambda x, t: add_sinusoidal(x, t, [0.0, 1, 2]), TypeError, "must hold integers"),
        (lambda x, t: add_sinusoidal(x, t, [0, 1, 2], offset=1), ValueError, "give one of them"),
        (lambda x, t: add_sinusoidal(t[:4], t), ValueError, "`x` shares memory with `table`"),
        (lambda x, t: add_sinusoidal(np.broadcast_to(x[0], x.shape), t), ValueError, "`x` is read-only"),
        (lambda x, t: add_sinusoidal(as_strided(x, strides=(0, 16, 4)), t), ValueError, "each axis must step over"),
        (lambda x, t: add_sinusoidal(np.ma.array(x, mask=x == 0), t), TypeError, "`x` is a masked array"),
        (lambda x, t: add_sinusoidal(x, np.ma.array(t)), TypeError, "`table` is a masked array"),
    ],
)
def test_add_refuses_before_writing(call, error, message):
    x, table = embeddings(), sinusoidal(8, 4)
    with pytest.raises(error, match=message):
        call(x, table)
    assert not x.any()


def test_no_tokens_take_no_ids():
    x = np.zeros((2, 0, 4), np.float32)
    assert add_sinusoidal(x, sinusoidal(8, 4), []) is x
