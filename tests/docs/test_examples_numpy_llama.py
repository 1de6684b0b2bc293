"""The NumPy Llama without torch: reading safetensors, and decoding against one pass."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import write_safetensors

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from numpy_llama import Cache, Transformer, generate, read_safetensors

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    shapes = {"model.embed_tokens.weight": (50, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (32,),
            f"{name}.post_attention_layernorm.weight": (32,),
            f"{name}.self_attn.q_proj.weight": (64, 32),
            f"{name}.self_attn.k_proj.weight": (32, 32),
            f"{name}.self_attn.k_proj.bias": (32,),
            f"{name}.self_attn.v_proj.weight": (32, 32),
            f"{name}.self_attn.o_proj.weight": (32, 64),
            f"{name}.self_attn.q_norm.weight": (16,),
            f"{name}.self_attn.k_norm.weight": (16,),
            f"{name}.mlp.gate_proj.weight": (48, 32),
            f"{name}.mlp.up_proj.weight": (48, 32),
            f"{name}.mlp.down_proj.weight": (32, 48),
        }
    weights = {name: 0.3 * rng.standard_normal(shape) for name, shape in shapes.items()}
    tensors = {name: weight.astype(np.float32) for name, weight in weights.items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_decoding_equals_one_pass(folder: Path, rng: np.random.Generator) -> None:
    model = Transformer(folder)
    tokens = rng.integers(0, 50, (2, 20))
    whole = model(tokens, Cache())
    cache = Cache()
    steps = [
        model(tokens[:, :7], cache),
        *(model(tokens[:, i : i + 1], cache) for i in range(7, 20)),
    ]
    # Sums of 32 to 64 float32 products in another order, through two layers, on logits of order 1.
    np.testing.assert_allclose(np.concatenate(steps, axis=1), whole, rtol=0, atol=1e-4)
    shifted = model(np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1), Cache())
    assert np.abs(shifted[:, :1] - whole[:, :1]).max() > 1e-2


def test_generate(folder: Path) -> None:
    model = Transformer(folder)
    found = generate(model, [1, 2, 3], 5)
    again = [1, 2, 3]
    for token in found:
        assert int(model(np.array([again]), Cache())[0, -1].argmax()) == token
        again.append(token)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_read_safetensors(tmp_path: Path, dtype: Any) -> None:
    tensors = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": np.array([0.5], dtype)}
    write_safetensors(tmp_path / "x.safetensors", tensors)
    found = read_safetensors(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name], tensor.astype(np.float32))
