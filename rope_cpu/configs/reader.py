"""Hugging Face configs → spec: either what the model's own code rotates by, or an error that says why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rope_cpu.configs import layers as layers_
from rope_cpu.configs import vision
from rope_cpu.configs.model_types import UNROTATED, Model, model
from rope_cpu.configs.rope_parameters import head_dim, latent, sections
from rope_cpu.frequencies import axes, scaling
from rope_cpu.frequencies import spec as specs
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.validation import scalars

Config = Mapping[str, Any]

# What keys hold that are looked into; the values of others are checked where they are used.
_KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("model_type", "_class_name"), (str, "a string")),
    **dict.fromkeys(("layer_types", "layer_rope_theta", "no_rope_layers"), (list | tuple, "a list")),
    **dict.fromkeys(("attn_config", "per_layer_config", "text_config"), (Mapping, "an object")),
}

# The parts of a multimodal config that hold a language model, for model types that no table knows.
TEXT_PARTS = ("text_config", "llm_config", "language_config", "llm_cfg", "talker_config", "decoder_config")


def read(
    config: str | PathLike[str] | Config,
    *,
    layer_type: str | None = None,
    layer: int | None = None,
    interleaved: bool | None = None,
    angle_dtype: str = "float64",
) -> RopeSpec:
    """Return the rotation that a Hugging Face config describes; the arguments are `RotaryEmbedding.from_config`'s."""
    raw = load(config)
    if interleaved is not None:
        interleaved = scalars.boolean("interleaved", interleaved)
    if layer_type is not None and not isinstance(layer_type, str):
        raise TypeError(f"`layer_type` is {layer_type!r}; it must be a string")
    seen = vision.read(raw, angle_dtype=angle_dtype)
    if seen is not None:
        return _as_said(seen, layer_type, layer, interleaved)
    values, known, found = layers(raw)
    if known.interleaved is None and interleaved is None:
        raise ValueError(
            f"`model_type` is {values.get('model_type')!r}, whose pairing is not known; say `interleaved` (True for "
            "pairs (2i, 2i+1), False for (i, i+n))"
        )
    label, section = layers_.pick(found, values, known, layer_type, layer)
    return _spec(values, known, label, section, _pairing(values, known, interleaved), angle_dtype)


def load(config: str | PathLike[str] | Config) -> dict[str, Any]:
    """Return the dict of a config: the one given, or that of a file or of a folder's config.json.

    Raises TypeError for anything else, ValueError where there is no such file or it holds no JSON object, and OSError
    where it cannot be read.
    """
    if isinstance(config, Mapping):
        _check_kinds(config)
        return dict(config)
    if not isinstance(config, str | PathLike):
        raise TypeError(f"`config` is a {type(config).__name__}; it must be a path or a dict")
    path = Path(fspath(config))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"`config` is {fspath(config)!r}, where there is no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`config` {fspath(path)!r} is no JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"`config` {fspath(path)!r} holds a {type(raw).__name__}; it must hold an object")
    _check_kinds(raw)
    return raw


def _check_kinds(config: Config) -> None:
    """Raise where a key does not hold what it is read as."""
    for key, (kind, name) in _KINDS.items():
        value = config.get(key)
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"`{key}` is {value!r}; it must be {name}")


def layers(raw: Config) -> tuple[dict[str, Any], Model, dict[str, dict[str, Any] | None]]:
    """Return the language model's config with its defaults, what is known of its type, and its rope sections.

    Sections stand under their layer types, one for all layers under ""; None where layers of a type are not rotated.

    Raises ValueError or TypeError where the model has no rotation, or its sections are malformed.
    """
    text, known = language_model(raw)
    values = with_defaults(text, known)
    _refuse(text, values, known)
    unrotated = [label for label, key in known.unrotated.items() if not key or text.get(key, "") is not None]
    return values, known, {**sections(_named(text, known), known), **dict.fromkeys(unrotated)}


def _as_said(seen: RopeSpec, layer_type: str | None, layer: int | None, interleaved: bool | None) -> RopeSpec:
    """Return the spec of a config with several axes; raise where an argument contradicts it."""
    for name, given in (("layer_type", layer_type), ("layer", layer)):
        if given is not None:
            raise ValueError(f"`{name}` is {given!r}, but this config has one rotation for all layers")
    if interleaved not in (None, seen.interleaved):
        raise ValueError(f"`interleaved` is {interleaved}, but this config's model has {seen.interleaved}")
    return seen


def language_model(raw: Config) -> tuple[Config, Model]:
    """Return the config of the language model in `raw`, which may be `raw` itself, and what is known of its type."""
    _check_kinds(raw)
    known = model(str(raw.get("model_type")))
    if known is not None and known.part is not None:
        own_key, part_type = known.part
        for key in (own_key, *TEXT_PARTS):
            if isinstance(raw.get(key), Mapping):
                return language_model({"model_type": part_type, **raw[key]})
        return language_model(
            {**raw, "model_type": part_type}
        )  # an older file has the language model's keys at the top
    if known is None:
        for key in TEXT_PARTS:
            if isinstance(raw.get(key), Mapping):
                return language_model(raw[key])
    return raw, known or Model()


def with_defaults(text: Config, known: Model) -> dict[str, Any]:
    """Return the config with standard names, and with the defaults of its model type where it is silent."""
    return {**known.defaults, **_named(text, known)}


def _named(text: Config, known: Model) -> dict[str, Any]:
    """Return what the config says, under standard names."""
    values = scaling.without_nulls(text)
    for name, own in known.names.items():
        part, _, key = own.rpartition(".")
        found = (values.get(part) or {}).get(key) if part else values.get(key)
        if found is not None:
            values[name] = found
    return values


def _refuse(text: Config, values: Config, known: Model) -> None:
    name = text.get("model_type")
    if name in UNROTATED and not _says_rotary(text):
        raise ValueError(f"`model_type` is {name!r}: {UNROTATED[name]}")
    section = text.get("rope_scaling") or text.get("rope_parameters") or text
    if known.null_theta and isinstance(section, Mapping) and section.get("rope_theta", "") is None:
        raise ValueError(f"`rope_theta` is None in a config of model type {name!r}: {known.null_theta}")
    for key, (refused, reason) in known.refuse.items():
        if values.get(key) in refused or (refused == ["*"] and values.get(key, {}) != {}):
            raise ValueError(f"`{key}` is {values.get(key)!r} in a config of model type {name!r}: {reason}")


def _says_rotary(text: Config) -> bool:
    """Tell whether a file says that its model rotates, of a type whose models mostly do not."""
    attention = text.get("attn_config")
    return (
        text.get("position_embedding_type") == "rotary"
        or text.get("mla_use_nope") is False
        or (isinstance(attention, Mapping) and bool(attention.get("rope")))
    )


def _pairing(values: Config, known: Model, interleaved: bool | None) -> bool:
    if interleaved is not None:
        return interleaved
    if isinstance(known.interleaved, str):
        return scalars.boolean(known.interleaved, values.get(known.interleaved, True))
    return bool(known.interleaved)


def _spec(
    values: Config, known: Model, label: str | None, section: Config, interleaved: bool, angle_dtype: str
) -> RopeSpec:
    width = head_dim(values, known, label)
    section = dict(section)
    rotary_dim = section.pop("rotary_dim", None)
    if latent(values) or (known.whole_head and scaling.type_of(section) == "default"):
        section.pop("partial_rotary_factor", None)
    shares = section.pop("mrope_section", known.mrope_section)
    dealt = shares is not None and _dealt(section, known)
    spec = scaling.scaled(
        width,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=section,
        max_position_embeddings=values.get("max_position_embeddings"),
        angle_dtype=angle_dtype,
    )
    if known.direction < 0:
        spec = specs.backwards(spec)
    if shares is None:
        return spec
    if dealt and isinstance(shares, list | tuple) and sum(shares) < spec.pairs:
        shares = (spec.pairs - sum(shares[1:]), *shares[1:])  # what is left over is the first axis'
    return axes.spread_spec(spec, shares, dealt)


def _dealt(section: dict[str, Any], known: Model) -> bool:
    """Take the keys out of a section that say whether pairs are dealt out to the axes in turn (M-RoPE)."""
    names = [key for key in ("mrope_interleaved", "interleaved") if key in section]
    said = {scalars.boolean(key, section.pop(key)) for key in names}
    if known.mrope_interleaved is not None:
        said.add(known.mrope_interleaved)
    if len(said) > 1:
        raise ValueError(f"`{names[-1]}` contradicts what else is known of how pairs are shared out among axes")
    return said == {True}
