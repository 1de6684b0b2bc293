"""Configs of language models, alone or inside a multimodal file: the adapter, and the rotation of some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.configs import layers
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.model_types import UNROTATED, ModelFacts, facts_of, value_at
from rope_cpu.configs.rope_parameters import by_layer_type, head_dim, latent
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies.spec import RopeSpec, backwards

Config = Mapping[str, Any]

# The parts of a multimodal config that hold a language model, for model types that no table knows.
PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "llm_cfg",
    "talker_config",
    "decoder_config",
)

# Keys whose null does not stand for the class's default: as many key heads as query heads, and none of the others.
NULL_IS_NONE = (
    *("num_key_value_heads", "sliding_window", "attention_chunk_size", "attn_logit_softcapping"),
    *("attention_multiplier", "query_pre_attn_scalar", "kv_lora_rank", "num_kv_shared_layers"),
)

# What keys hold that are looked into; the values of others are checked where they are used.
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("model_type", "_class_name"), (str, "a string")),
    **dict.fromkeys(
        ("layer_types", "layer_rope_theta", "no_rope_layers"), (list | tuple, "a list")
    ),
    **dict.fromkeys(
        ("attn_config", "attention_other_setting", "per_layer_config", "text_config"),
        (Mapping, "an object"),
    ),
}


def parse(raw: Config) -> ModelConfig:
    """Return the config of a language model, parsed.

    Raises ValueError or TypeError where the model has no rotation, or its rope parameters are malformed.
    """
    text, known = language_model(raw)
    facts, values = known or ModelFacts(), with_defaults(text, known)
    _refuse(text, values, facts)
    unrotated = [
        label for label, key in facts.unrotated.items() if not key or text.get(key, "") is not None
    ]
    return ModelConfig(
        source=raw,
        model_type=values.get("model_type"),
        values=values,
        rotation=_rotation,
        rope_parameters={**by_layer_type(_named(text, facts), facts), **dict.fromkeys(unrotated)},
        facts=facts,
        is_known=known is not None,
    )


def language_model(raw: Config) -> tuple[Config, ModelFacts | None]:
    """Return the config of the language model in `raw`, which may be `raw` itself, and what is known of its type."""
    check_kinds(raw)
    facts = facts_of(str(raw.get("model_type")))
    if facts is not None and facts.part is None:
        return raw, facts
    own_key, part_type = (facts.part or ("", "")) if facts is not None else ("", "")
    for key in (own_key, *PARTS):
        if isinstance(raw.get(key), Mapping):
            return language_model({"model_type": part_type, **raw[key]} if part_type else raw[key])
    if facts is not None:  # an older file has the language model's keys at the top
        return language_model({**raw, "model_type": part_type})
    return raw, None


def check_kinds(config: Config) -> None:
    """Raise where a key of a config does not hold what it is read as."""
    for key, (kind, name) in _KINDS.items():
        value = config.get(key)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"`{key}` is {shown(value)}; it must be {name}")
    _refuse_arrays(config)
    types = config.get("layer_types") or ()
    scalars.check_length("layer_types", types, limits.LAYERS)
    for layer, layer_type in enumerate(types):
        if not isinstance(layer_type, str):
            raise TypeError(
                f"`layer_types` holds {shown(layer_type)} for layer {layer}; it must be a string"
            )


def _refuse_arrays(config: Config) -> None:
    """Raise where a config, or a section of it, holds an array of NumPy's, which has no truth value."""
    for key, value in config.items():
        if isinstance(value, np.ndarray):
            raise TypeError(
                f"`{cut(str(key))}` is {shown(value)}; a config holds what JSON can hold"
            )
        if isinstance(value, Mapping) and any(
            isinstance(inner, np.ndarray) for inner in value.values()
        ):
            raise TypeError(
                f"`{cut(str(key))}` is {shown(value)}; a config holds what JSON can hold"
            )


def with_defaults(text: Config, facts: ModelFacts | None) -> dict[str, Any]:
    """Return a config under standard names, with the defaults of its model type where it is silent."""
    facts, named = facts or ModelFacts(), _named(text, facts or ModelFacts())
    nulls = {key for key in NULL_IS_NONE if text.get(key, "") is None}
    return {
        key: value
        for key, value in {**facts.defaults, **named}.items()
        if key in named or key not in nulls
    }


def _named(text: Config, facts: ModelFacts) -> dict[str, Any]:
    """Return the keys of a config under standard names."""
    values = scaling.without_nulls(text)
    for name, own in facts.names.items():
        if (found := value_at(values, own)) is not None:
            values[name] = found
    return values


def _refuse(text: Config, values: Config, facts: ModelFacts) -> None:
    name = text.get("model_type")
    if name in UNROTATED and not _is_rotary(text):
        raise ValueError(f"`model_type` is {shown(name)}: {UNROTATED[name]}")
    section = text.get("rope_scaling") or text.get("rope_parameters") or text
    if facts.null_theta and isinstance(section, Mapping) and section.get("rope_theta", "") is None:
        raise ValueError(
            f"`rope_theta` is None in a config of model type {shown(name)}: {facts.null_theta}"
        )
    for key, (refused, reason) in facts.refuse.items():
        if values.get(key) in refused or (refused == ["*"] and values.get(key, {}) != {}):
            raise ValueError(
                f"`{key}` is {shown(values.get(key))} in a config of model type {shown(name)}: {reason}"
            )


def _is_rotary(text: Config) -> bool:
    """Return True if a config of an unrotated model type asks for a rotation."""
    attention = text.get("attn_config")
    return (
        text.get("position_embedding_type") == "rotary"
        or text.get("mla_use_nope") is False
        or (isinstance(attention, Mapping) and bool(attention.get("rope")))
    )


def _rotation(
    config: ModelConfig,
    layer_type: str | None,
    layer: int | None,
    interleaved: bool | None,
    angle_dtype: str,
) -> RopeSpec:
    """Return the spec of the layers asked about; see `ModelConfig.spec`."""
    values, facts = config.values, config.facts
    if facts.interleaved is None and interleaved is None:
        name = shown(values.get("model_type"))
        rule = "give `interleaved` (True for pairs (2i, 2i+1), False for (i, i+n))"
        raise ValueError(f"`model_type` is {name}, whose pairing is not known; {rule}")
    label, picked = layers.pick(config.rope_parameters, values, facts, layer_type, layer)
    parameters, width = dict(picked), head_dim(values, facts, label)
    rotary_dim = parameters.pop("rotary_dim", None)
    if latent(values) or (facts.whole_head and scaling.type_of(parameters) == "default"):
        parameters.pop("partial_rotary_factor", None)
    section = parameters.pop("mrope_section", facts.mrope_section)
    by_turns = section is not None and _is_mrope_interleaved(parameters, facts)
    spec = scaling.scaled(
        width,
        rotary_dim=rotary_dim,
        interleaved=_pairing(values, facts, interleaved),
        scaling=parameters,
        max_position_embeddings=values.get("max_position_embeddings"),
        angle_dtype=angle_dtype,
    )
    spec = backwards(spec) if facts.direction < 0 else spec
    if section is None:
        return spec
    section = axes.mrope_shares("mrope_section", section)
    if by_turns and sum(section) < spec.pairs:
        section = (
            spec.pairs - sum(section[1:]),
            *section[1:],
        )  # what is left over is the first axis'
    return axes.spread_spec(spec, section, by_turns)


def _pairing(values: Config, facts: ModelFacts, interleaved: bool | None) -> bool:
    if interleaved is not None:
        return interleaved
    if isinstance(facts.interleaved, str):
        return scalars.boolean(facts.interleaved, values.get(facts.interleaved, True))
    return bool(facts.interleaved)


def _is_mrope_interleaved(parameters: dict[str, Any], facts: ModelFacts) -> bool:
    """Return True if axes take pairs by turns (M-RoPE), and remove the keys for that from the rope parameters."""
    names = [key for key in ("mrope_interleaved", "interleaved") if key in parameters]
    given = {scalars.boolean(key, parameters.pop(key)) for key in names}
    if facts.mrope_interleaved is not None:
        given.add(facts.mrope_interleaved)
    if len(given) > 1:
        raise ValueError(
            f"`{names[-1]}` contradicts what else is known of how pairs are shared out among axes"
        )
    return given == {True}
