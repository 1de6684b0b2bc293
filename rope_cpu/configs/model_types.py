"""The model table: defaults of each model type's config, and facts of its code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

# The first is written by tools/make_model_table.py from the classes of transformers, the
# second by hand from the models' own code.
TABLES = ("models.json", "other_models.json")

# The label of rope parameters that hold for all layers, where others have a layer type.
ALL_LAYERS = ""


@dataclass(frozen=True)
class ModelFacts:
    """One row of the model table, transcribed from the model's own code.

    A label is a layer type, or `ALL_LAYERS` ("") for the one section of all layers. A section is
    a dict of rope parameters.

    Parameters
    ----------
    like : str, optional
        The model type whose row this row extends.
    interleaved : bool or str, optional
        Pairing in the model's code, or the config key that decides it. None: unknown.
    names : {standard key: own key}
        This type's names of standard keys; "part.key" for a key inside a part.
    defaults : {standard key: value}
        Values of standard keys that are missing in a file.
    rope_parameters : section or {layer type: section}, optional
        The section for a file without one.
    filled : {layer type: section}
        Defaults of missing keys in the section of a layer type.
    theta : {label: key}
        The top-level key with the base of a section, in files of the old form.
    partial : {label: key}
        The top-level key with the rotated share (or a width, "…_dim") of a section, likewise.
    sections : {layer type: key}
        The top-level key with a layer type's own section, besides the section of the model.
    scaled : tuple of str
        Layer types that an old flat `rope_scaling` applies to.
    types : {rope type: rope type or section}
        Rope types that mean another one here, or defaults of a section with its rope type.
    assumed : {rope type: section}
        Defaults of missing keys in a section of this type.
    assumed_old : {rope type: section}
        The same, for files of the old form whose layer types differ.
    ignored_with_alpha : tuple of str
        Keys that the code ignores in a section with `alpha`.
    whole_head : bool
        The default rope type ignores `partial_rotary_factor`.
    head_dim_derived : bool
        `head_dim` is computed from other keys, also if the file has it.
    head_dim_ratio : int
        head_dim divided by hidden_size / num_attention_heads.
    layer_head_dim : {layer type: (key, default)}
        The key with the head_dim of a layer type.
    layer_heads : {layer type: {standard key: own key}}
        The keys with the numbers of heads of a layer type.
    blocks : str, optional
        The key with a list of layers, each with an attention of its own.
    multi_query : (flag, override), optional
        One key/value head if config[flag] is true and config[override] is not; override "": none.
    query_group : str, optional
        The key with the number of query heads for each key/value head.
    mrope_section : tuple of int, optional
        Pairs of each axis, for a section without this key.
    mrope_interleaved : bool, optional
        Whether sections are interleaved, for rope parameters without this key.
    arrangement : str, optional
        A key of `text.PAIR_AXES` that is true for sections without it.
    direction : int
        -1 if the code rotates in the other direction.
    unrotated : {layer type: key}
        The layer type is not rotated, unless config[key] is null; key "": always.
    rotated_dense : str, optional
        Dense layers are rotated whatever their type if config[rotated_dense] is 1.
    implied : (key, value, section), optional
        The section is implied if config[key] equals value.
    theta_ratio : str, optional
        The key with a factor on the base.
    refuse : {key: (values, reason)}
        Values that describe no rotation we can express; values ["*"]: any value.
    only : {key: (values, reason)}
        The values of a key that are known; the reason to refuse others.
    needs_theta : bool
        The default base is not known, so that a file without one is refused.
    null_theta : str, optional
        The reason to refuse a base of null. None: null means the default base.
    part : (key, model type), optional
        The key of the language model's config inside this config, and its model type.
    """

    like: str | None = None
    interleaved: bool | str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_parameters: Mapping[str, Any] | None = None
    filled: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    theta: Mapping[str, str] = field(default_factory=lambda: {ALL_LAYERS: "rope_theta"})
    partial: Mapping[str, str] = field(
        default_factory=lambda: {ALL_LAYERS: "partial_rotary_factor"}
    )
    sections: Mapping[str, str] = field(default_factory=dict)
    scaled: tuple[str, ...] = (ALL_LAYERS,)
    types: Mapping[str, Any] = field(default_factory=dict)
    ignored_with_alpha: tuple[str, ...] = ()
    assumed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    assumed_old: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    whole_head: bool = False
    head_dim_derived: bool = False
    head_dim_ratio: int = 1
    layer_head_dim: Mapping[str, Any] = field(default_factory=dict)
    layer_heads: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    blocks: str | None = None
    multi_query: tuple[str, str] | None = None
    query_group: str | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None
    arrangement: str | None = None
    direction: int = 1
    unrotated: Mapping[str, str] = field(default_factory=dict)
    rotated_dense: str | None = None
    implied: tuple[str, Any, Mapping[str, Any]] | None = None
    theta_ratio: str | None = None
    refuse: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    needs_theta: bool = False
    null_theta: str | None = None
    part: tuple[str, str] | None = None

    @property
    def has_layer_sections(self) -> bool:
        """Whether layer types have their own sections."""
        sections = (self.rope_parameters or {}).values()
        return any(section is None or isinstance(section, Mapping) for section in sections)


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key, "part.key" for one inside a part; None for a missing key."""
    part, _, key = path.rpartition(".")
    if not part:
        return config.get(key)
    return (config.get(part) or {}).get(key)


def data(name: str) -> Any:
    """Return the content of a JSON file in the folder `data`."""
    return json.loads(resources.files("rope_cpu.configs.data").joinpath(name).read_text("utf-8"))


def reasons_by_type(name: str) -> dict[str, str]:
    """Return {model type: reason} from a JSON file that lists the model types of each reason."""
    return {
        model_type: reason
        for reason, model_types in data(name).items()
        for model_type in model_types
    }


# Model types whose layers are not rotated, and why.
UNROTATED = reasons_by_type("unrotated.json")

# Model types whose rotation cannot be expressed as frequencies of pairs, and why.
REFUSED = reasons_by_type("refused.json")


@cache
def table_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of the model table by model type, each extended by the row it is like."""
    rows: dict[str, dict[str, Any]] = {}
    for name in TABLES:
        for model_type, row in data(name).items():
            inherited = rows.get(row.get("like", model_type), {})
            defaults = {**inherited.get("defaults", {}), **row.get("defaults", {})}
            rows[model_type] = {**inherited, **row, "defaults": defaults}
    return rows


@cache
def model_facts(model_type: str) -> ModelFacts | None:
    """Return the row of a model type, None for an unknown model type."""
    row = table_rows().get(model_type)
    if row is None:
        return None
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in row.items()
        if key != "source"
    }
    return ModelFacts(**fields)
