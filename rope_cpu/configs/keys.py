"""Keys of a raw config: types of containers, and keys of rotations that nothing reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.configs.model_types import ModelFacts, table_rows

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

# Top-level keys that are read for every model type, besides those of widths and layers.
_READ = (
    *SECTIONS,
    *("original_max_position_embeddings", "per_layer_config", "qk_rope_head_dim"),
)

# Names of keys that belong to rotations.
_ROTATION = re.compile(
    r"(^|[^p])rope(?!rt)|rotar|rotat|theta|yarn|ntk|alibi|xpos|^scaling_factor$|dual_chunk"
    "|position_(embedding|encoding)s?_(type|2d)"
)

# Flags that ask for a rotation: true is neutral, and not false.
_ASKS = re.compile(r"((use|apply|with)_)?(rope|rotary)(_(emb|pos)\w*)?")

# Keys of widths, whose names in other vocabularies must not be passed over for a default.
_WIDTHS = ("hidden_size", "num_attention_heads", "head_dim")
_OTHER_WIDTHS = {"dim": "hidden_size", "n_heads": "num_attention_heads"}

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


def refuse_unread(text: Mapping[str, Any], facts: ModelFacts, read: Collection[str]) -> None:
    """Raise for a key of a rotation that the row of a model type and its quirks do not read.

    Parameters
    ----------
    text : mapping
        The config of the language model.
    facts : ModelFacts
        The row of its model type.
    read : collection of str
        The keys that the quirks of the model type read.

    Raises
    ------
    ValueError
        If the config has such a key with a value that may change the rotation.
    """
    known = {*_READ, *read, *_keys_of_row(facts)}
    for key, value in text.items():
        if key in known or not is_rotation_key(key) or is_neutral(key, value):
            continue
        raise _unread_key(key, value, text.get("model_type"), facts)


def refuse_unread_beside(whole: Mapping[str, Any], part_key: str, ignored: Collection[str]) -> None:
    """Raise for a key of a rotation beside the object of the language model, which alone is read.

    A copy of a key of that object is no harm, nor one that the type of the whole ignores.
    """
    part = whole[part_key]
    for key, value in whole.items():
        is_read = key in ignored or is_neutral(key, value) or part.get(key) == value
        if is_rotation_key(key) and not is_read:
            rule = f"be in `{part_key}`, which is read without it, or be left out"
            raise ArgumentError(cut(key), value, rule)


def _unread_key(key: str, value: Any, model_type: Any, facts: ModelFacts) -> ArgumentError:
    """Return the error for a key of a rotation that is not read."""
    rule = f"be left out if the code of `model_type` {shown(model_type)} ignores it"
    if facts == ModelFacts():
        rule = f"be left out, as `model_type` {shown(model_type)} is not known, nor what it means"
    remedy = "no rotation is read from it, so build a RotaryEmbedding from numbers otherwise"
    return ArgumentError(cut(key), value, rule, remedy)


def is_rotation_key(key: Any) -> bool:
    """Return True for a key whose name belongs to rotations."""
    return isinstance(key, str) and bool(_ROTATION.search(key) or key in _vocabulary())


def is_neutral(key: str, value: Any) -> bool:
    """Return True for a value that leaves the rotation as it is without the key."""
    if isinstance(value, bool):
        return value is (_ASKS.fullmatch(key) is not None)
    if isinstance(value, int | float):
        return value == 1
    return value in (None, "default", "rope", "rotary", "") or value in ({}, [], ())


@cache
def _vocabulary() -> frozenset[str]:
    """Return the keys of bases and rotated shares of all rows of the model table."""
    keys = set()
    for row in table_rows().values():
        names = row.get("names", {})
        keys |= {names.get("rope_theta", ""), names.get("partial_rotary_factor", "")}
        keys |= {*row.get("theta", {}).values(), *row.get("partial", {}).values()}
    return frozenset(keys - {""})


def _keys_of_row(facts: ModelFacts) -> set[str]:
    """Return the keys that the row of a model type reads, or lists as ignored."""
    keys = {*facts.theta.values(), *facts.partial.values(), *facts.refuse, *facts.ignored}
    keys |= {*facts.names.values(), *facts.unrotated.values()}
    if not facts.theta:
        keys.add("rope_theta")
    if not facts.partial and facts.has_layer_sections:
        keys.add("partial_rotary_factor")
    if not facts.unrotated and not facts.has_layer_sections:
        keys |= {"no_rope_layers", "layer_rope_theta", "no_rope_layer_interval"}
    if any(key.endswith("_dim") for key in facts.partial.values()):
        keys.add("partial_rotary_factor")
    if isinstance(facts.interleaved, str):
        keys.add(facts.interleaved)
    return {key.partition(".")[0] for key in keys}


@cache
def _width_names() -> dict[str, str]:
    """Return the standard key of each name that a row of the model table has for a width."""
    own = {
        names[key]: key
        for row in table_rows().values()
        for key in _WIDTHS
        if (names := row.get("names", {})).get(key) not in (None, "", *_READ)
    }
    return _OTHER_WIDTHS | own


def refuse_other_widths(text: Mapping[str, Any], facts: ModelFacts) -> None:
    """Raise for a width under a name of other model types alone."""
    for name, key in _width_names().items():
        own = facts.names.get(key) or key
        if text.get(name) is not None and not {own, key} & text.keys():
            raise ValueError(
                f"`{name}` is {shown(text[name])}, which `model_type` "
                f"{shown(text.get('model_type'))} does not read; its name for it is `{own}`"
            )
