"""Checks of the container types in a raw config, before its keys are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import cut, shown

# Types of the keys that parsing descends into or looks up in a table. The values of other keys are
# checked where they are used.
_STRING_KEYS = ("model_type", "_class_name")
_LIST_KEYS = ("layer_types", "layer_rope_theta", "no_rope_layers")
_OBJECT_KEYS = ("attn_config", "attention_other_setting", "per_layer_config", "text_config")

_REQUIRED_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(_STRING_KEYS, (str, "a string")),
    **dict.fromkeys(_LIST_KEYS, (list | tuple, "a list")),
    **dict.fromkeys(_OBJECT_KEYS, (Mapping, "an object")),
}


def check_containers(config: Mapping[str, Any]) -> None:
    """Raise if a key of a config has a container of the wrong type, or holds a NumPy array."""
    for key, (required, name) in _REQUIRED_TYPES.items():
        value = config.get(key)
        if value is not None and not isinstance(value, required):
            raise TypeError(f"`{key}` is {shown(value)}; it must be {name}")
    _refuse_arrays(config)
    layer_types = config.get("layer_types") or ()
    scalars.check_length("layer_types", layer_types, limits.LAYERS)
    for layer, layer_type in enumerate(layer_types):
        if not isinstance(layer_type, str):
            raise TypeError(
                f"`layer_types` holds {shown(layer_type)} for layer {layer}; it must be a string"
            )


def _refuse_arrays(config: Mapping[str, Any]) -> None:
    """Raise for a NumPy array in a config or a section of it: an array has no truth value."""
    for key, value in config.items():
        inner_values = value.values() if isinstance(value, Mapping) else ()
        if any(isinstance(entry, np.ndarray) for entry in (value, *inner_values)):
            raise TypeError(f"`{cut(str(key))}` is {shown(value)}; a config holds JSON values only")
