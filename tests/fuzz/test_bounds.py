"""The kernels that index arrays, under Numba's bounds checks: every kind of shape once.

Bounds checks see indices, the only access in `kernels/angles.py`. They do not see the vector loads
and stores of `kernels/rotate.py`, which use pointers; `test_guarded.py` tests those.
"""

from __future__ import annotations

import pytest
from fuzz.test_guarded import environment

EVERY_SHAPE = """
from itertools import product
import numpy as np
from rope_cpu.kernels.angles import cos_sin_kernel

SIZES = [*product((1, 2, 3), (0, 1, 5), (1, 2, 3), (1, 2), (1, 3, 4, 8, 33)), (2, 301, 2, 2, 33)]
for name in ("float32", "float64"):
    kernel = cos_sin_kernel(name)
    for batch, tokens, axes, heads, pairs in SIZES:
        for given, coordinates, rows in product({1, batch}, {1, axes}, {1, batch}):
            positions = np.zeros((given, tokens, coordinates))
            frequencies, factors = np.ones((rows, 2, axes, heads, pairs)), np.ones((rows, 2))
            cos, sin = np.full((2, batch, tokens, heads, pairs), np.nan, name)
            kernel(positions, frequencies, factors, cos, sin, 2)
            assert (cos == 1).all() and (sin == 0).all()
"""
WRONG_SHAPE = """
import numpy as np
from rope_cpu.kernels.angles import cos_sin_kernel

def tables(pairs):
    return np.zeros((1, {tokens}, 1, pairs))

positions = np.zeros((1, {tokens}, 1))
frequencies = np.ones((1, 2, 1, 1, 64))
factors = np.ones((1, 2))
cos_sin_kernel("float64")(positions, frequencies, factors, tables(64), tables(63), 2)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The variables of a process whose kernels check bounds, compiled for this module alone."""
    folder = tmp_path_factory.mktemp("kernels")
    return environment() | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder)}


def test_kernels_stay_within_their_arrays(run_program, checked):
    run_program(EVERY_SHAPE, env=checked)


@pytest.mark.parametrize("tokens", [5, 512], ids=["serially", "in parallel"])
def test_bounds_are_checked(run_program, checked, tokens):
    """A table that is too small is noticed: so the test above can fail."""
    _, err = run_program(WRONG_SHAPE.format(tokens=tokens), env=checked, exits=1)
    assert "IndexError" in err
