"""append and attention against transformers' eager attention: a prompt, a chunk, decode."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from peers.attention_layers import (  # noqa: E402
    DEFAULT,
    HEAD_DIM,
    KV_HEADS,
    SMALL,
    expected,
    make_layer,
    tables,
)

import rope_cpu  # noqa: E402

pytestmark = pytest.mark.peers

STEPS = (300, 37, 1, 1, 1)  # a prompt, a chunk, decode steps
TOKENS = sum(STEPS)
GEMMA3 = {"rope_parameters": {"sliding_attention": DEFAULT["rope_parameters"]}}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
SLIDING = {"sliding_window": 100, "layer_types": ["sliding_attention"]}

SOFTCAP = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 48}
SCALED = {"scale": 48**-0.5, "window": 100}

# Module and prefix of the classes, keys of the config, options of attention, offset of the norms.
PEERS = {
    "llama": ("llama", "Llama", DEFAULT, {}, None),
    "qwen3": ("qwen3", "Qwen3", DEFAULT, {}, 0.0),
    "gemma2": ("gemma2", "Gemma2", DEFAULT | SLIDING | SOFTCAP, SCALED | {"softcap": 5.0}, None),
    "gemma3": ("gemma3", "Gemma3", GEMMA3 | SLIDING | {"query_pre_attn_scalar": 48}, SCALED, 1.0),
    "gpt-oss": (
        *("gpt_oss", "GptOss", SLIDING | {"rope_parameters": YARN, "attention_bias": True}),
        *({"window": 100}, None),
    ),
}


def norms(layer, offset):
    """Return the norms of queries and keys as arguments of append."""
    if offset is None:
        return {}
    found = {}
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        found[name] = rope_cpu.RMSNorm(norm.weight.detach().numpy(), eps, offset=offset)
    return found


def ours(layer, rope, hidden, dtype, options, offset):
    """Return the outputs of the same layer, step by step through a paged cache."""
    shape = (2, 30, 16, KV_HEADS, HEAD_DIM)
    cache = rope_cpu.KVCache(*np.full(shape, np.nan, dtype))
    table = np.random.default_rng(3).permutation(30)[None, : -(-TOKENS // 16)]
    if hasattr(layer, "sinks"):
        options = options | {"sinks": layer.sinks.detach().numpy()}
    results = []
    for stop, new in zip(np.cumsum(STEPS), STEPS, strict=True):
        batch = rope_cpu.Batch(seq_lens=[stop], query_lens=[new], page_table=table, page_size=16)
        plan = rope.plan(batch.cache_position, layout="thd")
        x = hidden[0, stop - new : stop]
        projected = (getattr(layer, f"{name}_proj")(x).float().detach() for name in "qkv")
        q, k, v = (rows.numpy().reshape(new, -1, HEAD_DIM) for rows in projected)
        q_rot = plan.append(q, k, v, cache, batch, **norms(layer, offset))
        results.append(rope_cpu.attention(q_rot, cache, batch, **options))
    y = torch.from_numpy(np.concatenate(results)).double().reshape(TOKENS, -1)
    return layer.o_proj(y).detach().numpy()


@pytest.mark.parametrize("name", PEERS)
def test_steps_give_the_outputs_of_eager_attention(name):
    module, prefix, keys, options, offset = PEERS[name]
    layer, config = make_layer(module, prefix, keys, "TextConfig" if name == "gemma3" else "Config")
    layer_type = "sliding_attention" if name == "gemma3" else None
    rope = rope_cpu.RotaryEmbedding.from_config(config.to_dict(), layer_type=layer_type)
    hidden = torch.randn(1, TOKENS, SMALL["hidden_size"], dtype=torch.float64)
    cos_sin = tables(rope, TOKENS, halves=name != "gpt-oss")
    want, own = expected(layer, cos_sin, hidden, options.get("window"))
    off = np.abs(ours(layer, rope, hidden, np.float32, options, offset) - want[0]).max()
    print(f"{name}: {off:.2e}, the peer in float32 {own:.2e}, values to {np.abs(want).max():.1f}")
    # Other orders of summation may be off by a few times as much.
    assert off <= 4 * own
