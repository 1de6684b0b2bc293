"""Rope parameters by layer type, from old and new forms of config files, and head widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_types import ALL_LAYERS, ModelFacts
from rope_cpu.frequencies.scaling import DEFAULT_THETA, SECTION_KEYS, without_nulls

Config = Mapping[str, Any]
RopeParameters = dict[str, Any]

_LENGTH = "max_position_embeddings"
_SHARE = "partial_rotary_factor"


def rope_parameters_by_type(text: Config, facts: ModelFacts) -> dict[str, RopeParameters | None]:
    """Return the section of each layer type, or the one of `ALL_LAYERS`.

    Each section has its base and its rotated share, from the file or from the model type. None
    stands for layer types that are not rotated.
    """
    key, section = own_section(text)
    type_sections = _type_sections(text, facts)
    if facts.implied is not None:
        implying_key, implying_value, implied_section = facts.implied
        if text.get(implying_key) == implying_value:
            section = {**implied_section, **section}
    _refuse_objects(section)
    if any(isinstance(value, Mapping) for value in section.values()):
        return _nested_sections({**_objects_and_nulls(section), **type_sections}, text, facts)
    if facts.has_layer_sections:
        return _old_sections(key, section, type_sections, text, facts)
    if not section and facts.rope_parameters:
        section = _default_section(text, facts)
    return {ALL_LAYERS: _completed(ALL_LAYERS, _normalised(section, facts), text, facts)}


def own_section(text: Config) -> tuple[str, Config]:
    """Return the key and the section of a config; `rope_scaling` goes first, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise TypeError(f"`{key}` is {shown(section)}; it must be an object")
        if section:
            return key, section
    return "rope_parameters", {}


def _type_sections(text: Config, facts: ModelFacts) -> dict[str, Config]:
    """Return the sections that layer types have under their own top-level keys."""
    sections = {}
    for layer_type, key in facts.sections.items():
        section = text.get(key)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise TypeError(f"`{key}` is {shown(section)}; it must be an object")
        sections[layer_type] = section
    return sections


def _refuse_objects(section: Config) -> None:
    """Raise for an object under a key of rope parameters: it would look like a layer type."""
    for key in SECTION_KEYS & section.keys():
        if isinstance(section[key], Mapping):
            raise TypeError(f"`{key}` is {shown(section[key])}; it cannot be an object")


def _objects_and_nulls(section: Config) -> dict[str, Config | None]:
    """Return the entries of a nested section that are sections of layer types, or null."""
    return {
        label: value
        for label, value in section.items()
        if value is None or isinstance(value, Mapping)
    }


def _nested_sections(
    sections: Mapping[str, Config | None], text: Config, facts: ModelFacts
) -> dict[str, RopeParameters | None]:
    """Complete the sections of a file of the new form, nested by layer type."""
    completed: dict[str, RopeParameters | None] = {}
    for label, section in sections.items():
        if section is None:
            completed[label] = None
        else:
            completed[label] = _completed(label, _normalised(section, facts), text, facts)
    return completed


def _default_section(text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the model type's section for a file without one, with the file's base and length."""
    section = dict(facts.rope_parameters or {})
    if text.get(_LENGTH) is not None:
        section.pop(_LENGTH, None)  # the length in the file applies to the section as well
    key = facts.theta.get(ALL_LAYERS)
    if key is not None and text.get(key) is not None:
        section["rope_theta"] = text[key]
    return section


def _old_sections(
    key: str,
    section: Config,
    type_sections: Mapping[str, Config],
    text: Config,
    facts: ModelFacts,
) -> dict[str, RopeParameters | None]:
    """Return the sections of a model whose layer types differ, from a file of the old form.

    The file has at most one flat section, under `key`, and `type_sections` under keys of their own.
    """
    defaults: Mapping[str, Any] = facts.rope_parameters or {}
    if section and not set(facts.scaled) & set(defaults):
        raise ValueError(
            f"`{key}` is one section, but this model type has one for each layer type; give it as "
            "{layer type: section}"
        )
    sections: dict[str, RopeParameters | None] = {}
    for label, default in defaults.items():
        if default is None:
            sections[label] = None
            continue
        given: Config = section if label in facts.scaled else {}
        if label in type_sections:
            given = type_sections[label]
        own = _normalised(given, facts)
        merged = {**default, **own}
        if "type" in own or "rope_type" in own:
            merged["rope_type"] = own.get("rope_type", own.get("type"))
        merged |= _old_values(label, own, label in type_sections, text, facts)
        sections[label] = {**facts.assumed_old.get(_type_name(merged), {}), **merged}
    return sections


def _old_values(
    label: str, own: Config, has_type_section: bool, text: Config, facts: ModelFacts
) -> RopeParameters:
    """Return the base and the rotated share of a layer type from top-level keys of an old file.

    A value for this layer type alone takes precedence over a value for the whole model.
    """
    values = {}
    for name, keys in (("rope_theta", facts.theta), (_SHARE, facts.partial)):
        key = keys.get(label)
        if key is None:
            continue
        value = _value_of_type(text.get(key), label, text)
        is_type_value = key != name and not has_type_section
        if value is not None and (name not in own or is_type_value):
            values[name] = value
    return values


def _value_of_type(value: Any, label: str, text: Config) -> Any:
    """Return the entry of a list by layer for a layer type, or the value if it is not a list."""
    if not isinstance(value, list):
        return value
    layer_types = text.get("layer_types") or []
    if label not in layer_types:
        return None
    index = layer_types.index(label)
    return value[index] if index < len(value) else None


def _completed(
    label: str, section: RopeParameters, text: Config, facts: ModelFacts
) -> RopeParameters:
    """Return a section with its base, its rotated share and its original length."""
    defaults = facts.defaults if label == ALL_LAYERS else facts.filled.get(label, {})
    section = {**section, "rope_theta": _theta(label, section, defaults, text, facts)}
    section |= _rotated_share(label, section, defaults, text, facts)
    section = {**facts.assumed.get(_type_name(section), {}), **section}
    original = text.get("original_max_position_embeddings")
    if label == ALL_LAYERS and original is not None:
        section["original_max_position_embeddings"] = original
    return section


def _theta(label: str, section: Config, defaults: Config, text: Config, facts: ModelFacts) -> Any:
    """Return the base of a section: its own, the file's, the model type's, or 10000."""
    key = facts.theta.get(label)
    if not facts.theta:
        key = "rope_theta"
    in_file = None if key is None else text.get(key)
    theta = defaults.get("rope_theta", DEFAULT_THETA) if in_file is None else in_file
    theta = section.get("rope_theta", theta)
    if facts.theta_ratio is None:
        return theta
    ratio = scalars.real_number(facts.theta_ratio, text.get(facts.theta_ratio, 1))
    return ratio * scalars.real_number("rope_theta", theta)


def _rotated_share(
    label: str, section: Config, defaults: Config, text: Config, facts: ModelFacts
) -> RopeParameters:
    """Return the rotated width or share that a section lacks; empty if there is none to add."""
    if _SHARE in section:
        return {}
    key = facts.partial.get(label)
    if key is None and label != ALL_LAYERS:
        key = _SHARE
    if key is not None and key.endswith("_dim"):
        width = text.get(key, facts.defaults.get(key))
        if width is not None:
            return {"rotary_dim": width}
        key = _SHARE
    share = defaults.get(_SHARE)
    if key is not None:
        share = text.get(key, share)
    return {} if share is None else {_SHARE: share}


def _normalised(section: Config, facts: ModelFacts) -> RopeParameters:
    """Return a section without nulls and ignored keys, with rope types under our names."""
    normalised = without_nulls(section)
    if normalised.get("alpha"):
        for key in facts.ignored_with_alpha:
            normalised.pop(key, None)
    defaults: Mapping[str, Any] = {}
    for key in ("rope_type", "type"):
        name = normalised.get(key)
        if not isinstance(name, str):
            continue
        meaning = facts.types.get(name, name)
        if isinstance(meaning, Mapping):
            defaults = meaning
            meaning = meaning["rope_type"]
        normalised[key] = meaning
    return {**defaults, **normalised}


def _type_name(section: Config) -> str:
    """Return the rope type of a section; "" for a value that is no name and is refused later."""
    name = section.get("rope_type", section.get("type", "default"))
    return name if isinstance(name, str) else ""


def is_latent(values: Config) -> bool:
    """Return True for latent attention (MLA).

    With `use_mla` false, DeepSeek's first code has the attention of Llama.
    """
    return "qk_rope_head_dim" in values and bool(values.get("use_mla", True))


def head_dim(values: Config, facts: ModelFacts, layer_type: str | None) -> int:
    """Return the width of a head vector, or of its rotated part with latent attention (MLA)."""
    if is_latent(values):
        key = "qk_rope_head_dim"
        return scalars.whole_number(key, values[key], 2, limits.HEAD_DIM)
    width = _own_head_dim(values, facts, layer_type)
    if width is None or facts.head_dim_derived:
        width = _derived_head_dim(values, facts)
    return scalars.whole_number("head_dim", width, 2, limits.HEAD_DIM)


def _own_head_dim(values: Config, facts: ModelFacts, layer_type: str | None) -> Any:
    """Return the head_dim that the config has for a layer type, None if it has none."""
    layer_config = _layer_config(values, layer_type)
    if "head_dim" in layer_config:
        return layer_config["head_dim"]
    if layer_type is not None and layer_type in facts.layer_head_dim:
        key, default = facts.layer_head_dim[layer_type]
        return values.get(key, default)
    return values.get("head_dim")


def _derived_head_dim(values: Config, facts: ModelFacts) -> int:
    """Return the head_dim that follows from the hidden size and the number of heads."""
    for key in ("hidden_size", "num_attention_heads"):
        if key not in values:
            raise ValueError(
                f"`{key}` is missing, and so is `head_dim`, which would follow from it; give "
                "`head_dim`"
            )
    heads = values["num_attention_heads"]
    heads = scalars.whole_number("num_attention_heads", heads, 1, limits.HEADS)
    hidden = scalars.whole_number("hidden_size", values["hidden_size"], 1, limits.HIDDEN_SIZE)
    return facts.head_dim_ratio * hidden // heads


def _layer_config(values: Config, layer_type: str | None) -> Config:
    """Return the entry of `per_layer_config` for a layer type (Gemma 4, in transformers 5)."""
    layers = values.get("per_layer_config")
    layer_types = values.get("layer_types") or ()
    if not layers or layer_type not in layer_types:
        return {}
    index = layer_types.index(layer_type)
    entry = layers.get(str(index), layers.get(index)) or {}
    if not isinstance(entry, Mapping):
        raise TypeError(
            f"`per_layer_config` holds {shown(entry)} for layer {index}; it must be an object"
        )
    return entry
