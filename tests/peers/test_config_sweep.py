"""Every rotary module that transformers builds from a config, against the spec read from that config's dict."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rope_cpu import config

pytestmark = pytest.mark.peers

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
transformers.logging.set_verbosity_error()

MODELS = Path(transformers.__file__).parent / "models"

# Modules that are not compared, and why. Keys are module class names.
NOT_COMPARED: dict[str, str] = {}


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
            if not (inspect.isclass(cls) and cls.__module__ == module.__name__ and re.search("Rotary|RoPE|Rope", name)):
                continue
            parameters = inspect.signature(cls.__init__).parameters
            if "config" in parameters and hasattr(cls, "forward") and "Attention" not in name:
                annotation = parameters["config"].annotation
                if isinstance(annotation, str):
                    annotation = getattr(module, annotation, None)
                found.append((path.parent.name, cls, annotation))
    return found


def default_config(config_class: type) -> Any:
    """Return the default config; where it is that of a whole model, its text part."""
    whole = config_class()
    if getattr(whole, "rope_parameters", None) is None:
        for key in ("text_config", "thinker_config"):
            if hasattr(whole, key):
                part = getattr(whole, key)
                return getattr(part, "text_config", part)
    return whole


def frequencies(module: Any) -> dict[str | None, tuple[np.ndarray, float]]:
    """Return inv_freq and attention factor by layer type."""
    buffers = dict(module.named_buffers())
    layered = {name[: -len("_inv_freq")] for name in buffers if name.endswith("_inv_freq")} - {"original"}
    layered = {name for name in layered if not name.endswith("_original")}
    if not layered:
        return {None: (buffers["inv_freq"].double().numpy(), float(getattr(module, "attention_scaling", 1.0)))}
    return {
        name: (buffers[f"{name}_inv_freq"].double().numpy(), float(getattr(module, f"{name}_attention_scaling", 1.0)))
        for name in layered
    }


@pytest.mark.parametrize("form", ["to_dict", "to_diff_dict"])
@pytest.mark.parametrize(("folder", "rotary", "config_class"), modules(), ids=lambda value: getattr(value, "__name__", str(value)))
def test_default_config(folder: str, rotary: type, config_class: type, form: str) -> None:
    if rotary.__name__ in NOT_COMPARED:
        pytest.skip(NOT_COMPARED[rotary.__name__])
    cfg = default_config(config_class)
    expected = frequencies(rotary(cfg))
    given = {"model_type": cfg.model_type, **getattr(cfg, form)()}
    for layer_type, (inv_freq, factor) in expected.items():
        spec = config.read(given, layer_type=layer_type, angle_dtype="float32")
        ours = spec.inv_freq[0, :, 0].sum(axis=0)
        assert ours.shape == inv_freq.shape
        np.testing.assert_allclose(ours, inv_freq, rtol=1e-6)
        assert float(spec.attention_factor[0]) == pytest.approx(factor, rel=1e-6)
