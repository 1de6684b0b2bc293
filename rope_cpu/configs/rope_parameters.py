"""What a config says by layer type, whatever form it is in: its rope sections, and the width of a head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.configs.model_types import Model
from rope_cpu.frequencies.scaling import DEFAULT_THETA, without_nulls
from rope_cpu.validation import scalars

Config = Mapping[str, Any]
Section = dict[str, Any]

_LENGTH = "max_position_embeddings"


def sections(text: Config, known: Model) -> dict[str, Section | None]:
    """Return the sections by layer type, one for all layers under ""; None: layers of this type are not rotated.

    Each holds its base and its rotated share, from where the config or its model type has them.
    """
    key, given = own_section(text)
    if known.implied is not None and text.get(known.implied[0]) == known.implied[1]:
        given = {**known.implied[2], **given}
    if any(isinstance(value, Mapping) for value in given.values()):
        by_layer = {label: value for label, value in given.items() if value is None or isinstance(value, Mapping)}
        return {
            label: None if value is None else _filled(label, _renamed(value, known), text, known)
            for label, value in by_layer.items()
        }
    if known.layered:
        return _old_layered(key, given, text, known)
    if not given and known.rope_parameters:
        # A length that the file says counts for the section as well.
        given = {key: value for key, value in known.rope_parameters.items() if key != _LENGTH or text.get(key) is None}
        if "" in known.theta and text.get(known.theta[""]) is not None:
            given["rope_theta"] = text[known.theta[""]]
    return {"": _filled("", _renamed(given, known), text, known)}


def own_section(text: Config) -> tuple[str, Config]:
    """Return the config's own section after its key; where there are both, transformers reads the old one."""
    for key in ("rope_scaling", "rope_parameters"):
        section = text.get(key)
        if section is not None and not isinstance(section, Mapping):
            raise TypeError(f"`{key}` is {section!r}; it must be an object")
        if section:
            return key, section
    return "rope_parameters", {}


def _old_layered(key: str, given: Config, text: Config, known: Model) -> dict[str, Section | None]:
    """Return the sections of a model whose layer types differ, from an old file: one section or none for all."""
    if given and not set(known.scaled) & set(known.rope_parameters or ()):
        raise ValueError(f"`{key}` is one section, but this model type has one for each layer type")
    found: dict[str, Section | None] = {}
    for label, default in (known.rope_parameters or {}).items():
        if default is None:
            found[label] = None
            continue
        own = _renamed(given, known) if label in known.scaled else {}
        section = {**default, **own}
        if "type" in own or "rope_type" in own:
            section["rope_type"] = own.get("rope_type", own.get("type"))
        for name, keys in (("rope_theta", known.theta), ("partial_rotary_factor", known.partial)):
            value = _of_layer(text.get(keys.get(label, "")), label, text)
            if value is not None and name not in given:
                section[name] = value
        found[label] = {**known.assumed_old.get(section.get("rope_type", "default"), {}), **section}
    return found


def _of_layer(value: Any, label: str, text: Config) -> Any:
    """Return the value for a layer type, from a list with one for each layer, or the one value there is."""
    if not isinstance(value, list):
        return value
    layers = text.get("layer_types") or []
    return value[layers.index(label)] if label in layers and layers.index(label) < len(value) else None


def _filled(label: str, section: Section, text: Config, known: Model) -> Section:
    """Return the section with its base, its rotated share and its original length."""
    theta = text.get(known.theta.get(label, "rope_theta" if not known.theta else ""))
    default = known.filled.get(label, {}) if label else known.defaults
    section.setdefault("rope_theta", theta if theta is not None else default.get("rope_theta", DEFAULT_THETA))
    if known.theta_ratio is not None:
        ratio = scalars.real_number(known.theta_ratio, text.get(known.theta_ratio, 1))
        section["rope_theta"] = ratio * scalars.real_number("rope_theta", section["rope_theta"])
    key = known.partial.get(label, "partial_rotary_factor" if label else "")
    width = text.get(key, known.defaults.get(key)) if key.endswith("_dim") else None
    if width is not None and "partial_rotary_factor" not in section:
        section["rotary_dim"] = width
    else:
        key = "partial_rotary_factor" if key.endswith("_dim") else key
        partial = text.get(key, default.get("partial_rotary_factor"))
        if partial is not None:
            section.setdefault("partial_rotary_factor", partial)
    kind = str(section.get("rope_type", section.get("type", "default")))
    section = {**known.assumed.get(kind, {}), **section}
    if not label and text.get("original_max_position_embeddings") is not None:
        section["original_max_position_embeddings"] = text["original_max_position_embeddings"]
    return section


def _renamed(section: Config, known: Model) -> Section:
    """Return a section without keys that are empty or have no use, with types as this model type means them."""
    kept = without_nulls(section)
    if kept.get("alpha"):
        for key in known.ignored_with_alpha:
            kept.pop(key, None)
    for key in ("rope_type", "type"):
        if key in kept:
            kept[key] = known.types.get(str(kept[key]), kept[key])
    return kept


def latent(values: Config) -> bool:
    """Tell whether attention is latent (MLA); DeepSeek's first code can do without and is like Llama's then."""
    return "qk_rope_head_dim" in values and bool(values.get("use_mla", True))


def head_dim(values: Config, known: Model, label: str | None) -> int:
    """Return the width of a head vector, or of its rotated part where attention is latent (MLA)."""
    if latent(values):
        return scalars.whole_number("qk_rope_head_dim", values["qk_rope_head_dim"], 2)
    own, default = known.layer_head_dim.get(str(label), ("head_dim", None))
    layer = _layer_config(values, label)
    width = layer.get("head_dim", values.get(own, default if default is not None else values.get("head_dim")))
    if width is None or known.head_dim_derived:
        for key in ("hidden_size", "num_attention_heads"):
            if key not in values:
                raise ValueError(f"`{key}` is missing, and so is `head_dim`, which would follow from it")
        heads = scalars.whole_number("num_attention_heads", values["num_attention_heads"])
        width = known.head_dim_ratio * scalars.whole_number("hidden_size", values["hidden_size"]) // heads
    return scalars.whole_number("head_dim", width, 2)


def _layer_config(values: Config, label: str | None) -> Config:
    """Return what `per_layer_config` says of the layers of a type (Gemma 4, in transformers 5)."""
    for index, name in enumerate(values.get("layer_types") or ()):
        if name == label:
            layers = values.get("per_layer_config") or {}
            said = layers.get(str(index), layers.get(index)) or {}
            if not isinstance(said, Mapping):
                raise TypeError(f"`per_layer_config` says {said!r} of layer {index}; it must be an object")
            return said
    return {}
