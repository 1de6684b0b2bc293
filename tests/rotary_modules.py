"""The rotary modules of the installed transformers and their results, for tests and data makers."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

MODELS = Path(transformers.__file__).parent / "models"

# Config classes of modules whose constructors are not annotated.
NOT_ANNOTATED = {
    "ClvpRotaryPositionalEmbedding": "ClvpEncoderConfig",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "SeamlessM4TConfig",
    "Wav2Vec2BertRotaryPositionalEmbedding": "Wav2Vec2BertConfig",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "Wav2Vec2ConformerConfig",
}


def mapped_model(config_class: Any) -> Any:
    """Return the model class of a config class by the auto mapping; None if it names none."""
    names = MODEL_MAPPING_NAMES.get(config_class.model_type)
    if names is None:
        return None
    return getattr(transformers, names if isinstance(names, str) else names[0])


@cache
def modules() -> list[tuple[str, type, type]]:
    """Return (folder, rotary class, config class) for every rotary module built from a config.

    Config classes without modelling code of their own stand beside the rotary module of the model
    that the auto mapping names.
    """
    found = modules_with_code()
    by_config = {config_class: (folder, cls) for folder, cls, config_class in found}
    for config_class in without_code():
        model = mapped_model(config_class)
        if model is not None and model.config_class in by_config:
            found.append((*by_config[model.config_class], config_class))
    return found


def without_code() -> list[type]:
    """Return the config classes whose folder has no modelling code."""
    found = []
    for path in sorted(MODELS.glob("*/configuration_*.py")):
        if any(path.parent.glob("modeling_*.py")):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        found += [
            cls
            for cls in vars(module).values()
            if inspect.isclass(cls) and cls.__module__ == module.__name__
        ]
    return found


def modules_with_code() -> list[tuple[str, type, type]]:
    """Return the rotary modules of every folder, with the config class each is annotated with."""
    found = []
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if not re.search(r"^class \w*(Rotary|RoPE|Rope)\w*\(", text, re.M):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, cls in vars(module).items():
            if not (
                inspect.isclass(cls)
                and cls.__module__ == module.__name__
                and re.search("Rotary|RoPE|Rope", name)
            ):
                continue
            parameters = inspect.signature(cls.__init__).parameters
            if "config" in parameters and hasattr(cls, "forward") and "Attention" not in name:
                annotation = parameters["config"].annotation
                if annotation is inspect.Parameter.empty:
                    annotation = getattr(transformers, NOT_ANNOTATED[name])
                elif isinstance(annotation, str):
                    annotation = getattr(module, annotation)
                found.append((path.parent.name, cls, annotation))
    return found


def unrotated(function: Any) -> Any:
    """Return a function with the arguments of an apply function that returns what it gets."""
    names = list(inspect.signature(function).parameters)
    keys = {"k", "xk"} & set(names)

    def same(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        both = [given[names[0]], *(given[key] for key in keys if given.get(key) is not None)]
        return both[0] if len(both) == 1 else tuple(both)

    return same


def frequencies(module: Any) -> dict[str | None, tuple[np.ndarray, float]]:
    """Return inv_freq and attention factor by layer type."""
    buffers = dict(module.named_buffers())
    if "embed_positions" in buffers:  # sin and cos of every position
        sin, cos = buffers["embed_positions"][1].double().numpy().reshape(2, -1)
        return {None: (np.arctan2(sin, cos), 1.0)}
    layered = {name[: -len("_inv_freq")] for name in buffers if name.endswith("_inv_freq")} - {
        "original"
    }
    layered = {name for name in layered if not name.endswith("_original")}
    if not layered:
        return {
            None: (
                buffers["inv_freq"].double().numpy(),
                float(getattr(module, "attention_scaling", 1.0)),
            )
        }
    return {
        name: (
            buffers[f"{name}_inv_freq"].double().numpy(),
            float(getattr(module, f"{name}_attention_scaling", 1.0)),
        )
        for name in sorted(layered)
    }
