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


@pytest.mark.parametrize("value", [1.0, 1.5, 2.0, 3.9999, 2.0**-10])
def test_half_a_unit_is_half_the_distance_to_the_next_number(value, dtype):
    value = float(np.asarray(value, dtype))
    following = float(np.nextafter(dtype.type(value), dtype.type(np.inf)))
    assert tolerance.half_ulp(value, dtype) == (following - value) / 2
