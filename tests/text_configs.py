"""Configs of language models, in part, and how tests read them."""

from __future__ import annotations

from typing import Any

from rope_cpu import RotaryEmbedding

FOUR_HEADS = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32}
NANOCHAT: dict[str, Any] = {"model_type": "nanochat", "hidden_size": 512, "num_attention_heads": 4}
GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "head_dim": 64,
}

# Scaled rotations, one for each rope type that most models have.
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA3: dict[str, Any] = {**LLAMA, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}
PHI3: dict[str, Any] = {
    "model_type": "phi3",
    "hidden_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
}


def of(model_type: str, **keys: Any) -> dict[str, Any]:
    """Return a config of a model type."""
    return {"model_type": model_type, **keys}


def read(*keys: dict[str, Any], **arguments: Any) -> RotaryEmbedding:
    """Return the rotary embedding of a config made of parts, of which a later one wins."""
    merged: dict[str, Any] = {}
    for part in keys:
        merged |= part
    return RotaryEmbedding.from_config(merged, **arguments)
