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


def read(*keys: dict[str, Any], **arguments: Any) -> RotaryEmbedding:
    """Return the rotary embedding of a config made of parts, of which a later one wins."""
    merged: dict[str, Any] = {}
    for part in keys:
        merged |= part
    return RotaryEmbedding.from_config(merged, **arguments)
