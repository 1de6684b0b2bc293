"""Rope parameters by layer type, from old and new forms of config files, and head widths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.scaling import DEFAULT_THETA, SECTION_KEYS, without_nulls
from rope_cpu.models.model_types import ALL_LAYERS, ModelFacts, value_at

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
    _refuse_objects(section)
    if any(isinstance(value, Mapping) for value in section.values()):
        return _nested_sections(section, text, facts)
    if facts.has_layer_sections:
        return _old_sections(key, section, text, facts)
    if not section and facts.rope_parameters:
        section = _default_section(text, facts)
    return {ALL_LAYERS: _completed(ALL_LAYERS, without_nulls(section), text, facts)}


def own_section(text: Config) -> tuple[str, Config]:
    """Return the key and the section of a config; `rope_scaling` goes first, as in transformers."""
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise ArgumentTypeError(key, section, "be an object")
        if section:
            return key, section
    return "rope_parameters", {}


def _refuse_objects(section: Config) -> None:
    """Raise for an object under a key of rope parameters: it would look like a layer type."""
    for key in SECTION_KEYS & section.keys():
        if isinstance(section[key], Mapping):
            raise ArgumentTypeError(key, section[key], "be no object")


def _nested_sections(
    section: Config, text: Config, facts: ModelFacts
) -> dict[str, RopeParameters | None]:
    """Complete the sections of a file of the new form, nested by layer type."""
    completed: dict[str, RopeParameters | None] = {}
    for label, part in section.items():
        if part is None:
            completed[label] = None
        elif isinstance(part, Mapping):
            completed[label] = _completed(label, without_nulls(part), text, facts)
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
    key: str, section: Config, text: Config, facts: ModelFacts
) -> dict[str, RopeParameters | None]:
    """Return the sections of a model whose layer types differ, from a file of the old form.

    The file has at most one flat section, under `key`.
    """
    defaults: Mapping[str, Any] = facts.rope_parameters or {}
    if section and not set(facts.scaled) & set(defaults):
        rule = "hold a section for each layer type, {layer type: section}"
        raise ArgumentError(key, Finding("is one section"), rule)
    sections: dict[str, RopeParameters | None] = {}
    for label, default in defaults.items():
        if default is None:
            sections[label] = None
            continue
        own = without_nulls(section) if label in facts.scaled else {}
        merged = {**default, **own}
        if "type" in own or "rope_type" in own:
            merged["rope_type"] = own.get("rope_type", own.get("type"))
        sections[label] = merged | _old_values(label, own, text, facts)
    return sections


def _old_values(label: str, own: Config, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the base and the rotated share of a layer type from top-level keys of an old file.

    A value for this layer type alone takes precedence over a value for the whole model.
    """
    values = {}
    for name, keys in (("rope_theta", facts.theta), (_SHARE, facts.partial)):
        key = keys.get(label)
        if key is None:
            continue
        value = _value_of_type(text.get(key), label, text)
        if value is not None and (name not in own or key != name):
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
    original = text.get("original_max_position_embeddings")
    if label == ALL_LAYERS and original is not None:
        section["original_max_position_embeddings"] = original
    return section


def _theta(label: str, section: Config, defaults: Config, text: Config, facts: ModelFacts) -> Any:
    """Return the base of a section: its own, the file's, the model type's, or 10000."""
    key = facts.theta.get(label)
    # Own sections of a class have their bases.
    if not facts.theta and (own_section(text)[1] or not facts.rope_parameters):
        key = "rope_theta"
    in_file = None if key is None else text.get(key)
    theta = defaults.get("rope_theta", DEFAULT_THETA) if in_file is None else in_file
    return section.get("rope_theta", theta)


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


def is_latent(values: Config) -> bool:
    """Return True for latent attention (MLA).

    With `use_mla` false, DeepSeek's first code has the attention of Llama.
    """
    return "qk_rope_head_dim" in values and bool(values.get("use_mla", True))


def head_dim(values: Config, layer_type: str | None) -> int:
    """Return the width of a head vector, or of its rotated part with latent attention (MLA)."""
    if is_latent(values):
        key = "qk_rope_head_dim"
        return scalars.whole_number(key, values[key], 2, limits.HEAD_DIM)
    width = values_of_type(values, layer_type).get("head_dim")
    if width is None:
        width = _derived_head_dim(values)
    return scalars.whole_number("head_dim", width, 2, limits.HEAD_DIM)


def values_of_type(values: Config, layer_type: str | None) -> Config:
    """Return the values of a config with those of a layer type, which may have its own widths."""
    own_keys = values.get("by_layer_type", {}).get(layer_type, {})
    own = {name: value_at(values, key) for name, key in own_keys.items()}
    return {**values, **without_nulls(own), **_layer_config(values, layer_type)}


def _derived_head_dim(values: Config) -> int:
    """Return the head_dim that follows from the hidden size and the number of heads."""
    for key in ("hidden_size", "num_attention_heads"):
        if key not in values:
            raise ArgumentError(key, MISSING, "be given, or `head_dim`, which follows from it")
    heads = values["num_attention_heads"]
    heads = scalars.whole_number("num_attention_heads", heads, 1, limits.HEADS)
    hidden = scalars.whole_number("hidden_size", values["hidden_size"], 1, limits.HIDDEN_SIZE)
    return hidden // heads


def _layer_config(values: Config, layer_type: str | None) -> Config:
    """Return the entry of `per_layer_config` for a layer type (Gemma 4, in transformers 5)."""
    layers = values.get("per_layer_config")
    layer_types = values.get("layer_types") or ()
    if not layers or layer_type not in layer_types:
        return {}
    index = layer_types.index(layer_type)
    entry = layers.get(str(index), layers.get(index)) or {}
    if not isinstance(entry, Mapping):
        raise ArgumentTypeError("per_layer_config", entry, "hold an object for each layer")
    return entry
