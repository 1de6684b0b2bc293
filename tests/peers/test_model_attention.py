"""The attention of models' layers, from config and state dict alone, against transformers' modules.

A small model runs once in float32, with hooks that keep the arguments of each attention module. The
module, in float64, gives the expected result for the whole sequence; the exported layer computes it
in steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from attention_modules import Module, attention_module, random_model

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation.session import open_session

pytestmark = pytest.mark.peers

# A prefill, a chunk and decode steps.
STEPS = (13, 6, *(1,) * 5)
TOKENS = sum(STEPS)
WIDTH = 32
CAPACITY = 64

SMALL = {
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": WIDTH,
    "max_position_embeddings": CAPACITY,
    "vocab_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 8,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * pair for pair in range(WIDTH // 2)],
    "long_factor": [1.5 + 0.5 * pair for pair in range(WIDTH // 2)],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = {"layer_types": [SLIDING, FULL]}


class Case(NamedTuple):
    """A layer of a model: its model type, keys of its config beside SMALL, and its index."""

    model_type: str
    keys: dict[str, Any]
    layer: int = 0


CASES = {
    "Llama 3": Case("llama", {"rope_parameters": LLAMA3, "attention_bias": True}),
    "Qwen 3": Case("qwen3", {}),
    "Gemma 2, sliding": Case("gemma2", {"query_pre_attn_scalar": 40}),
    "Gemma 2, full": Case("gemma2", {"attn_logit_softcapping": 5.0}, 1),
    "Gemma 3, sliding": Case("gemma3_text", MIXED),
    "Gemma 3, full": Case("gemma3_text", MIXED, 1),
    "GLM-4": Case(
        "glm4",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_theta": 1e4,
                "rope_type": "default",
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "GPT-J": Case(
        "gptj", {"rotary_dim": 16, "n_embd": 192, "n_head": 6, "n_layer": 2, "n_positions": 64}
    ),
    "Phi-3, longrope": Case(
        "phi3",
        {"rope_parameters": LONGROPE, "hidden_size": 192, "original_max_position_embeddings": 16},
    ),
    "Mistral, sliding": Case("mistral", {}),
    "Cohere 2, sliding": Case("cohere2", {"layer_types": [SLIDING, FULL], "hidden_size": 192}),
    "gpt-oss, sliding": Case("gpt_oss", EXPERTS),
    "gpt-oss, full": Case("gpt_oss", EXPERTS, 1),
}
TARGETS = ("primitive", "onnx", "ort")


def config_keys(case: Case) -> dict[str, Any]:
    keys = SMALL | case.keys
    if case.model_type == "gptj":
        keys = {name: keys[name] for name in ("vocab_size", *case.keys)}
    if case.model_type not in ("gemma2", "gemma3_text", "mistral", "cohere2", "gpt_oss"):
        keys.pop("sliding_window", None)
    return keys


@cache
def expected(name: str) -> Module:
    """Run a small model of transformers and return the attention of one of its layers."""
    case = CASES[name]
    model, calls = random_model(case.model_type, config_keys(case), TOKENS)
    return attention_module(model, calls, case.model_type, case.layer)


def rotary(config: dict[str, Any], layer: int) -> RotaryEmbedding:
    """The rotation of a layer, with the float32 angles of transformers."""
    rope = RotaryEmbedding.from_config(config, layer=layer, angle_dtype="float32")
    return rope.at_length(TOKENS) if rope.spec.needs_length else rope


def in_steps(model: Any, hidden: np.ndarray, dtype: str, kind: str) -> np.ndarray:
    """Run a model step by step, over a cache that grows or that is shared."""
    session = open_session(model)
    shapes = {value.name: value.shape for value in session.get_inputs()}
    rows = 0 if kind == "growing" else CAPACITY
    past = {
        name: np.zeros((1, shapes[name][1], rows, WIDTH), dtype)
        for name in ("past_key", "past_value")
    }
    results = []
    start = 0
    for count in STEPS:
        feeds = {"hidden": hidden[:, start : start + count].astype(dtype)} | past
        if kind == "growing":
            result, *present = session.run(None, feeds)
            past = dict(zip(past, present, strict=True))
        else:
            feeds["past_lengths"] = np.array([start])
            result = np.empty_like(feeds["hidden"])
            export.bind(session, feeds, {"attention": result})()
        results.append(result)
        start += count
    return np.concatenate(results, axis=1)


def exported(name: str, target: str, dtype: str, kind: str) -> Any:
    """The layer of a case, exported from its config and state dict."""
    layer = CASES[name].layer
    peer = expected(name)
    arguments = export.attention_options(peer.config, layer=layer)
    arguments |= export.attention_weights(peer.state, peer.config, layer)
    rope = rotary(peer.config, layer)
    return export.export_attention(
        rope, target=target, dtype=dtype, cache=kind, max_positions=CAPACITY, **arguments
    )


@pytest.mark.parametrize("kind", ["growing", "shared"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_layer(name: str, target: str, kind: str) -> None:
    peer = expected(name)
    model = exported(name, target, "float32", kind)
    check(name, target, kind, peer, in_steps(model, peer.hidden, "float32", kind))


@pytest.mark.parametrize("kind", ["growing", "shared"])
@pytest.mark.parametrize("name", CASES)
def test_float64(name: str, kind: str) -> None:
    peer = expected(name)
    model = exported(name, "primitive", "float64", kind)
    check(name, "primitive, float64", kind, peer, in_steps(model, peer.hidden, "float64", kind))


def check(name: str, target: str, kind: str, peer: Module, result: np.ndarray) -> None:
    """Compare a result with the expected one; a different order of sums may be 4 times as far off.

    Norms and softmax of the module compute in float32 even where its weights are float64.
    """
    error = np.abs(result - peer.result).max()
    print(
        f"{name:<18} {target:<18} {kind:<8} {error:.1e}, the module in float32 "
        f"{peer.own_error:.1e}, on values up to {np.abs(peer.result).max():.1f}"
    )
    assert error <= 4 * peer.own_error
