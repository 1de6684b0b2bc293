"""export_attention as the attention of DeepSeek-V3, against the layer of transformers."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention_runs import SEPARATE  # noqa: E402

from rope_cpu import RotaryEmbedding, export  # noqa: E402
from rope_cpu.export.validation import session as runtime  # noqa: E402

pytestmark = pytest.mark.peers

TOKENS = 23
HEADS, NOPE, ROTATED, VALUE, RANK = 4, 32, 16, 32, 48
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROTATED,
    "v_head_dim": VALUE,
    "kv_lora_rank": RANK,
    "q_lora_rank": 40,
    "max_position_embeddings": 640,
    "attn_implementation": "sdpa",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


@pytest.fixture(scope="module")
def peer():
    """Return the layer, its rotation, hidden states and result in float64, and its own error."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

    torch.manual_seed(3)
    config = transformers.DeepseekV3Config(**SIZES)
    layer = modeling.DeepseekV3Attention(config, 0).double().eval()
    rope = RotaryEmbedding.from_config(config.to_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * (parameter.shape[-1] ** -0.5))
        hidden = torch.randn(2, TOKENS, SIZES["hidden_size"], dtype=torch.float64)
        cos, sin = (
            torch.from_numpy(np.concatenate([t, t], axis=-1))[None]
            for t in rope.cos_sin(np.arange(TOKENS), np.float64)
        )
        mask = torch.full((TOKENS, TOKENS), -torch.inf).double().triu(1)[None, None]
        want = layer(hidden, position_embeddings=(cos, sin), attention_mask=mask)[0].numpy()
    return layer, rope, hidden.numpy(), want


def projections(layer, hidden):
    """Return queries and keys (batch, tokens, heads, width), in parts, and the latent vectors."""
    with torch.no_grad():
        x = torch.from_numpy(hidden)
        q = layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))
        q = q.reshape(2, TOKENS, HEADS, NOPE + ROTATED).numpy()
        compressed = layer.kv_a_proj_with_mqa(x)
        latent = layer.kv_a_layernorm(compressed[..., :RANK]).numpy()
        k_rotated = compressed[..., RANK:].numpy()[:, :, None]
    weights = layer.kv_b_proj.weight.detach().numpy().reshape(HEADS, NOPE + VALUE, RANK)
    return q[..., NOPE:], q[..., :NOPE], k_rotated, latent, weights[:, :NOPE], weights[:, NOPE:]


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.parametrize("target", SEPARATE)
def test_deepseek_v3(peer, target, form):
    layer, rope, hidden, want = peer
    q_rotated, q_nope, k_rotated, latent, to_keys, to_values = projections(layer, hidden)
    if form == "expanded":
        keys = np.einsum("hnr,btr->bthn", to_keys, latent)
        v = np.einsum("hvr,btr->bthv", to_values, latent)
        q = np.concatenate([q_rotated, q_nope], axis=-1)
        k_rotated = np.broadcast_to(k_rotated, (2, TOKENS, HEADS, ROTATED))
        k = np.concatenate([k_rotated, keys], axis=-1)
    else:
        q = np.concatenate([q_rotated, np.einsum("bshn,hnr->bshr", q_nope, to_keys)], axis=-1)
        v = latent[:, :, None]
        k = np.concatenate([k_rotated, v], axis=-1)
    first = RotaryEmbedding.from_inv_freq(
        rope.inv_freq,
        head_dim=k.shape[-1],
        attention_factor=rope.attention_factor,
        interleaved=True,
    )
    model = export.export_attention(
        first,
        num_heads=HEADS,
        num_kv_heads=k.shape[2],
        v_head_dim=v.shape[-1],
        scale=layer.scaling,
        layout="bshd",
        past=False,
        target=target,
    )
    feeds = {name: x.astype(np.float32) for name, x in zip("qkv", (q, k, v), strict=True)}
    (result,) = runtime.open_session(model).run(None, feeds)
    if form == "absorbed":
        result = np.einsum("hvr,bshr->bshv", to_values, result)
    output = layer.o_proj.weight.detach().numpy()
    off = np.abs(result.reshape(2, TOKENS, HEADS * VALUE) @ output.T - want).max()
    print(f"{target}, {form}: {off:.1e} on values up to {np.abs(want).max():.2f}")
    # Queries, keys, scores, weights and sums round a few times each; a wrong scale is off by 1e-2.
    assert off <= 8 * 2.0**-24 * np.abs(want).max()
