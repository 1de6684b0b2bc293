import ml_dtypes
import numpy as np
import pytest

DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}


@pytest.fixture
def rng():
    return np.random.default_rng(20240229)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request):
    return request.param
