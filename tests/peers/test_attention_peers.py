"""export_attention against layers of transformers: weights, a prefill and 64 decode steps."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from peers.attention_layers import (  # noqa: E402
    DEFAULT,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LLAMA3,
    SMALL,
    expected,
    make_layer,
    tables,
)

from rope_cpu import RotaryEmbedding, export  # noqa: E402
from rope_cpu.export.targets import TARGETS  # noqa: E402
from rope_cpu.export.validation import session as runtime  # noqa: E402

pytestmark = pytest.mark.peers

PREFILL, STEPS = 37, 64
QWEN3 = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
GEMMA2 = {
    "attn_logit_softcapping": 5.0,
    "query_pre_attn_scalar": 48,
    "layer_types": ["full_attention"],
    "attn_implementation": "eager",  # sdpa has no softcap
}

# Module and prefix of the classes, keys of the config, options of attention.
PEERS = {
    "llama": ("llama", "Llama", {"rope_parameters": LLAMA3, "attention_bias": True}, {}),
    "qwen3, norms": ("qwen3", "Qwen3", QWEN3, {}),
    "mistral, window": ("mistral", "Mistral", DEFAULT | {"sliding_window": 16}, {"window": 16}),
    "gemma2, softcap": (
        *("gemma2", "Gemma2", DEFAULT | GEMMA2),
        {"softcap": 5.0, "scale": 48**-0.5},
    ),
}


@pytest.fixture(params=PEERS)
def peer(request):
    """Return an attention layer, its inputs and outputs, the same exported, and the layer's error.

    The inputs are those of a prefill and of the steps after it. The error is that of float32.
    """
    module, prefix, keys, options = PEERS[request.param]
    layer, config = make_layer(module, prefix, {"attn_implementation": "sdpa"} | keys)
    hidden = torch.randn(2, PREFILL + STEPS, SMALL["hidden_size"], dtype=torch.float64)
    rope = RotaryEmbedding.from_config(config.to_dict())
    cos_sin = tables(rope, PREFILL + STEPS)
    want, own = expected(layer, cos_sin, hidden, options.get("window"))
    weights = {}
    for name in "qkvo":
        linear = getattr(layer, f"{name}_proj")
        weights[name] = linear.weight.detach().numpy()
        if linear.bias is not None:
            weights[f"{name}_bias"] = linear.bias.detach().numpy()
    options = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "weights": weights} | options
    if hasattr(layer, "q_norm"):
        norms = (layer.q_norm, layer.k_norm)
        options["qk_norm"] = tuple(norm.weight.detach().numpy() for norm in norms)
        options["norm_epsilon"] = layer.q_norm.variance_epsilon
    return rope, options, hidden.numpy(), want, own


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", TARGETS)
def test_prefill_and_64_steps(peer, target, dtype):
    rope, options, hidden, want, own = peer
    if dtype == "float64" and (target != "primitive" or {"softcap", "qk_norm"} & set(options)):
        pytest.skip("refused for want of kernels, or the peer's own norm and softmax are float32")
    model = export.export_attention(rope, target=target, dtype=dtype, max_positions=128, **options)
    session = runtime.open_session(model)
    empty = np.zeros((2, KV_HEADS, 0, HEAD_DIM), dtype)
    cache = {"past_key": empty, "past_value": empty}
    results, done = [], 0
    for count in (PREFILL, *(1,) * STEPS):
        feeds = {"hidden": hidden[:, done : done + count].astype(dtype)} | cache
        done += count
        result, *present = session.run(None, feeds)
        cache = dict(zip(cache, present, strict=True))
        results.append(result)
    off = np.abs(np.concatenate(results, axis=1) - want).max()
    print(
        f"{target} {dtype}: {off:.2e}, the peer in float32 {own:.2e}, "
        f"on values up to {np.abs(want).max():.1f}"
    )
    # Other orders of summation may be off by a few times as much. In float64 both round 2^29 times
    # finer.
    assert off <= 4 * own * (1 if dtype == "float32" else 2 * 2.0**-29)
