"""Layers that `attention_layer` refuses with a recipe, by that recipe, against transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from attention_modules import attention_module  # noqa: E402
from peers.numpy_layers import PAGE_SIZE, PAGES  # noqa: E402
from small_models import small_model  # noqa: E402

import rope_cpu  # noqa: E402
from rope_cpu.models import reader  # noqa: E402

pytestmark = pytest.mark.peers

NORMS = {
    "timesfm2_5": ("q_norm", "k_norm"),
    "hunyuan_v1_dense": ("query_layernorm", "key_layernorm"),
}

# Inputs of a model of time series, in patches of 32 values.
SERIES = {
    "timesfm2_5": {
        "past_values": torch.sin(torch.arange(12.0 * 32))[None],
        "past_values_padding": torch.zeros(1, 12 * 32),
    }
}


def projected(x: np.ndarray, tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return x times a projection, with its bias if it has one."""
    return x @ tensors[f"{name}_proj.weight"].T + tensors.get(f"{name}_proj.bias", np.float32(0))


@pytest.mark.parametrize("model_type", NORMS)
def test_norms_after_the_rotation(model_type: str) -> None:
    """docs/serving.md, "Norms of queries and keys"; a tolerance as in test_attention_sweep.py."""
    small = small_model(model_type)
    config = small.config(model_type)
    with pytest.raises(ValueError, match=r"Norms of queries and keys. of docs/serving\.md"):
        rope_cpu.attention_layer(config, 1)
    state = small.state(model_type)
    if model_type in SERIES:
        small.inputs.clear()
        small.inputs.update(SERIES[model_type])
    module = attention_module(small.model, small.calls(), model_type, 1, state)
    start = next(name for name in state if name.endswith("layers.1.self_attn.q_proj.weight"))
    start = start.removesuffix("q_proj.weight")
    tensors = {name.removeprefix(start): np.float32(state[name]) for name in state if start in name}
    facts = reader.read(config).attention
    rope = rope_cpu.RotaryEmbedding.from_config(config, layer=1, angle_dtype="float32")
    _, kv_heads = reader.read(config).heads()
    x = np.float32(module.hidden[0])
    q, k, v = (projected(x, tensors, name).reshape(len(x), -1, rope.head_dim) for name in "qkv")
    cache = rope_cpu.KVCache.zeros(PAGES, PAGE_SIZE, kv_heads, rope.head_dim, dtype=np.float32)
    batch = rope_cpu.Batch(
        seq_lens=[len(x)],
        query_lens=[len(x)],
        page_table=np.arange(PAGES)[None],
        page_size=PAGE_SIZE,
    )
    plan = rope.at_length(len(x)).plan(batch.cache_position, layout="thd")
    unit = rope_cpu.RMSNorm(None, facts.norm_epsilon)
    q_rot = plan.append(q, k, v, cache, batch, q_norm=unit, k_norm=unit)
    for name in NORMS[model_type]:
        q_rot *= tensors[f"{name}.weight"]
    if facts.query_weights is not None:
        q_rot *= np.logaddexp(0, tensors["scaling"]) * 1.442695041 / rope.head_dim**0.5
    y = rope_cpu.attention(q_rot, cache, batch, scale=facts.scale)
    result = projected(y.reshape(len(x), -1), tensors, "o")
    assert np.abs(result - module.result[0]).max() <= 4 * module.own_error
