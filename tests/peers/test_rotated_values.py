"""Queries and keys against the model's rotary module and apply function, with float32 angles."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.tolerance import half_ulp, rotation_bound

pytestmark = pytest.mark.peers

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

LONG = 131072


@dataclass(frozen=True)
class Case:
    """One model: its folder, the stem of its class names, its config's keys, and its call."""

    folder: str
    stem: str
    keys: dict[str, Any] = field(default_factory=dict)
    layer_type: str | None = None
    apply: str = "apply_rotary_pos_emb"
    module: str = "RotaryEmbedding"
    config: str = "Config"
    length: int = LONG


SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": LONG,
}
EXTENSIONS = {
    "short_factor": [1 + 0.01 * i for i in range(32)],
    "long_factor": [1 + 0.5 * i for i in range(32)],
}


def llama(rope_type: str, length: int = LONG, original: int | None = None, **keys: Any) -> Case:
    """Return Llama with a rope type; original: its original_max_position_embeddings."""
    section = {"rope_type": rope_type, "rope_theta": 123456.0, **keys}
    if original is not None:
        section["original_max_position_embeddings"] = original
    parameters = {"max_position_embeddings": 5000, "rope_parameters": section}
    return Case("llama", "Llama", {**SMALL, **parameters}, length=length)


MLA = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
WIDE = {**SMALL, "head_dim": 64}
PADDED = {"pad_token_id": 0}
GEMMA3 = {**WIDE, "num_hidden_layers": 6}
ESM = {"position_embedding_type": "rotary", "vocab_size": 33, "mask_token_id": 32}
PHI3 = {
    **SMALL,
    **PADDED,
    "original_max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **EXTENSIONS},
}
FULL, SLIDING = "full_attention", "sliding_attention"
CASES = {
    "llama": Case("llama", "Llama", SMALL),
    "llama linear": llama("linear", factor=3.7),
    "llama dynamic short": llama("dynamic", 4000, factor=2.3),
    "llama dynamic long": llama("dynamic", 30000, factor=2.3),
    "llama yarn": llama("yarn", original=700, factor=7.3, beta_fast=20.0, beta_slow=3.0),
    "llama yarn past the last pair": llama("yarn", original=131072, factor=4.0, rope_theta=1e4),
    "llama yarn cut off": llama("yarn", original=10**6, factor=4.0, rope_theta=50.0, beta_fast=1e4),
    "llama yarn from the first pair": llama("yarn", original=64, factor=4.0),
    "llama yarn mscale": llama(
        "yarn", original=900, factor=9.0, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "llama yarn partial": llama(
        "yarn", original=900, factor=9.0, attention_factor=1.3, partial_rotary_factor=1.0
    ),
    "llama llama3": llama(
        "llama3", original=1300, factor=5.5, low_freq_factor=1.3, high_freq_factor=6.1
    ),
    "llama longrope short": llama("longrope", 3000, original=3000, factor=6.0, **EXTENSIONS),
    "llama longrope long": llama("longrope", original=3000, **EXTENSIONS),
    "llama proportional": llama("proportional", partial_rotary_factor=0.37, factor=2.0),
    "qwen3": Case("qwen3", "Qwen3", WIDE),
    "gpt_neox": Case("gpt_neox", "GPTNeoX", SMALL),
    "glm4": Case("glm4", "Glm4", {**WIDE, **PADDED}),
    "cohere2": Case("cohere2", "Cohere2", SMALL),
    "phi3 short": Case("phi3", "Phi3", PHI3, length=4096),
    "phi3 long": Case("phi3", "Phi3", PHI3),
    "deepseek_v3": Case(
        "deepseek_v3", "DeepseekV3", {**SMALL, **MLA}, apply="apply_rotary_pos_emb_interleave"
    ),
    "gemma3 full": Case("gemma3", "Gemma3", GEMMA3, FULL, config="TextConfig"),
    "gemma3 sliding": Case("gemma3", "Gemma3", WIDE, SLIDING, config="TextConfig"),
    "gpt_oss": Case("gpt_oss", "GptOss", WIDE),
    "llama4": Case("llama4", "Llama4Text", WIDE, apply="apply_rotary_emb", config="Config"),
    "modernbert full": Case("modernbert", "ModernBert", SMALL, FULL),
    "modernbert local": Case("modernbert", "ModernBert", SMALL, SLIDING),
    "esm": Case("esm", "Esm", {**SMALL, **ESM}),
}


def theirs(
    case: Case, ids: np.ndarray, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Return the model's own rotation of x (bhsd), its frequencies, and its config as a dict."""
    module = importlib.import_module(f"transformers.models.{case.folder}.modeling_{case.folder}")
    configuration = importlib.import_module(
        f"transformers.models.{case.folder}.configuration_{case.folder}"
    )
    cfg = getattr(configuration, case.stem + case.config)(**case.keys)
    rotary = getattr(module, case.stem + case.module)(cfg)
    layer = {} if case.layer_type is None else {"layer_type": case.layer_type}
    tensor, positions = torch.from_numpy(x), torch.from_numpy(ids)[None]
    tables = rotary(tensor, positions, **layer)
    apply: Callable[..., Any] = getattr(module, case.apply)
    if case.apply == "apply_rotary_emb":  # Llama 4: complex, heads after tokens
        rotated = apply(tensor.transpose(1, 2), tensor.transpose(1, 2), tables)[0].transpose(1, 2)
    else:
        rotated = apply(tensor, tensor, *tables)[0]
    prefix = "" if case.layer_type is None else f"{case.layer_type}_"
    return rotated.numpy(), getattr(rotary, f"{prefix}inv_freq").double().numpy(), cfg.to_dict()


def members(x: np.ndarray, rope: RotaryEmbedding) -> tuple[np.ndarray, np.ndarray]:
    """Return, for every element, both elements of its pair."""
    pairs, width = rope.rotary_dim // 2, rope.rotary_dim
    order = np.arange(width)
    partner = order ^ 1 if rope.interleaved else (order + pairs) % width
    return x[..., :width], x[..., partner]


def agrees(
    result: np.ndarray, theirs: np.ndarray, x: np.ndarray, rope: RotaryEmbedding, drift: Any
) -> None:
    """Assert that two rotations of x differ by roundings and by angles that are off by `drift`."""
    width = rope.rotary_dim
    x_a, x_b = members(x, rope)
    exact = theirs[..., :width].astype(np.float64)
    factor = rope.attention_factor
    bound = 2 * rotation_bound(exact, x_a, x_b, factor, np.float32)
    bound += factor * drift * (np.abs(x_a) + np.abs(x_b))
    assert (np.abs(result[..., :width] - exact) <= bound).all()
    np.testing.assert_array_equal(result[..., width:], x[..., width:])


@pytest.mark.parametrize("name", CASES)
def test_rotated_values(name: str, rng: np.random.Generator) -> None:
    case = CASES[name]
    ids = np.unique(np.r_[0, 1, 2, 3, rng.integers(0, case.length, 60), case.length - 1])
    x = rng.standard_normal((1, 3, len(ids), 64)).astype(np.float32)
    expected, inv_freq, keys = theirs(case, ids, x)
    options = {"layer_type": case.layer_type, "angle_dtype": "float32"}
    rope = RotaryEmbedding.from_config(keys, **options).at_length(case.length)
    result = rope.rotate(x, ids, layout="bhsd")
    if case.apply.endswith("interleave"):  # reads neighbours, writes halves
        expected = np.stack(np.split(expected, 2, axis=-1), axis=-1).reshape(expected.shape)

    angle = ids[:, None] * rope.inv_freq
    apart = np.abs(rope.inv_freq - inv_freq)
    drift = ids[:, None] * apart + np.where(apart > 0, 2 * half_ulp(angle, np.float32), 0.0)
    drift = np.repeat(drift, 2, axis=-1) if rope.interleaved else np.tile(drift, 2)
    agrees(result, expected, x, rope, drift)
    assert np.mean(apart == 0) > 0.9, "more than a few frequencies differ in the last bit"


def rotated_by_table(name: str, x: np.ndarray) -> tuple[np.ndarray, dict[str, Any], int]:
    """Return x (bhsd) rotated by the table of GPT-J or RoFormer at its first positions."""
    import transformers

    seq = x.shape[2]
    if name == "gptj":
        cfg = transformers.GPTJConfig(n_embd=256, n_head=4, rotary_dim=48, n_positions=seq)
        module = importlib.import_module("transformers.models.gptj.modeling_gptj")
        sin, cos = module.create_sinusoidal_positions(seq, 48)[None].chunk(2, dim=-1)
        tokens = torch.from_numpy(x).transpose(1, 2)
        rotated = torch.cat(
            [module.apply_rotary_pos_emb(tokens[..., :48], sin, cos), tokens[..., 48:]], dim=-1
        )
        return rotated.transpose(1, 2).numpy(), cfg.to_dict(), 48
    cfg = transformers.RoFormerConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=seq
    )
    module = importlib.import_module("transformers.models.roformer.modeling_roformer")
    embedding = module.RoFormerSinusoidalPositionalEmbedding(seq, 64)
    embedding.weight.data.copy_(embedding.create_weight())
    table = embedding(torch.Size((1, seq)))[None, :, :]
    apply = module.RoFormerSelfAttention.apply_rotary_position_embeddings
    return apply(table, torch.from_numpy(x), torch.from_numpy(x))[0].numpy(), cfg.to_dict(), 64


@pytest.mark.parametrize(
    ("name", "angle_dtype", "seq"), [("gptj", "float32", 20000), ("roformer", "float64", 3000)]
)
def test_models_with_tables(
    name: str, angle_dtype: str, seq: int, rng: np.random.Generator
) -> None:
    x = rng.standard_normal((1, 2, seq, 64)).astype(np.float32)
    expected, keys, width = rotated_by_table(name, x)
    rope = RotaryEmbedding.from_config(keys, angle_dtype=angle_dtype)
    assert (rope.rotary_dim, rope.interleaved) == (width, True)
    if angle_dtype == "float32":
        # On some processors (AVX2, one frequency of 24) torch's vectorised powers end in another
        # bit, which far positions multiply. So the test compares frequencies by themselves, and
        # rotations by them.
        theirs = (1.0 / 10000 ** (torch.arange(0, width, 2) / width)).numpy().astype(np.float64)
        assert (np.abs(theirs - rope.inv_freq) <= 2 * half_ulp(rope.inv_freq, np.float32)).all()
        spec = rope.spec
        same = replace(spec, inv_freq=theirs.reshape(spec.inv_freq.shape))
        rope = RotaryEmbedding.from_spec(same)
    drift = 2 * half_ulp(np.arange(seq)[:, None] * rope.inv_freq, np.float32).repeat(2, axis=-1)
    drift = drift if angle_dtype == "float32" else np.zeros_like(drift)
    agrees(rope.rotate(x, layout="bhsd"), expected, x, rope, drift)
