"""Rope parameters by layer type, from the old and the new layout of config files, and the width of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_types import ModelFacts
from rope_cpu.frequencies.scaling import DEFAULT_THETA, SECTION_KEYS, without_nulls

Config = Mapping[str, Any]
RopeParameters = dict[str, Any]

_LENGTH = "max_position_embeddings"


def by_layer_type(text: Config, facts: ModelFacts) -> dict[str, RopeParameters | None]:
    """Return the sections by layer type, one for all layers under ""; None: layers of this type are not rotated.

    Each holds its base and its rotated share, from where the config or its model type has them.
    """
    key, given = own_section(text)
    own = {
        label: text[own_key]
        for label, own_key in facts.sections.items()
        if text.get(own_key) is not None
    }
    for label, parameters in own.items():
        if not isinstance(parameters, Mapping):
            raise TypeError(
                f"`{facts.sections[label]}` is {shown(parameters)}; it must be an object"
            )
    if facts.implied is not None and text.get(facts.implied[0]) == facts.implied[1]:
        given = {**facts.implied[2], **given}
    _refuse_objects(given)
    if any(isinstance(value, Mapping) for value in given.values()):
        by_layer = {
            label: value
            for label, value in given.items()
            if value is None or isinstance(value, Mapping)
        } | own
        return {
            label: None if value is None else _filled(label, _renamed(value, facts), text, facts)
            for label, value in by_layer.items()
        }
    if facts.layered:
        return _old_layered(key, given, own, text, facts)
    if not given and facts.rope_parameters:
        # The length in the file holds for the section as well.
        given = {
            key: value
            for key, value in facts.rope_parameters.items()
            if key != _LENGTH or text.get(key) is None
        }
        if "" in facts.theta and text.get(facts.theta[""]) is not None:
            given["rope_theta"] = text[facts.theta[""]]
    return {"": _filled("", _renamed(given, facts), text, facts)}


def _refuse_objects(section: Config) -> None:
    """Raise where a key of rope parameters holds an object, which would read as a section by layer type."""
    for key in SECTION_KEYS & section.keys():
        if isinstance(section[key], Mapping):
            raise TypeError(f"`{key}` is {shown(section[key])}; it cannot be an object")


def own_section(text: Config) -> tuple[str, Config]:
    """Return the config's own section after its key; where there are both, transformers reads the old one."""
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise TypeError(f"`{key}` is {shown(section)}; it must be an object")
        if section:
            return key, section
    return "rope_parameters", {}


def _old_layered(
    key: str, given: Config, own_sections: Mapping[str, Config], text: Config, facts: ModelFacts
) -> dict[str, RopeParameters | None]:
    """Return the sections of a model whose layer types differ, from an old file: one section or none for all.

    own_sections: by layer type, where the file has one under a key of its own.
    """
    if given and not set(facts.scaled) & set(facts.rope_parameters or ()):
        raise ValueError(f"`{key}` is one section, but this model type has one for each layer type")
    found: dict[str, RopeParameters | None] = {}
    for label, default in (facts.rope_parameters or {}).items():
        if default is None:
            found[label] = None
            continue
        own = _renamed(own_sections.get(label, given if label in facts.scaled else {}), facts)
        section = {**default, **own}
        if "type" in own or "rope_type" in own:
            section["rope_type"] = own.get("rope_type", own.get("type"))
        for name, keys in (("rope_theta", facts.theta), ("partial_rotary_factor", facts.partial)):
            value = _of_layer(text.get(keys.get(label, "")), label, text)
            # A value for these layers alone wins over one for the whole model.
            of_model = label not in own_sections and keys.get(label) != name
            if value is not None and (name not in own or of_model):
                section[name] = value
        found[label] = {**facts.assumed_old.get(_type_name(section), {}), **section}
    return found


def _of_layer(value: Any, label: str, text: Config) -> Any:
    """Return the value for a layer type, from a list with one for each layer, or the one value there is."""
    if not isinstance(value, list):
        return value
    layers = text.get("layer_types") or []
    return (
        value[layers.index(label)] if label in layers and layers.index(label) < len(value) else None
    )


def _filled(label: str, section: RopeParameters, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the section with its base, its rotated share and its original length."""
    theta = text.get(facts.theta.get(label, "rope_theta" if not facts.theta else ""))
    default = facts.filled.get(label, {}) if label else facts.defaults
    section.setdefault(
        "rope_theta", theta if theta is not None else default.get("rope_theta", DEFAULT_THETA)
    )
    if facts.theta_ratio is not None:
        ratio = scalars.real_number(facts.theta_ratio, text.get(facts.theta_ratio, 1))
        section["rope_theta"] = ratio * scalars.real_number("rope_theta", section["rope_theta"])
    key = facts.partial.get(label, "partial_rotary_factor" if label else "")
    width = text.get(key, facts.defaults.get(key)) if key.endswith("_dim") else None
    if width is not None and "partial_rotary_factor" not in section:
        section["rotary_dim"] = width
    else:
        key = "partial_rotary_factor" if key.endswith("_dim") else key
        partial = text.get(key, default.get("partial_rotary_factor"))
        if partial is not None:
            section.setdefault("partial_rotary_factor", partial)
    section = {**facts.assumed.get(_type_name(section), {}), **section}
    if not label and text.get("original_max_position_embeddings") is not None:
        section["original_max_position_embeddings"] = text["original_max_position_embeddings"]
    return section


def _renamed(section: Config, facts: ModelFacts) -> RopeParameters:
    """Return a section without keys that are empty or have no use, with types as this model type means them."""
    kept = without_nulls(section)
    if kept.get("alpha"):
        for key in facts.ignored_with_alpha:
            kept.pop(key, None)
    for key in ("rope_type", "type"):
        if isinstance(kept.get(key), str):
            kept[key] = facts.types.get(kept[key], kept[key])
    return kept


def _type_name(section: Config) -> str:
    """Return the rope type that a section names; "" for something other than a name, which is refused later."""
    name = section.get("rope_type", section.get("type", "default"))
    return name if isinstance(name, str) else ""


def latent(values: Config) -> bool:
    """Return True if attention is latent (MLA); with `use_mla` false DeepSeek's first code is like Llama's."""
    return "qk_rope_head_dim" in values and bool(values.get("use_mla", True))


def head_dim(values: Config, facts: ModelFacts, label: str | None) -> int:
    """Return the width of a head vector, or of its rotated part where attention is latent (MLA)."""
    if latent(values):
        return scalars.whole_number(
            "qk_rope_head_dim", values["qk_rope_head_dim"], 2, limits.HEAD_DIM
        )
    own, default = facts.layer_head_dim.get(str(label), ("head_dim", None))
    layer = _layer_config(values, label)
    width = layer.get(
        "head_dim", values.get(own, default if default is not None else values.get("head_dim"))
    )
    if width is None or facts.head_dim_derived:
        for key in ("hidden_size", "num_attention_heads"):
            if key not in values:
                raise ValueError(
                    f"`{key}` is missing, and so is `head_dim`, which would follow from it"
                )
        heads = scalars.whole_number(
            "num_attention_heads", values["num_attention_heads"], 1, limits.HEADS
        )
        hidden = scalars.whole_number("hidden_size", values["hidden_size"], 1, limits.HIDDEN_SIZE)
        width = facts.head_dim_ratio * hidden // heads
    return scalars.whole_number("head_dim", width, 2, limits.HEAD_DIM)


def _layer_config(values: Config, label: str | None) -> Config:
    """Return the entry of `per_layer_config` for a layer type (Gemma 4, in transformers 5)."""
    for index, name in enumerate(values.get("layer_types") or ()):
        if name == label:
            layers = values.get("per_layer_config") or {}
            entry = layers.get(str(index), layers.get(index)) or {}
            if not isinstance(entry, Mapping):
                raise TypeError(
                    f"`per_layer_config` holds {shown(entry)} for layer {index}; it must be an object"
                )
            return entry
    return {}
