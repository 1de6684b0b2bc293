"""Shapes of known models: the few lines of their config.json that a rotation depends on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rope_cpu import RotaryEmbedding
from rope_cpu.command_line import both_pairings, read_config, head_counts
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.reader import read

# Sequence length of the frequencies that depend on it.
_LENGTH = 4096

# From the models' published config.json.
MODELS: dict[str, dict[str, Any]] = json.loads(
    resources.files("rope_cpu.bench.data").joinpath("models.json").read_text()
)


@dataclass(frozen=True)
class Model:
    """The rotation of one model. own: in its own pairing (half-split where that is unknown); other: in the other."""

    name: str
    heads: int
    kv_heads: int
    own: RotaryEmbedding
    other: RotaryEmbedding


def known(name: str) -> Model:
    """Return a model of the table; raise ValueError where none has this name."""
    if name not in MODELS:
        raise ValueError(f"`model` is {name!r}; known are {', '.join(MODELS)}")
    return from_config(name, read(MODELS[name]))


def from_file(path: Path, layer_type: str | None = None) -> Model:
    """Return the model of a config.json, or of a folder with one.

    Raises UsageError where it cannot be read, or has no number of heads or no rotation.
    """
    file = (path / "config.json" if path.is_dir() else path).absolute()
    name = file.parent.name if file.stem == "config" else file.stem
    return from_config(name, read_config(path), layer_type)


def from_config(name: str, config: ModelConfig, layer_type: str | None = None) -> Model:
    """Return the model that a config describes; raise UsageError as `from_file` does."""
    half, interleaved, own = both_pairings(config, layer_type)
    ropes = half.at_length(_LENGTH), interleaved.at_length(_LENGTH)
    return Model(name, *head_counts(config, layer_type), *(ropes[::-1] if own else ropes))
