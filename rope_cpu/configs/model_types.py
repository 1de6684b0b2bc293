"""What is known of model types: the defaults of their configs, and which elements their code pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

# Made by tests/tools/make_model_table.py from transformers' classes, and written by hand from models' own code.
TABLES = ("models.json", "other_models.json")


@dataclass(frozen=True)
class ModelFacts:
    """One row: the facts of a model type, each as its classes or its code have it, none a rule of ours.

    like: the model type whose facts this one has, but for its own.
    interleaved: the pairing of the model's code, or the name of the config key that decides it.
    names: this type's own names of standard keys, "part.key" inside a part.
    defaults: values of standard keys where a file has none.
    rope_parameters: the section where a file has none; by layer type where layers differ.
    filled: layer type → what a section of its own is filled up with.
    theta, partial: which old top-level key fills the base and the rotated share of which section ("": the flat one).
    sections: layer type → the key of a section of its own, beside that of the model.
    scaled: the layer types that an old flat `rope_scaling` applies to.
    types: rope types that mean another one here. assumed, assumed_old: rope type → what its section (of the new form,
        of the old one) holds where it is silent.
    ignored_with_alpha: keys that the model's code takes no notice of in a section with `alpha`.
    whole_head: the default rope type takes no notice of partial_rotary_factor.
    head_dim_derived: `head_dim` follows from other keys. head_dim_ratio: head_dim over hidden_size /
        num_attention_heads. layer_head_dim: layer type → (key, default) of a head_dim of its own.
    layer_heads: layer type → standard key of a number of heads → the key that this type has it under.
    multi_query: a key that says that there is one key head, unless another says otherwise ("": none does).
    mrope_section, mrope_interleaved: how pairs are shared out among axes where the section has no such key.
    direction: -1 where the code rotates the other way. theta_ratio: a key whose value multiplies the base.
    implied: key, value and the section that they stand for.
    unrotated: layer types that the model's code does not rotate, with the key whose null undoes it ("": none).
    rotated_dense: the key that is 1 where dense layers are rotated whatever their type.
    refuse: key → (values, or "*" for any, why): the model has no rotation that could be described.
    null_theta: why a base of null is refused, where it does not stand for the default base.
    part: the key of the language model's config inside this one, and its model type.
    """

    like: str | None = None
    interleaved: bool | str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_parameters: Mapping[str, Any] | None = None
    filled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    theta: Mapping[str, str] = field(default_factory=lambda: {"": "rope_theta"})
    partial: Mapping[str, str] = field(default_factory=lambda: {"": "partial_rotary_factor"})
    sections: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[str, ...] = ("",)
    types: Mapping[str, str] = field(default_factory=dict)
    ignored_with_alpha: tuple[str, ...] = ()
    assumed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    assumed_old: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole_head: bool = False
    head_dim_derived: bool = False
    head_dim_ratio: int = 1
    layer_head_dim: Mapping[str, Any] = field(default_factory=dict)
    layer_heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    multi_query: tuple[str, str] | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None
    direction: int = 1
    unrotated: Mapping[str, str] = field(default_factory=dict)
    rotated_dense: str | None = None
    implied: tuple[str, Any, Mapping[str, Any]] | None = None
    theta_ratio: str | None = None
    refuse: Mapping[str, Any] = field(default_factory=dict)
    null_theta: str | None = None
    part: tuple[str, str] | None = None

    @property
    def layered(self) -> bool:
        """Whether layer types have sections of their own."""
        return any(
            value is None or isinstance(value, Mapping)
            for value in (self.rope_parameters or {}).values()
        )


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value under a key, "part.key" inside a part; None where there is none."""
    part, _, key = path.rpartition(".")
    return ((config.get(part) or {}) if part else config).get(key)


def data(name: str) -> Any:
    """Return what a file of the folder `data` holds."""
    return json.loads(resources.files("rope_cpu.configs.data").joinpath(name).read_text("utf-8"))


def by_type(name: str) -> dict[str, str]:
    """Return model type → reason, from a file that has the types under each reason."""
    return {model_type: reason for reason, types in data(name).items() for model_type in types}


# Model types without a rotation, and why.
UNROTATED = by_type("unrotated.json")


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name in TABLES:
        for model_type, row in data(name).items():
            like = rows.get(row.get("like", model_type), {})
            rows[model_type] = {
                **like,
                **row,
                "defaults": {**like.get("defaults", {}), **row.get("defaults", {})},
            }
    return rows


@cache
def facts_of(model_type: str) -> ModelFacts | None:
    """Return what is known of a model type, or None."""
    row = _rows().get(model_type)
    if row is None:
        return None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in row.items()
        if key != "source"
    }
    return ModelFacts(**fields)
