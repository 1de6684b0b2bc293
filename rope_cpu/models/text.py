"""Adapter for configs of language models, alone or inside a multimodal file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import did_you_mean, shown
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec, reverse_direction, with_still_pairs
from rope_cpu.models import keys, layers, model_types, quirks
from rope_cpu.models.attention import FACTS, attention_of
from rope_cpu.models.layer import Layer
from rope_cpu.models.model import Asked, Model
from rope_cpu.models.model_types import UNKNOWN, Config, ModelFacts, model_facts

# Keys that may stand beside `mrope_section`, each with the function from the numbers of pairs of
# the axes, and of all pairs, to the axis of each pair; "": each axis has one run of pairs. A new
# arrangement of pairs gets a row here, and its key one in `scaling.AXES_KEYS`.
PAIR_AXES: dict[str, Callable[[Sequence[int], int], tuple[int, ...]]] = {
    "": lambda section, pairs: axes.mrope_pair_axis(section, False),
    "mrope_interleaved_glm": lambda section, pairs: axes.round_robin_pair_axis(section),
    "video_rope": lambda section, pairs: axes.time_last_pair_axis(section),
    "mrope_interleaved": axes.interleaved_pair_axis,
}


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
        chosen = self.select(*asked)
        layer_type = chosen.layer_type
        section = dict(chosen.rope_parameters)
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
    sections = layers.rope_parameters_by_type(named, facts)
    for layer_type, key in facts.unrotated.items():
        if key == "" or text.get(key, 0) is not None:
            sections[layer_type] = None
    return TextModel(
        source=raw,
        has_theta=_has_theta(named),
        beside={} if unknown_whole or raw.keys() <= text.keys() else raw,
        model_type=values.get("model_type"),
        values=values,
        own_values=layers.values_by_type(values, facts),
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
        values |= layers.derived_layer_types({values.get("model_type"), facts.like}, values)
    return values


def _standard_names(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return the keys of a config under standard names, without nulls."""
    values = scaling.without_nulls(text)
    for name, own_key in facts.names.items():
        value = model_types.value_at(values, own_key) if own_key else None
        if value is not None:
            values[name] = value
        elif not own_key:
            values.pop(name, None)
    return values


def _has_theta(named: Config) -> bool:
    """Return whether a file, or one of its sections, has a base."""
    sections = dict([keys.own_section(named)])
    return "rope_theta" in named or any("rope_theta" in part for _, part in keys.objects(sections))


def _refuse_unrotated(text: Config, values: Config, facts: ModelFacts) -> None:
    """Raise for models without a rotation, or with one that we cannot express."""
    name = text.get("model_type")
    # A type that is usually not rotated may have a key that asks for a rotation.
    asks = any(model_types.value_at(text, key) == value for key, value in keys.KEYS["asks"].items())
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
