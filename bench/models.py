"""Models whose shapes are timed: the keys of their config.json that a rotation depends on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.texts import escaped
from rope_cpu.command_line import both_pairings, head_counts, read_config
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.reader import read

# Sequence length for frequencies that depend on it.
_LENGTH = 4096

# From the models' published config.json.
MODELS: dict[str, dict[str, Any]] = json.loads(
    resources.files("rope_cpu.bench.data").joinpath("models.json").read_text()
)


@dataclass(frozen=True)
class Model:
    """The rotation of a model, in its own pairing and in the other one.

    For an unknown model type own is half-split.
    """

    name: str
    heads: int
    kv_heads: int
    own: RotaryEmbedding
    other: RotaryEmbedding

    @property
    def heads_text(self) -> str:
        """The heads in words, such as "32 + 8 heads of 128"."""
        return f"{self.heads} + {self.kv_heads} heads of {self.own.head_dim}"


def known(name: str) -> Model:
    """Return a model of the table; raise ValueError if it has none of this name."""
    if name not in MODELS:
        raise ValueError(f"`model` is {name!r}; known are {', '.join(MODELS)}")
    return from_config(name, read(MODELS[name]))


def from_file(path: Path, layer_type: str | None = None) -> Model:
    """Return the model of a config.json, or of the one in a folder.

    Raises UsageError if it cannot be parsed, or lacks the number of heads or a rotation.
    """
    file = (path / "config.json" if path.is_dir() else path).absolute()
    name = file.parent.name if file.stem == "config" else file.stem
    return from_config(escaped(name), read_config(path), layer_type)


def from_config(name: str, config: ModelConfig, layer_type: str | None = None) -> Model:
    """Return the model of a config; raise UsageError as `from_file` does."""
    half, interleaved, own_is_interleaved = both_pairings(config, layer_type)
    half = half.at_length(_LENGTH)
    interleaved = interleaved.at_length(_LENGTH)
    heads, kv_heads = head_counts(config, layer_type)
    if own_is_interleaved:
        return Model(name, heads, kv_heads, own=interleaved, other=half)
    return Model(name, heads, kv_heads, own=half, other=interleaved)
