"""The conversions that errors name for tensors, carried out on tensors of PyTorch."""

import ml_dtypes
import numpy as np
import pytest

from rope_cpu import RotaryEmbedding

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.peers


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_conversion_of_the_error_works(dtype):
    x = torch.ones(1, 3, 2, 8, dtype=getattr(torch, dtype))
    rope = RotaryEmbedding(8)
    with pytest.raises(TypeError, match="is a Tensor") as caught:
        rope.rotate(x)
    conversion = str(caught.value).partition("; pass ")[2]
    converted = eval(conversion, {"np": np, "torch": torch, "ml_dtypes": ml_dtypes, "x": x})
    assert rope.rotate(converted).dtype == dtype
    rope.rotate(converted, out=converted)
    assert converted.ctypes.data == x.data_ptr()  # no copy: the tensor is rotated
