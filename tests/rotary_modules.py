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

MODELS = Path(transformers.__file__).parent / "models"

# Config classes of modules whose constructors are not annotated.
NOT_ANNOTATED = {
    "ClvpRotaryPositionalEmbedding": "ClvpEncoderConfig",
    "SeamlessM4TConformerRotaryPositionalEmbedding": "SeamlessM4TConfig",
    "Wav2Vec2BertRotaryPositionalEmbedding": "Wav2Vec2BertConfig",
    "Wav2Vec2ConformerRotaryPositionalEmbedding": "Wav2Vec2ConformerConfig",
}


@cache
def modules() -> list[tuple[str, type, type]]:
    """Return (folder, rotary class, config class) for every rotary module built from a config."""
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


def frequencies(module: Any) -> dict[str | None, tuple[np.ndarray, float]]:
    """Return inv_freq and attention factor by layer type."""
    buffers = dict(module.named_buffers())
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
