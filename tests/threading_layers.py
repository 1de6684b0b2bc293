"""Numba's threading layers, as parameters of tests."""

from importlib import metadata

import pytest
from fewer_cases import sample

HAS_TBB = pytest.mark.skipif(
    not any(package.name == "tbb" for package in metadata.distributions()),
    reason="there is no wheel of tbb here",
)
LAYERS = [
    pytest.param("tbb", marks=HAS_TBB),
    *sample(("omp",)),
    *sample(("workqueue",), others="nightly"),  # where neither of the others is found
]
