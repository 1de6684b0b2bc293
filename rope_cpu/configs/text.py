"""Adapter for configs of language models, alone or inside a multimodal file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import did_you_mean, shown
from rope_cpu.configs.attention_facts import Attention, implied_layer_types
from rope_cpu.configs.containers import SECTIONS, check_containers, objects, refuse_unread_part
from rope_cpu.configs.layers import layer_parameters, values_of_blocks
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.model_types import UNROTATED, ModelFacts, model_facts, table_rows, value_at
from rope_cpu.configs.rope_parameters import head_dim, is_latent, rope_parameters_by_type
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies.spec import RopeSpec, reverse_direction

Config = Mapping[str, Any]

# Keys of the language model in a multimodal config, tried in order after the key that the row of
# the model table names, if it names one.
PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "llm_cfg",
    "talker_config",
    "decoder_config",
)

# Keys, under their standard names, for which null is a value of its own and not the model type's
# default: as many key/value heads as query heads for `num_key_value_heads`, the feature switched
# off for the others.
NULLABLE_KEYS = (
    "num_key_value_heads",
    "sliding_window",
    "attention_chunk_size",
    "attn_logit_softcapping",
    "attention_multiplier",
    "query_pre_attn_scalar",
    "kv_lora_rank",
    "num_kv_shared_layers",
)

# Keys that may stand beside `mrope_section`, each with the function from the numbers of pairs of
# the axes to the axis of each pair. A new arrangement of pairs gets a row here, and its key one in
# `scaling.AXES_KEYS`.
PAIR_AXES: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
    "mrope_interleaved_glm": axes.round_robin_pair_axis,
    "video_rope": axes.time_last_pair_axis,
}

# Top-level keys that change the rotation of some model types. For an unknown type their meaning is
# not known.
_KEYS_OF_TYPES = (
    "rope_type",
    "scaling_factor",
    "dual_chunk_attention_config",
    "use_xpos",
    "mrope_interleaved",
)


@dataclass(frozen=True, kw_only=True)
class TextConfig(ModelConfig):
    """The config of a language model.

    `values` with keys under standard names and `rope_parameters` are sufficient for a spec.
    """

    @property
    def attention(self) -> Attention:
        """The parts of the model's attention besides the rotation."""
        types = {self.model_type, self.facts.like}
        return Attention.from_values(types, self.values, self.source)

    def _build_spec(
        self,
        layer_type: str | None,
        layer: int | None,
        interleaved: bool | None,
        angle_dtype: str,
    ) -> RopeSpec:
        """Pick the rope parameters of the layers and build their spec."""
        values = self.values
        facts = self.facts
        interleaved = self._interleaved(interleaved)
        if not self.is_known:
            _refuse_keys_of_types(values)
        if not self.is_known or facts.needs_theta:
            self._refuse_missing_theta()
        layer_type, section = layer_parameters(self.layers, self.rope_parameters, layer_type, layer)
        section = dict(section)
        width = head_dim(values, facts, layer_type)
        rotary_dim = section.pop("rotary_dim", None)
        # The factor does not apply to a latent head, whose rotated width is given, and not to
        # models that always rotate the whole head.
        ignores_partial = facts.whole_head and scaling.rope_type_name(section) == "default"
        if is_latent(values) or ignores_partial:
            section.pop("partial_rotary_factor", None)
        mrope_section = section.pop("mrope_section", facts.mrope_section)
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
        if facts.direction < 0:
            spec = reverse_direction(spec)
        if mrope_section is None:
            return spec
        return _with_axes(spec, mrope_section, arrangement)

    @cached_property
    def _has_theta(self) -> bool:
        """Whether the config or one of its sections has a base."""
        sections = {key: self.values[key] for key in SECTIONS if key in self.values}
        parts = (part for _, part in objects(sections))
        return any("rope_theta" in part for part in (self.values, *parts))

    def _refuse_missing_theta(self) -> None:
        """Raise if the config has no base, and its default is not known."""
        if self._has_theta:
            return
        name = shown(self.values.get("model_type"))
        unknown = f"the default of `model_type` {name} is not known"
        if not self.is_known:
            unknown = f"`model_type` {name} is not known, and so its default"
        raise ValueError(f"`rope_theta` is missing, and {unknown}; add `rope_theta` to the config")

    def _interleaved(self, interleaved: bool | None) -> bool:
        """Return the pairing: the argument, or that of the model type."""
        if interleaved is not None:
            return interleaved
        pairing = self.facts.interleaved
        if pairing is None:
            model_type = self.values.get("model_type")
            meant = did_you_mean(model_type, table_rows())
            rule = "be True for pairs (2i, 2i+1), or False for (i, i+n)"
            reason = f"`model_type` is {shown(model_type)}{meant}, so the pairing is not known"
            raise ArgumentError("interleaved", None, rule, reason)
        if isinstance(pairing, str):
            return scalars.boolean(pairing, self.values.get(pairing, True))
        return pairing


def parse(raw: Config) -> TextConfig:
    """Parse the config of a language model, or of a multimodal model that contains one.

    Raises ValueError or TypeError if the model is not rotated, or if its rope parameters are
    malformed.
    """
    text, known_facts = language_model(raw)
    facts = known_facts or ModelFacts()
    values = with_defaults(text, facts)
    _refuse_unrotated(text, values, facts)
    # Without defaults, since a value of the file must not be mistaken for one of the model type.
    rope_parameters = rope_parameters_by_type(_standard_names(text, facts), facts)
    for layer_type, key in facts.unrotated.items():
        if key == "" or not _is_null(key, text):
            rope_parameters[layer_type] = None
    return TextConfig(
        source=raw,
        model_type=values.get("model_type"),
        values=values,
        rope_parameters=rope_parameters,
        facts=facts,
        is_known=known_facts is not None,
    )


def language_model(raw: Config) -> tuple[Config, ModelFacts | None]:
    """Return the config of the language model in `raw`, or `raw` itself, and the facts of its type.

    The facts are None for an unknown model type.
    """
    check_containers(raw)
    facts = model_facts(str(raw.get("model_type")))
    if facts is None:
        for key in PARTS:
            if isinstance(raw.get(key), Mapping):
                _refuse_section_beside(raw, key)
                return language_model(raw[key])
        refuse_unread_part(raw, {})
        return raw, None
    if facts.part is None:
        refuse_unread_part(raw, facts.names)
        return raw, facts
    part_key, part_type = facts.part
    for key in (part_key, *PARTS):
        if isinstance(raw.get(key), Mapping):
            return language_model({"model_type": part_type, **raw[key]})
    # An older file has the keys of the language model at the top level.
    part_facts = model_facts(part_type)
    refuse_unread_part(raw, {} if part_facts is None else part_facts.names)
    return language_model({**raw, "model_type": part_type})


def _refuse_section_beside(raw: Config, part_key: str) -> None:
    """Raise for a top-level `mrope_section`: only the language model's own object is read."""
    if raw.get("mrope_section") is not None:
        raise ValueError(
            f"`mrope_section` is {shown(raw['mrope_section'])} beside `{part_key}`, which is read "
            "without it; pass that object, with the section in its rope parameters"
        )


def with_defaults(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return a config under standard names, with its model type's defaults for missing keys."""
    named = _standard_names(text, facts)
    defaults = dict(facts.defaults)
    for key in NULLABLE_KEYS:
        if _is_null(key, text):
            defaults.pop(key, None)
    values = {**defaults, **named}
    if facts.blocks is not None:
        values |= values_of_blocks(facts.blocks, values)
    if "layer_types" not in values:
        values |= implied_layer_types({values.get("model_type"), facts.like}, values)
    return values


def _standard_names(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return the keys of a config under standard names, without nulls."""
    values = scaling.without_nulls(text)
    for name, own_key in facts.names.items():
        value = value_at(values, own_key)
        if value is not None:
            values[name] = value
    return values


def _is_null(key: str, config: Config) -> bool:
    """Return True for a key that is present with a null."""
    return key in config and config[key] is None


def _refuse_keys_of_types(values: Config) -> None:
    """Raise for a key that changes the rotation, in a config of an unknown model type."""
    name = shown(values.get("model_type"))
    for key in _KEYS_OF_TYPES:
        if values.get(key):
            raise ValueError(
                f"`{key}` is {shown(values[key])}, but `model_type` {name} is not known, and so "
                "the meaning of this key; build a RotaryEmbedding from numbers"
            )


def _refuse_unrotated(text: Config, values: Config, facts: ModelFacts) -> None:
    """Raise for models without a rotation, or with one that we cannot express."""
    name = text.get("model_type")
    if name in UNROTATED and not _asks_for_rotation(text):
        raise ValueError(f"`model_type` is {shown(name)}: {UNROTATED[name]}")
    section = text.get("rope_scaling") or text.get("rope_parameters") or text
    if facts.null_theta and isinstance(section, Mapping) and _is_null("rope_theta", section):
        raise ValueError(
            f"`rope_theta` is None in a config of model type {shown(name)}: {facts.null_theta}"
        )
    for key, (refused_values, reason) in facts.refuse.items():
        value = values.get(key)
        # An empty section stands for none.
        refuses_any = refused_values == ["*"] and key in values and value != {}
        if value in refused_values or refuses_any:
            raise ValueError(
                f"`{key}` is {shown(value)} in a config of model type {shown(name)}: {reason}"
            )
    for key, (known_values, reason) in facts.only.items():
        if key in values and values[key] not in known_values:
            raise ValueError(
                f"`{key}` is {shown(values[key])} in a config of model type {shown(name)}: {reason}"
            )


def _asks_for_rotation(text: Config) -> bool:
    """Return True if the config of a model type that is usually not rotated asks for a rotation."""
    attention = text.get("attn_config")
    return (
        text.get("position_embedding_type") == "rotary"
        or text.get("mla_use_nope") is False
        or (isinstance(attention, Mapping) and bool(attention.get("rope")))
    )


def _pop_arrangement(section: dict[str, Any], facts: ModelFacts) -> str:
    """Return the key that says how the axes share the pairs, and remove all such keys.

    "": each axis has one run of pairs.
    """
    flags = {"mrope_interleaved": _pop_mrope_interleaved(section, facts)}
    for key in PAIR_AXES:
        flags[key] = scalars.boolean(key, section.pop(key, facts.arrangement == key))
    chosen = [key for key, flag in flags.items() if flag]
    if len(chosen) > 1:
        raise ValueError(
            f"`{chosen[0]}` and `{chosen[1]}` are both true; they share out the pairs differently"
        )
    return chosen[0] if chosen else ""


def _pop_mrope_interleaved(section: dict[str, Any], facts: ModelFacts) -> bool:
    """Return whether the axes take turns among the pairs, and remove the keys that say so."""
    own_keys = [key for key in ("mrope_interleaved", "interleaved") if key in section]
    flags = {f"`{key}`": scalars.boolean(key, section.pop(key)) for key in own_keys}
    if facts.mrope_interleaved is not None:
        flags["the model type's `mrope_interleaved`"] = facts.mrope_interleaved
    if len(set(flags.values())) > 1:
        flag = flags[f"`{own_keys[-1]}`"]
        other = next(name for name in flags if flags[name] != flag)
        raise ValueError(
            f"`{own_keys[-1]}`={flag} contradicts {other}={flags[other]}; leave one of them out"
        )
    return True in flags.values()


def _with_axes(spec: RopeSpec, mrope_section: Any, arrangement: str) -> RopeSpec:
    """Return the M-RoPE of a rotation with one axis, from the section of a config file."""
    axis_pairs = axes.checked_mrope_section("mrope_section", mrope_section)
    if arrangement in PAIR_AXES:
        return axes.with_pair_axis(spec, PAIR_AXES[arrangement](axis_pairs), len(axis_pairs))
    mrope_interleaved = arrangement == "mrope_interleaved"
    if mrope_interleaved and sum(axis_pairs) < spec.pairs:
        # The first axis takes the remaining pairs.
        other_axes = axis_pairs[1:]
        axis_pairs = (spec.pairs - sum(other_axes), *other_axes)
    return axes.to_mrope(spec, axis_pairs, mrope_interleaved)
