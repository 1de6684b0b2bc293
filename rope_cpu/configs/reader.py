"""Hugging Face configs → ModelConfig: the file is loaded, and the adapter of its kind parses it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rope_cpu.arguments import limits
from rope_cpu.arguments.texts import shown
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
    parse = (
        diffusers.parse
        if diffusers.is_transformer(raw)
        else vision.parse
        if vision.is_vision(raw)
        else text.parse
    )
    try:
        return parse(raw)
    except RecursionError:
        raise ValueError(
            "`config` holds one model's config inside another's, too deep to follow"
        ) from None


def load(config: str | PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the dict of a config; raises as `read` does."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | PathLike):
        raise TypeError(f"`config` is a {type(config).__name__}; it must be a path or a dict")
    path = fspath(config)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    if not os.path.isfile(path):
        rule = "which is neither a file nor a folder with a config.json"
        raise ValueError(f"`config` is {shown(fspath(config))}, {rule}")
    size = os.path.getsize(path)
    if size > limits.CONFIG_BYTES:
        rule = f"a config may have at most {limits.CONFIG_BYTES}"
        raise ValueError(f"`config` {shown(path)} has {size} bytes; {rule}")
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`config` {shown(path)} is not valid JSON: {error}") from None
    except RecursionError:
        raise ValueError(
            f"`config` {shown(path)} is not read: its JSON is nested too deep"
        ) from None
    if not isinstance(raw, dict):
        raise ValueError(
            f"`config` {shown(path)} holds a {type(raw).__name__}; it must hold an object"
        )
    return raw
