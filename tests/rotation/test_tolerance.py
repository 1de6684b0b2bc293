"""The tolerance of `verify` and `validate` against the one of the test oracle."""

import numpy as np
import oracle
import pytest

from rope_cpu.accuracy import tolerance


@pytest.fixture
def exact(rng, dtype):
    """Values of every size that a dtype knows, subnormal ones and zero included."""
    least, most = {"float64": (-1074, 1000), "float16": (-24, 15)}.get(dtype.name, (-149, 120))
    sizes = np.ldexp(1.0, np.arange(least, most))
    return np.concatenate([[0.0], sizes, -sizes * rng.uniform(1, 2, sizes.size)])


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_rotations_are_judged_by_the_tests_own_bound(exact, dtype, factor, rng):
    x_a, x_b = rng.standard_normal((2, exact.size))
    expected = oracle.bound(exact, np.abs(x_a) + np.abs(x_b), dtype, factor)
    np.testing.assert_allclose(
        tolerance.rotation_bound(exact, x_a, x_b, factor, dtype), expected, rtol=1e-12
    )


@pytest.mark.parametrize("factor", [1.0, 1.4])
def test_tables_are_judged_by_half_a_unit_and_the_error_of_an_angle(exact, dtype, factor):
    slack = 2.0**-51 if dtype == np.float64 else 1e-9
    expected = oracle.bound(exact, 0, dtype) + slack * factor
    np.testing.assert_allclose(tolerance.table_bound(exact, factor, dtype), expected, rtol=1e-12)


def test_beyond_rounding_gives_the_verdict_of_the_bound(exact, dtype, rng):
    """Also for errors next to their bound, and in a pair of zeros, where nothing is allowed."""
    x_a, x_b = rng.standard_normal((2, exact.size))
    x_a[:3] = x_b[:3] = 0
    bound = tolerance.rotation_bound(exact, x_a, x_b, 1.4, dtype)
    rounding = tolerance.half_ulp(exact, dtype)
    errors = [
        np.zeros_like(bound),
        rounding,
        bound,
        np.nextafter(bound, 0),
        np.nextafter(bound, np.inf),
        2 * bound,
        np.full_like(bound, np.inf),
    ]
    for error in errors:
        for i in range(error.size):
            element = slice(i, i + 1)
            beyond = tolerance.beyond_rounding(error[element], bound[element], rounding[element])
            assert (beyond <= 1) == (error[i] <= bound[i])


def test_an_element_that_is_copied_has_no_rounding():
    zero = np.zeros(1)
    rounding = np.array([2.0**-24])
    assert tolerance.beyond_rounding(zero, zero, rounding) == 0
    assert tolerance.beyond_rounding(rounding, zero, rounding) == np.inf


def test_rounding_alone_is_nothing_beyond_rounding(dtype):
    exact = np.linspace(1, 2, 1000)
    rounding = tolerance.half_ulp(exact, dtype)
    bound = tolerance.rotation_bound(exact, exact, exact, 1.0, dtype)
    assert tolerance.beyond_rounding(np.abs(exact.astype(dtype) - exact), bound, rounding) == 0
    beyond = tolerance.beyond_rounding((rounding + bound) / 2, bound, rounding)
    assert beyond == pytest.approx(0.5)


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 3.9999, 2.0**-10])
def test_half_a_unit_is_half_the_distance_to_the_next_number(value, dtype):
    value = float(np.asarray(value, dtype))
    following = float(np.nextafter(dtype.type(value), dtype.type(np.inf)))
    assert tolerance.half_ulp(value, dtype) == (following - value) / 2
