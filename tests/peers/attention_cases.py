"""Layers of small models of transformers, which run once with random weights."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from attention_modules import Module, attention_module, random_model
from text_configs import LLAMA3_SCALING

from rope_cpu import RotaryEmbedding

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
LLAMA3 = {"rope_theta": 5e5, **LLAMA3_SCALING, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.01 * pair for pair in range(WIDTH // 2)],
    "long_factor": [1.5 + 0.5 * pair for pair in range(WIDTH // 2)],
    "original_max_position_embeddings": 16,
    "factor": 4.0,
}
HALF_ROTATED = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
GPTJ = {"rotary_dim": 16, "n_embd": 192, "n_head": 6, "n_layer": 2, "n_positions": 512}
PHI3 = {"rope_parameters": LONGROPE, "hidden_size": 192, "original_max_position_embeddings": 16}
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
    "GLM-4": Case("glm4", {"attention_bias": True, "rope_parameters": HALF_ROTATED}),
    "GPT-J": Case("gptj", GPTJ),
    "Phi-3, longrope": Case("phi3", PHI3),
    "Mistral, sliding": Case("mistral", {}),
    "Cohere 2, sliding": Case("cohere2", {"layer_types": [SLIDING, FULL], "hidden_size": 192}),
    "gpt-oss, sliding": Case("gpt_oss", EXPERTS),
    "gpt-oss, full": Case("gpt_oss", EXPERTS, 1),
}


def config_keys(case: Case) -> dict[str, Any]:
    keys = SMALL | case.keys
    if case.model_type == "gptj":
        keys = {name: keys[name] for name in ("vocab_size", *case.keys)}
    if case.model_type not in ("gemma2", "gemma3_text", "mistral", "cohere2", "gpt_oss"):
        keys.pop("sliding_window", None)
    return keys


@cache
def small_model(name: str) -> tuple[Any, dict[str, Any]]:
    """Run a small model of transformers and return it, with the calls of its modules."""
    case = CASES[name]
    return random_model(case.model_type, config_keys(case), TOKENS)


@cache
def expected(name: str) -> Module:
    """Return the attention of the layer of a case."""
    case = CASES[name]
    return attention_module(*small_model(name), case.model_type, case.layer)


def rotary(config: dict[str, Any], layer: int) -> RotaryEmbedding:
    """The rotation of a layer, with the float32 angles of transformers."""
    rope = RotaryEmbedding.from_config(config, layer=layer, angle_dtype="float32")
    return rope.at_length(TOKENS) if rope.spec.needs_length else rope
