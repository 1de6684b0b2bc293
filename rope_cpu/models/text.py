"""Adapter for configs of language models, alone or inside a multimodal file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, did_you_mean, shown
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec, reverse_direction, with_still_pairs
from rope_cpu.models import keys, model_types, quirks
from rope_cpu.models.attention import FACTS, attention_of
from rope_cpu.models.layer import Layer, derived_layer_types
from rope_cpu.models.model import Asked, Model, RopeParameters
from rope_cpu.models.model_types import SHARE, UNKNOWN, Config, ModelFacts, model_facts, value_at

# Keys that may stand beside `mrope_section`, each with the function from the numbers of pairs of
# the axes, and of all pairs, to the axis of each pair; "": each axis has one run of pairs. A new
# arrangement of pairs gets a row here, and its key one in `scaling.AXES_KEYS`.
PAIR_AXES: dict[str, Callable[[Sequence[int], int], tuple[int, ...]]] = {
    "": lambda section, pairs: axes.mrope_pair_axis(section, False),
    "mrope_interleaved_glm": lambda section, pairs: axes.round_robin_pair_axis(section),
    "video_rope": lambda section, pairs: axes.time_last_pair_axis(section),
    "mrope_interleaved": axes.interleaved_pair_axis,
}


_LENGTH = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, kw_only=True)
class TextModel(Model):
    """The config of a language model.

    `values` with keys under standard names and `rope_parameters` are sufficient for a spec.
    `beside` has the keys of the file of a known type around it, {} for a file of its own.
    `has_theta`: the file has a base.
    """

    beside: Config = field(default_factory=dict)
    has_theta: bool = True

    @cached_property
    def attention(self) -> Layer:
        """The facts that all layers share."""
        types = {self.model_type, self.facts.like}
        return attention_of(types, self.values, self.source, self.beside, self.model_type)

    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        """Pick the rope parameters of the layers and build their spec."""
        values = self.values
        facts = self.facts
        interleaved = self._interleaved(interleaved)
        if not self.is_known:
            keys.refuse_unread(values, facts)
        if not self.has_theta and (facts.needs_theta or not self.is_known):
            rule = "be in the config, as the default of its model type is not known"
            raise ArgumentError("rope_theta", MISSING, rule, "add `rope_theta` to the config")
        layer_type, parameters = self.select(*asked)
        section = dict(parameters)
        width = self.head_dim(layer_type)
        rotary_dim = section.pop("rotary_dim", None)
        # The factor does not apply to a latent head, whose rotated width is given, and not to
        # models that always rotate the whole head.
        ignores_partial = facts.whole_head and scaling.rope_type_name(section) == "default"
        if self.is_latent or ignores_partial:
            section.pop("partial_rotary_factor", None)
        mrope_section = section.pop("mrope_section", facts.mrope.get("mrope_section"))
        arrangement = ""
        if mrope_section is not None:  # otherwise `scaled` refuses the keys of axes
            arrangement = _pop_arrangement(section, facts)
        spec = scaling.scaled(
            width,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            scaling=section,
            max_position_embeddings=values.get("max_position_embeddings"),
            angle_dtype=angle_dtype,
        )
        if facts.rotation_sign == -1:
            spec = reverse_direction(spec)
        if facts.rotated_heads is not None:
            heads, _ = self.heads(layer_type)
            turning = np.arange(heads) < facts.rotated_heads
            spec = with_still_pairs(spec, spec.inv_freq * turning[:, None])
        if mrope_section is None:
            return spec
        return _with_axes(spec, mrope_section, arrangement)

    def _interleaved(self, interleaved: bool | None) -> bool:
        """Return the pairing: the argument, or that of the model type."""
        if interleaved is not None:
            return interleaved
        pairing = self.facts.interleaved
        if pairing is None:
            model_type = self.values.get("model_type")
            meant = did_you_mean(model_type, model_types.table_rows())
            rule = "be True for pairs (2i, 2i+1), or False for (i, i+n)"
            reason = f"`model_type` is {shown(model_type)}{meant}, so the pairing is not known"
            raise ArgumentError("interleaved", None, rule, reason)
        if isinstance(pairing, str):
            return scalars.boolean(pairing, self.values.get(pairing, True))
        return pairing


def parse(raw: Config) -> TextModel:
    """Parse the config of a language model, or of a multimodal model that contains one.

    Raises ValueError or TypeError if the model is not rotated, or if its rope parameters are
    malformed.
    """
    text, facts, whole = language_model(raw)
    is_known = facts is not UNKNOWN
    unknown_whole = None if whole in (None, *FACTS["wholes"]) else shown(whole)
    # Without defaults, since a value of the file must not be mistaken for one of the model type.
    named: Config = _standard_names(text, facts)
    if facts.names:
        keys.check_containers(named)
    named = quirks.with_quirks(named)
    values = _with_defaults(named, text, facts)
    _refuse_unrotated(text, values, facts)
    if is_known:
        keys.refuse_unread(text, facts)
    sections = _rope_parameters_by_type(named, facts)
    for layer_type, key in facts.unrotated.items():
        if key == "" or text.get(key, 0) is not None:
            sections[layer_type] = None
    return TextModel(
        source=raw,
        has_theta=_has_theta(named),
        beside={} if unknown_whole or raw.keys() <= text.keys() else raw,
        model_type=values.get("model_type"),
        values=values,
        own_values=_values_by_type(values, facts),
        rope_parameters=sections,
        facts=facts,
        unknown_type=unknown_whole if is_known else shown(values.get("model_type")),
    )


def language_model(raw: Config) -> tuple[Config, ModelFacts, str | None]:
    """Return the config of the language model in `raw`, or `raw` itself, and the row of its type.

    The third value is the unknown model type of a file around the language model, None without one.
    """
    raw = _with_model_type(raw)
    model_type = str(raw.get("model_type"))
    if model_type in model_types.REFUSED:
        reason = model_types.REFUSED[model_type]
        raise ValueError(f"`model_type` is {shown(model_type)}: {reason}")
    facts = model_facts(model_type) or UNKNOWN
    if facts is not UNKNOWN and facts.part is None:
        keys.refuse_unread_part(raw, facts.names)
        return raw, facts, None
    own_key, part_type = facts.part or (keys.KEYS["parts"][0], "")
    part_facts = model_facts(part_type) or UNKNOWN
    places = (own_key, *keys.KEYS["parts"])
    part_key = next((key for key in places if isinstance(raw.get(key), Mapping)), None)
    if part_key is None:
        keys.refuse_unread_part(raw, part_facts.names)
        # An older file has the keys of the language model at the top level.
        of_part = {**raw, "model_type": part_type}
        return (raw, UNKNOWN, None) if facts is UNKNOWN else language_model(of_part)
    keys.check_part(raw, part_key, (*facts.ignored, *part_facts.ignored))
    if facts is UNKNOWN:
        return *language_model(raw[part_key])[:2], raw.get("model_type") or ""
    return language_model(_part(raw, raw[part_key], part_type))


def _with_model_type(raw: Config) -> Config:
    """Return a config without a model type with that of its class, if its class is known."""
    if raw.get("model_type") is not None:
        return raw
    classes = raw.get("architectures")
    name = classes[0] if isinstance(classes, list | tuple) and classes else None
    model_type = model_types.type_of_class(name) if isinstance(name, str) else None
    return raw if model_type is None else {**raw, "model_type": model_type}


def _part(raw: Config, part: Config, part_type: str) -> Config:
    """Return the config of a part with its model type: that of the whole for one of its own name.

    EXAONE 4.5 calls the type of its part exaone4_5_text, which transformers reads as exaone4.
    """
    own = part.get("model_type")
    is_own_name = isinstance(own, str) and own.startswith(str(raw.get("model_type")))
    if own is None or (is_own_name and model_facts(own) is None):
        return {**part, "model_type": part_type}
    return part


def _with_defaults(named: Config, text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return a config under standard names with its model type's defaults for missing keys."""
    defaults = dict(facts.defaults)
    for key in keys.KEYS["nullable"]:
        if text.get(key, 0) is None:
            defaults.pop(key, None)
    if "layer_types" in named:  # its length goes before a default number
        defaults.pop("num_hidden_layers", None)
    values = {**defaults, **named}
    if "layer_types" not in values:
        values |= derived_layer_types({values.get("model_type"), facts.like}, values)
    return values


def _standard_names(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return the keys of a config under standard names, without nulls."""
    values = scaling.without_nulls(text)
    for name, own_key in facts.names.items():
        value = value_at(values, own_key) if own_key else None
        if value is not None:
            values[name] = value
        elif not own_key:
            values.pop(name, None)
    return values


def _rope_parameters_by_type(
    text: Config, facts: ModelFacts
) -> dict[str | None, RopeParameters | None]:
    """Return the section of each layer type, or the one of all layers under None.

    Each section has its base and its rotated share, from the file or from the model type. None
    stands for layer types that are not rotated.
    """
    key, section = keys.own_section(text)
    for name in scaling.SECTION_KEYS & section.keys():  # it would look like a layer type
        if isinstance(section[name], Mapping):
            raise ArgumentTypeError(name, section[name], "be no object")
    parts: dict[str | None, Any]
    if any(isinstance(value, Mapping) for value in section.values()):
        _refuse_keys_beside_sections(key, section)
        # Null: layers of this type are not rotated.
        parts = {label: part for label, part in section.items() if isinstance(part, Mapping | None)}
    elif facts.has_layer_sections:
        return _old_sections(key, section, text, facts)
    elif section or not facts.rope_parameters:
        parts = {None: section}
    else:
        parts = {None: _default_section(text, facts)}
    return {
        label: None if part is None else _completed(label, part, text, facts)
        for label, part in parts.items()
    }


def _refuse_keys_beside_sections(key: str, section: Config) -> None:
    """Raise for a key beside the sections of layer types, where nothing reads it.

    A copy of a key in one of them is no harm (Laguna has the original length at both places).
    """
    parts = [part for part in section.values() if isinstance(part, Mapping)]
    beside = {name: value for name, value in section.items() if not isinstance(value, Mapping)}
    for name, value in beside.items():
        is_copy = any(part.get(name) == value for part in parts)
        if not is_copy and not keys.is_neutral(name, value):
            rule = f"be in a section of `{key}`, as it has one for each layer type"
            raise ArgumentError(cut(str(name)), value, rule, "move it into those that it is for")


def _default_section(text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the model type's section for a file without one; the file's length and base go first.

    A length in the file applies to the section as well.
    """
    section = dict(facts.rope_parameters or {})
    for name, key in ((_LENGTH, _LENGTH), ("rope_theta", facts.theta.get(None))):
        if _value(text, key) is not None:
            section.pop(name, None)
    return section


def _old_sections(
    key: str, section: Config, text: Config, facts: ModelFacts
) -> dict[str | None, RopeParameters | None]:
    """Return the sections of a model whose layer types differ, from a file of the old form.

    The file has at most one flat section, under `key`.
    """
    defaults: Config = facts.rope_parameters or {}
    if section and not set(facts.scaled) & set(defaults):
        rule = "hold a section for each layer type, {layer type: section}"
        raise ArgumentError(key, Finding("is one section"), rule)
    sections: dict[str | None, RopeParameters | None] = {}
    for label, default in defaults.items():
        if default is None:
            sections[label] = None
            continue
        own = scaling.without_nulls(section) if label in facts.scaled else {}
        sections[label] = {**default, **own, **_old_values(label, own, text, facts)}
    return sections


def _old_values(label: str, own: Config, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the base and the rotated share of a layer type from top-level keys of an old file.

    A value for this layer type alone takes precedence over a value for the whole model.
    """
    layer_types = text.get("layer_types") or []
    values = {}
    for name, own_keys in (("rope_theta", facts.theta), (SHARE, facts.partial)):
        key = own_keys.get(label)
        value = _value(text, key)
        if isinstance(value, list):
            value = _of_layers(str(key), value, label, layer_types)
        if value is not None and (name not in own or key != name):
            values[name] = value
    return values


def _of_layers(key: str, values: list[Any], label: str, layer_types: Sequence[str]) -> Any:
    """Return the value of the layers of a type in a list by layer; None if there are none."""
    if not layer_types or len(values) < len(layer_types):
        rule = "have a value for each of the layers in `layer_types`"
        raise ArgumentError(key, values, rule, "add those to the config")
    own = [value for value, kind in zip(values, layer_types, strict=False) if kind == label]
    if any(value != own[0] for value in own):
        rule = f"have one value for the layers of type {shown(label)}"
        raise ArgumentError(key, values, rule, "layers that differ need types of their own")
    return own[0] if own else None


def _completed(label: str | None, part: Config, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return a section with its base, its rotated share and its original length.

    Each is that of the first place which has it: the section, the file, the model type. A base of
    null alone is refused, since models of transformers with it cannot be built.
    """
    own = scaling.without_nulls(part)
    defaults = facts.defaults if label is None else facts.filled.get(label, {})
    key = facts.theta.get(label)
    # Own sections of a class have their bases.
    if not facts.theta and (any(map(text.get, keys.SECTIONS)) or not facts.rope_parameters):
        key = "rope_theta"
    theta = _first(own.get("rope_theta"), _value(text, key))
    if theta is None and "rope_theta" in part:
        remedy = "transformers 5 loses it where `config.rope_scaling` is assigned: take the model's"
        raise ArgumentError("rope_theta", None, "be a number, the base of the model", remedy)
    added = {"rope_theta": _first(theta, defaults.get("rope_theta"), scaling.DEFAULT_THETA)}
    if label is None:
        added[_ORIGINAL] = _first(text.get(_ORIGINAL), own.get(_ORIGINAL))
    key = facts.partial.get(label, None if label is None else SHARE)
    if SHARE not in own and key is not None and key.endswith("_dim"):
        added["rotary_dim"] = _first(text.get(key), facts.defaults.get(key))
        key = SHARE
    if SHARE not in own and added.get("rotary_dim") is None:
        added[SHARE] = _first(_value(text, key), defaults.get(SHARE))
    return scaling.without_nulls({**own, **added})


def _value(text: Config, key: str | None) -> Any:
    """Return the value of a key, None for a missing one, or without a key."""
    return None if key is None else text.get(key)


def _first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)


def _values_by_type(values: Config, facts: ModelFacts) -> dict[str | None, Config]:
    """Return the values in which layers of a type differ: widths and numbers of heads.

    They are those of other keys, or of `per_layer_config` (Gemma 4, in transformers 5).
    """
    found: dict[str | None, Config] = {
        layer_type: scaling.without_nulls(
            {name: value_at(values, key) for name, key in own_keys.items()}
        )
        for layer_type, own_keys in facts.by_layer_type.items()
    }
    by_index = values.get("per_layer_config") or {}
    first = {kind: index for index, kind in reversed([*enumerate(values.get("layer_types") or ())])}
    for layer_type, index in first.items() if by_index else ():
        entry = by_index.get(str(index), by_index.get(index)) or {}
        if not isinstance(entry, Mapping):
            raise ArgumentTypeError("per_layer_config", entry, "hold an object for each layer")
        found[layer_type] = {**found.get(layer_type, {}), **entry}
    return found


def _has_theta(named: Config) -> bool:
    """Return whether a file, or one of its sections, has a base."""
    sections = dict([keys.own_section(named)])
    return "rope_theta" in named or any("rope_theta" in part for _, part in keys.objects(sections))


def _refuse_unrotated(text: Config, values: Config, facts: ModelFacts) -> None:
    """Raise for models without a rotation, or with one that we cannot express."""
    name = text.get("model_type")
    # A type that is usually not rotated may have a key that asks for a rotation.
    asks = any(value_at(text, key) == value for key, value in keys.KEYS["asks"].items())
    if name in model_types.UNROTATED and not asks:
        raise ValueError(f"`model_type` is {shown(name)}: {model_types.UNROTATED[name]}")
    own = {**text, **keys.own_section(text)[1]}
    nulls = {key for key in own if own[key] is None}
    for key, (refused_values, reason) in facts.refuse.items():
        value = values.get(key)
        refuses_any = refused_values == ["*"] and not keys.is_neutral(key, value)
        if value in refused_values or refuses_any or (None in refused_values and key in nulls):
            value = None if key in nulls else value
            raise ValueError(
                f"`{key}` is {shown(value)} in a config of model type {shown(name)}: {reason}"
            )


def _pop_arrangement(section: dict[str, Any], facts: ModelFacts) -> str:
    """Return the key that says how the axes share the pairs, and remove all such keys.

    "": each axis has one run of pairs.
    """
    by_turns = ("mrope_interleaved", "interleaved")
    present = [key for key in dict.fromkeys((*by_turns, *PAIR_AXES)) if key in section]
    flags = {key: scalars.boolean(key, section.pop(key)) for key in present}
    takes_turns: set[Any] = {flags[key] for key in by_turns if key in flags}
    takes_turns |= {facts.mrope.get("mrope_interleaved")} - {None}
    if len(takes_turns) > 1:
        rule = "agree with `interleaved`, and with the code of the model type"
        raise ArgumentError(by_turns[0], Finding("is contradicted"), rule)
    flags[by_turns[0]] = True in takes_turns
    chosen = [key for key in PAIR_AXES if flags.get(key)]
    if len(chosen) > 1:
        raise ArgumentError(chosen[0], True, f"be false if `{chosen[1]}` is true")
    return chosen[0] if chosen else ""


def _with_axes(spec: RopeSpec, mrope_section: Any, arrangement: str) -> RopeSpec:
    """Return the M-RoPE of a rotation with one axis, from the section of a config file."""
    axis_pairs = axes.checked_mrope_section("mrope_section", mrope_section)
    pair_axis = PAIR_AXES[arrangement](axis_pairs, spec.pairs)
    return axes.with_pair_axis(spec, pair_axis, len(axis_pairs))
