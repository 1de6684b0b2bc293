"""Shapes of known models: the few lines of their config.json that a rotation depends on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_cpu import RotaryEmbedding
from rope_cpu._usage import heads_of


def _config(model_type: str, heads: int, kv_heads: int, head_dim: int, theta: float, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * head_dim,
        "rope_theta": theta,
    } | more


# From the models' published config.json.
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": _config("llama", 32, 8, 128, 500000.0, max_position_embeddings=8192),
    "llama3-70b": _config("llama", 64, 8, 128, 500000.0, max_position_embeddings=8192),
    "mistral-7b": _config("mistral", 32, 8, 128, 1000000.0, max_position_embeddings=32768),
    "qwen2-7b": _config("qwen2", 28, 4, 128, 1000000.0, max_position_embeddings=32768),
    "qwen3-0.6b": _config("qwen3", 16, 8, 128, 1000000.0, max_position_embeddings=40960),
    "qwen3-32b": _config("qwen3", 64, 8, 128, 1000000.0, max_position_embeddings=40960),
    "tinyllama-1.1b": _config("llama", 32, 4, 64, 10000.0, max_position_embeddings=2048),
    "cohere-35b": _config("cohere", 64, 64, 128, 8000000.0, max_position_embeddings=131072),
    "gemma2-2b": _config("gemma2", 8, 4, 256, 10000.0, max_position_embeddings=8192),
}


@dataclass(frozen=True)
class Model:
    """The rotation of one model. rope: makes its rotary, in the pairing asked for or in its own (None)."""

    name: str
    heads: int
    kv_heads: int
    rope: Callable[[bool | None], RotaryEmbedding]


def known(name: str) -> Model:
    """Return a model of the table; raise ValueError where there is none of that name."""
    if name not in MODELS:
        raise ValueError(f"`model` is {name!r}; known are {', '.join(MODELS)}")
    return from_config(name, MODELS[name])


def from_file(path: str | Path, layer_type: str | None = None) -> Model:
    """Return the model of a config.json, or of a folder with one.

    Raises UsageError, ValueError or TypeError where it says no number of heads or no rotation; OSError where it cannot
    be read.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    return from_config(
        file.stem if file.stem != "config" else file.parent.name, json.loads(file.read_text()), layer_type
    )


def from_config(name: str, config: Mapping[str, Any], layer_type: str | None = None) -> Model:
    """Return the model that a config describes: its heads, and its rotary through RotaryEmbedding.from_config."""
    heads, kv_heads = heads_of(dict(config))
    if "kv_lora_rank" in config:  # latent attention (DeepSeek) rotates one key, which all heads share
        kv_heads = 1

    def rope(interleaved: bool | None) -> RotaryEmbedding:
        rotary = RotaryEmbedding.from_config(dict(config), layer_type=layer_type, interleaved=interleaved)
        return rotary.at_length(4096)

    return Model(name, heads, kv_heads, rope)
