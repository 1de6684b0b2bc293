"""Checks of the containers in a raw config: their types, and which of them is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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

# Keys with the rope parameters of a model.
SECTIONS = ("rope_scaling", "rope_parameters")

# Keys that the config of every language model has one of, besides those of its model type. The
# hidden size of a language model may stand beside it as well, for the sake of other parts.
_MODEL_KEYS = ("num_attention_heads", "rope_theta", *SECTIONS)
_WIDTH_KEY = "hidden_size"

# Parts of multimodal configs that are no language models.
_OTHER_PARTS = re.compile("vis|audio|speech|image|video|diffusion|project")


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


def refuse_unread_part(raw: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raise if the language model seems to be in an object of a config that is not read.

    names: standard names of keys, with the model type's own.
    """
    model_keys = {*_MODEL_KEYS, *(own for name, own in names.items() if name != _WIDTH_KEY)}
    if model_keys & raw.keys():
        return
    width_keys = {_WIDTH_KEY, names.get(_WIDTH_KEY, _WIDTH_KEY)}
    known_keys = model_keys if width_keys & raw.keys() else model_keys | width_keys
    found = [(path, known_keys & part.keys()) for path, part in objects(raw)]
    unread = [(path, keys) for path, keys in found if keys]
    if not unread:
        return
    path, keys = max(
        unread, key=lambda entry: (not _OTHER_PARTS.search(str(entry[0])), len(entry[1]))
    )
    raise ValueError(
        f"`config` has `{min(keys)}` under {shown(path)} alone, which is not read; pass that "
        "object, with the `model_type` of the language model"
    )


def objects(raw: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the objects in a config and in its objects, with their paths such as "a.b"."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield key, value
            for inner_key, inner in value.items():
                if isinstance(inner, Mapping):
                    yield f"{key}.{inner_key}", inner
