"""Hugging Face configs → ModelConfig: the file is loaded, and the adapter of its kind parses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rope_cpu.configs import diffusers, text, vision
from rope_cpu.configs.model_config import ModelConfig


def read(config: str | PathLike[str] | Mapping[str, Any] | ModelConfig) -> ModelConfig:
    """Return a config, parsed: that of a file, of a folder's config.json, or of a dict.

    Raises TypeError for anything else; ValueError where there is no such file, it holds no JSON object, or describes no
    rotation; OSError where it cannot be read.
    """
    if isinstance(config, ModelConfig):
        return config
    raw = load(config)
    text.check_kinds(raw)
    parse = diffusers.parse if diffusers.is_transformer(raw) else vision.parse if vision.is_vision(raw) else text.parse
    return parse(raw)


def load(config: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict of a config; raises as `read` does."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | PathLike):
        raise TypeError(f"`config` is a {type(config).__name__}; it must be a path or a dict")
    path = Path(fspath(config))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"`config` is {fspath(config)!r}, which is neither a file nor a folder with a config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`config` {fspath(path)!r} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"`config` {fspath(path)!r} holds a {type(raw).__name__}; it must hold an object")
    return raw
