"""Adapter for configs of language models, alone or inside a multimodal file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import did_you_mean, shown
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec, reverse_direction, with_still_pairs
from rope_cpu.models import keys, model_types, quirks
from rope_cpu.models.attention import FACTS, attention_of
from rope_cpu.models.keys import SECTION
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
    """

    beside: Config = field(default_factory=dict)

    @cached_property
    def attention(self) -> Layer:
        """The facts that all layers share."""
        return attention_of(self.model_type, self.values, self.source, self.beside)

    @cached_property
    def lacks_base(self) -> bool:
        """Whether a section has no base, and the default is not known."""
        return any(part and part["rope_theta"] is None for part in self.rope_parameters.values())

    def _build_spec(self, asked: Asked, interleaved: bool | None, angle_dtype: str) -> RopeSpec:
        """Pick the rope parameters of the layers and build their spec."""
        facts = self.facts
        interleaved = self._interleaved(interleaved)
        if facts is UNKNOWN:
            keys.refuse_unread(self.values, facts)
        if self.lacks_base:
            remedy = "transformers 5 leaves a null where `config.rope_scaling` is assigned"
            raise ArgumentError("rope_theta", MISSING, "be a number in the config", remedy)
        section = dict(self.section(*asked))
        width = self.head_dim(*asked)
        rotary_dim = section.pop("rotary_dim", None)
        # The factor does not apply to a latent head, whose rotated width is given, and not to
        # models that always rotate the whole head.
        ignores_partial = facts.whole_head and scaling.rope_type_name(section) == "default"
        if self.is_latent or ignores_partial:
            section.pop(SHARE, None)
        mrope_section = section.pop("mrope_section", facts.mrope.get("mrope_section"))
        # Without a section, `scaled` refuses the keys of axes.
        arrangement = "" if mrope_section is None else _pop_arrangement(section, facts)
        spec = scaling.scaled(
            width,
            rotary_dim=rotary_dim,
            interleaved=interleaved,
            scaling=section,
            max_position_embeddings=self.values.get("max_position_embeddings"),
            angle_dtype=angle_dtype,
        )
        if facts.rotates == "backwards":
            spec = reverse_direction(spec)
        if facts.rotates == "first head":
            is_first = np.arange(self.heads(*asked)[0]) == 0
            spec = with_still_pairs(spec, spec.inv_freq * is_first[:, None])
        if mrope_section is None:
            return spec
        axis_pairs = axes.checked_mrope_section("mrope_section", mrope_section)
        pair_axis = PAIR_AXES[arrangement](axis_pairs, spec.pairs)
        return axes.with_pair_axis(spec, pair_axis, len(axis_pairs))

    def _interleaved(self, interleaved: bool | None) -> bool:
        """Return the pairing: the argument, or that of the model type."""
        if interleaved is not None:
            return interleaved
        pairing = self.facts.interleaved
        if pairing is None:
            model_type = self.values.get("model_type")
            meant = did_you_mean(model_type, model_types.known_types())
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
    unknown_whole = None if whole in (None, *FACTS["wholes"]) else shown(whole)
    values = _values(text, facts)
    _refuse_unrotated(text, values, facts)
    if facts is not UNKNOWN:
        keys.refuse_unread(text, facts)
    sections = _sections(values, facts)
    for layer_type, key in facts.unrotated.items():
        if key == "" or text.get(key, 0) is not None:
            sections[layer_type] = None
    return TextModel(
        source=raw,
        beside={} if unknown_whole or raw.keys() <= text.keys() else raw,
        model_type=values.get("model_type"),
        values=values,
        own_values=_values_by_type(values, facts),
        rope_parameters=sections,
        facts=facts,
        unknown_type=shown(values.get("model_type")) if facts is UNKNOWN else unknown_whole,
    )


def language_model(raw: Config) -> tuple[Config, ModelFacts, str | None]:
    """Return the config of the language model in `raw`, or `raw` itself, and the row of its type.

    The third value is the unknown model type of a file around the language model, None without one.
    """
    model_type = raw.get("model_type")
    if model_type is None:
        model_type = model_types.type_of_class(raw.get("architectures"))
        raw = {**raw, "model_type": model_type}
    if str(model_type) in model_types.REFUSED:
        reason = model_types.REFUSED[str(model_type)]
        raise ValueError(f"`model_type` is {shown(model_type)}: {reason}")
    facts = model_facts(str(model_type)) or UNKNOWN
    part = _part(raw, facts)
    if part is None:
        return raw, facts, None
    text, own_facts, unknown_whole = language_model(part)
    return text, own_facts, (model_type or "") if facts is UNKNOWN else unknown_whole


def _part(raw: Config, facts: ModelFacts) -> Config | None:
    """Return the config in `raw` that has the language model; None if that is `raw` itself.

    A part of a known type has that which its row says, unless its own type is known: EXAONE 4.5
    calls the type of its part exaone4_5_text, which transformers reads as exaone4.
    """
    is_known = facts is not UNKNOWN
    own_key, part_type = facts.part or ("", "")
    part_facts = facts if facts.part is None else model_facts(part_type) or UNKNOWN
    places = () if is_known and facts.part is None else (own_key, *keys.KEYS["parts"])
    part_key = next((key for key in places if isinstance(raw.get(key), Mapping)), None)
    if part_key is None:
        keys.refuse_unread_part(raw, part_facts.names)
        # An older file has the keys of the language model at the top level.
        return None if facts.part is None else {**raw, "model_type": part_type}
    keys.check_part(raw, part_key, (*facts.ignored, *part_facts.ignored))
    part: Config = raw[part_key]
    own = part.get("model_type")
    is_own_name = isinstance(own, str) and own.startswith(str(raw.get("model_type")))
    if is_known and (own is None or (is_own_name and model_facts(own) is None)):
        return {**part, "model_type": part_type}
    return part


def _values(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return the keys of a config under standard names, with the defaults of its model type.

    They have no nulls, and one section, under one key.
    """
    named = scaling.without_nulls(text)
    for name, own_key in facts.names.items():
        if not own_key:
            named.pop(name, None)
        elif value_at(named, own_key) is not None:
            named[name] = value_at(named, own_key)
    if facts.names:
        keys.check_containers(named)
    named[SECTION] = keys.own_section(named)[1]
    nulls = [key for key in keys.KEYS["nullable"] if text.get(key, 0) is None]
    defaults = {key: value for key, value in facts.defaults.items() if key not in nulls}
    values = quirks.with_quirks({**defaults, **named})
    if "layer_types" not in values:
        values |= derived_layer_types({values.get("model_type"), facts.like}, values)
    elif "num_hidden_layers" not in named:  # the length of the list goes before a default number
        values.pop("num_hidden_layers", None)
    return values


def _sections(values: Config, facts: ModelFacts) -> dict[str | None, RopeParameters | None]:
    """Return the rope parameters of each layer type, or those of all layers under None.

    None stands for layer types that are not rotated.
    """
    section = values[SECTION]
    own: dict[str, Config | None] = {
        label: part
        for label, part in section.items()
        if isinstance(part, Mapping | None) and label not in scaling.SECTION_KEYS
    }
    defaults: Mapping[str, Any] = {}
    if any(isinstance(part, Mapping) for part in own.values()):
        # A copy of a key in a section is no harm (Laguna has the original length at both places).
        beside = {key: value for key, value in section.items() if key not in own}
        rule = "be in a section of a layer type, as there is one for each"
        keys.refuse_keys(beside, [*filter(None, own.values())], rule)
    elif not facts.rope_parameters or (section and "" in facts.rope_parameters):
        own = {"": section}
    elif section and not facts.scaled:
        key = next(key for key in keys.SECTIONS if values.get(key))
        rule = "hold a section for each layer type, {layer type: section}"
        raise ArgumentError(key, Finding("is one section"), rule)
    else:
        defaults = facts.rope_parameters
        own = {label: section if label in facts.scaled else {} for label in defaults}
    return {
        label or None: _completed(label, part, values, facts, defaults.get(label, {}))
        for label, part in own.items()
    }


def _completed(
    label: str, own: Config | None, values: Config, facts: ModelFacts, default: Config | None
) -> RopeParameters | None:
    """Return a section with what it lacks, each key from the first place that has it.

    own: the section of the file. default: that of the model type, if the file has none. None: the
    layers are not rotated. A base of None: neither the file nor the model type has one.
    """
    if own is None or default is None:
        return None
    rope_type = own.get("rope_type", "default")
    meaning = facts.rope_types.get(rope_type, {}) if isinstance(rope_type, str) else {}
    usual = {} if default else {"rope_theta": "rope_theta", SHARE: SHARE}
    listed = {**usual, **facts.top_level.get(label, {})}
    beside = {
        name: _of_layers(key, values, label) if default else value_at(values, key)
        for name, key in listed.items()
        if own.get(name) is None
    }
    places = (
        {"rope_type": meaning["rope_type"]} if meaning else {},
        scaling.without_nulls(own),
        scaling.without_nulls(beside),
        dict.fromkeys({"rope_theta"} & own.keys()),  # its null is no missing key
        meaning,
        default or {**facts.filled.get("", {}), **facts.filled.get(label, {})},
        {"rope_theta": scaling.DEFAULT_THETA},
    )
    section: RopeParameters = {}
    for place in places:
        for key, value in place.items():
            section.setdefault(key, value)
    section |= {key: values[key] for key in default.keys() & {_LENGTH}}  # a copy of the file's
    if label == "" and _ORIGINAL in values:
        section[_ORIGINAL] = values[_ORIGINAL]
    if "rotary_dim" in section:  # a width goes before a share, but for that of the section
        section.pop("rotary_dim" if own.get(SHARE) is not None else SHARE, None)
    return section


def _of_layers(key: str, values: Config, label: str) -> Any:
    """Return the value of a key, or the one that a list by layer has for a layer type.

    None if it is missing, or has no layers of this type.
    """
    entries = values.get(key)
    if not isinstance(entries, list):
        return entries
    layer_types = values.get("layer_types") or ()
    own = [entry for entry, kind in zip(entries, layer_types, strict=False) if kind == label]
    if not 0 < len(layer_types) <= len(entries) or own != own[:1] * len(own):
        rule = "have a value for each of the layers in `layer_types`, and one for each type"
        raise ArgumentError(key, entries, rule, "layers that differ need types of their own")
    return own[0] if own else None


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
    layer_types = values.get("layer_types") or ()
    by_index = values.get("per_layer_config") or {}
    for layer_type in dict.fromkeys(layer_types) if by_index else ():
        index = layer_types.index(layer_type)
        entry = by_index.get(str(index), by_index.get(index)) or {}
        if not isinstance(entry, Mapping):
            raise ArgumentTypeError("per_layer_config", entry, "hold an object for each layer")
        found[layer_type] = {**found.get(layer_type, {}), **entry}
    return found


def _refuse_unrotated(text: Config, values: Config, facts: ModelFacts) -> None:
    """Raise for models without a rotation, or with one that we cannot express."""
    name = text.get("model_type")
    # A type that is usually not rotated may have a key that asks for a rotation.
    asks = any(value_at(text, key) == value for key, value in keys.KEYS["asks"].items())
    if name in model_types.UNROTATED and not asks:
        raise ValueError(f"`model_type` is {shown(name)}: {model_types.UNROTATED[name]}")
    own = {**text, **values[SECTION]}
    for key, (refused, reason) in facts.refuse.items():
        is_null = None in refused and key in own and own[key] is None
        value = None if is_null else values.get(key, "")
        if value in refused or (refused == ["*"] and not keys.is_neutral(key, value)):
            raise ValueError(
                f"`{key}` is {shown(value)} in a config of model type {shown(name)}: {reason}"
            )


def _pop_arrangement(section: dict[str, Any], facts: ModelFacts) -> str:
    """Return the key that says how the axes share the pairs, and remove all such keys.

    "": each axis has one run of pairs.
    """
    found = [key for key in (*PAIR_AXES, "interleaved") if key in section]
    flags = [(key, scalars.boolean(key, section.pop(key))) for key in found]
    flags += [(key, facts.mrope[key]) for key in PAIR_AXES if key in facts.mrope]
    said = {("mrope_interleaved" if key == "interleaved" else key, flag) for key, flag in flags}
    chosen = sorted(key for key, flag in said if flag)
    if len(chosen) > 1 or any((key, False) in said for key in chosen):
        rule = "agree with the other keys of the arrangement, and with the code of the model type"
        raise ArgumentError(chosen[0], Finding("is contradicted"), rule)
    return chosen[0] if chosen else ""
