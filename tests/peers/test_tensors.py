"""The conversions that errors name for tensors, carried out on tensors of PyTorch."""

import ml_dtypes
import numpy as np
import pytest

import rope_cpu
from rope_cpu import RotaryEmbedding

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.peers


DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])


@DTYPES
def test_weights_of_a_state_dict_keep_their_dtype(dtype):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    layer = rope_cpu.attention_layer({"model_type": "llama", **sizes}, 0)
    x = torch.linspace(-3, 3, 256).reshape(16, 16).to(getattr(torch, dtype))
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    weights = layer.weights(dict.fromkeys(names, x.T))
    for array in (weights.q, weights.k, weights.v, weights.o):
        assert array.dtype == dtype
        assert np.array_equal(array.astype(np.float64), x.T.double().numpy())


@DTYPES
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
