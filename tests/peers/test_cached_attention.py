"""append and attention against transformers' eager attention: a prompt, a chunk, decode."""

import copy
from importlib import import_module

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import rope_cpu  # noqa: E402

pytestmark = pytest.mark.peers

STEPS = (300, 37, 1, 1, 1)  # a prompt, a chunk, decode steps
TOKENS = sum(STEPS)
HEADS = 6
KV_HEADS = 2
HEAD_DIM = 32
SMALL = {
    "hidden_size": 192,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
    "vocab_size": 16,
    "attn_implementation": "eager",
}
DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
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

# Module and prefix of the classes, keys of the config, options of attention, offset of the norms.
PEERS = {
    "llama": ("llama", "Llama", DEFAULT, {}, None),
    "qwen3": ("qwen3", "Qwen3", DEFAULT, {}, 0.0),
    "gemma2": (
        "gemma2",
        "Gemma2",
        DEFAULT | SLIDING | {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 48},
        {"softcap": 5.0, "scale": 48**-0.5, "window": 100},
        None,
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        GEMMA3 | SLIDING | {"query_pre_attn_scalar": 48},
        {"scale": 48**-0.5, "window": 100},
        1.0,
    ),
    "gpt-oss": (
        "gpt_oss",
        "GptOss",
        SLIDING | {"rope_parameters": YARN, "attention_bias": True},
        {"window": 100},
        None,
    ),
}


def make_layer(name):
    """Return a model's attention layer in float64, with random weights, and its config."""
    module, prefix, changes, _, _ = PEERS[name]
    modeling = import_module(f"transformers.models.{module}.modeling_{module}")
    config_name = "Gemma3TextConfig" if name == "gemma3" else f"{prefix}Config"
    config = getattr(transformers, config_name)(**(SMALL | changes))
    torch.manual_seed(5)
    layer = getattr(modeling, f"{prefix}Attention")(config, 0).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            size = 0.08 if parameter.ndim > 1 else 0.5
            parameter.copy_(torch.randn_like(parameter) * size)
    return layer, config


def expected(layer, cos_sin, hidden, window):
    """Return the outputs of the layer in float64, and the error of its own in float32."""
    key = torch.arange(TOKENS)
    query = key[:, None]
    seen = (key <= query) & (key > query - (window or TOKENS))
    mask = torch.where(seen, 0.0, -torch.inf).double()[None, None]
    with torch.no_grad():
        want = layer(hidden, position_embeddings=cos_sin, attention_mask=mask)[0]
        in_float32 = copy.deepcopy(layer).float()(
            hidden.float(),
            position_embeddings=tuple(x.float() for x in cos_sin),
            attention_mask=mask.float(),
        )[0]
    return want[0].numpy(), float((in_float32 - want).abs().max())


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
        q, k, v = (
            getattr(layer, f"{name}_proj")(x)
            .detach()
            .numpy()
            .astype(np.float32)
            .reshape(new, -1, HEAD_DIM)
            for name in "qkv"
        )
        q_rot = plan.append(q, k, v, cache, batch, **norms(layer, offset))
        results.append(rope_cpu.attention(q_rot, cache, batch, **options))
    y = torch.from_numpy(np.concatenate(results)).double().reshape(TOKENS, -1)
    return layer.o_proj(y).detach().numpy()


@pytest.mark.parametrize("name", PEERS)
def test_steps_give_the_outputs_of_eager_attention(name):
    _, _, _, options, offset = PEERS[name]
    layer, config = make_layer(name)
    layer_type = "sliding_attention" if name == "gemma3" else None
    rope = rope_cpu.RotaryEmbedding.from_config(config.to_dict(), layer_type=layer_type)
    hidden = torch.randn(1, TOKENS, SMALL["hidden_size"], dtype=torch.float64)
    tables = rope.cos_sin(np.arange(TOKENS), np.float64)
    if name != "gpt-oss":  # whose layers take cos and sin of each pair once
        tables = [np.concatenate([table, table], axis=-1) for table in tables]
    cos_sin = tuple(torch.from_numpy(table)[None] for table in tables)
    want, own = expected(layer, cos_sin, hidden, options.get("window"))
    off = np.abs(ours(layer, rope, hidden, np.float32, options, offset) - want).max()
    print(f"{name}: {off:.2e}, the peer in float32 {own:.2e}, values to {np.abs(want).max():.1f}")
    # Other orders of summation may be off by a few times as much.
    assert off <= 4 * own
