"""Adapter for configs of vision towers in transformers, and of the transformers of diffusers.

Two tables: from a model type (vision.json) or the name of a class (diffusers.json) to its row, see
`multi_axis.Row`.

Positions of towers are (row, column), or (time, row, column) for video, from 0 unless their row
says otherwise (`Row.positions`). docs/configs.md describes the positions of diffusers' classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError
from rope_cpu.arguments.texts import shown
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.models import multi_axis
from rope_cpu.models.keys import SECTIONS, check_containers
from rope_cpu.models.model_types import REFUSED as NO_ROTATION
from rope_cpu.models.model_types import data, reasons_by_type
from rope_cpu.models.multi_axis import MultiAxisConfig, Row
from rope_cpu.models.rope_parameters import Config, own_section

_DATA = data("vision.json")

# The rows of vision towers by model type, and those of the classes of diffusers.
TOWERS = multi_axis.rows_by_name(_DATA["rows"], _DATA["defaults"])
CLASSES = multi_axis.rows_by_name(data("diffusers.json"), {})

# From a multimodal model type to that of its `vision_config`.
PARTS = _DATA["parts"]

# Keys that only configs around vision parts, or of text, have.
_WHOLE = frozenset({"vision_config", "text_config", "vocab_size"})

# Model types without a rotation that frequencies of pairs express, and encoders without any.
REFUSED = {**NO_ROTATION, **reasons_by_type("encoders.json")}

# Classes of diffusers whose config determines no rotation, with the reason.
REFUSED_CLASSES = reasons_by_type("refused_classes.json")


def is_diffusers(config: Config) -> bool:
    """Return True for the config of a diffusers transformer of any class."""
    name = config.get("_class_name") or _unnamed_type(config)
    return "_diffusers_version" in config or name in CLASSES or name in REFUSED_CLASSES


def parse_diffusers(config: Config) -> MultiAxisConfig:
    """Parse the config of a diffusers transformer.

    Raises ValueError for other classes. Missing keys are refused when the spec is built.
    Source: the classes of the same names in diffusers 0.42.1.
    """
    name = config.get("_class_name") or _unnamed_type(config)
    if name in REFUSED_CLASSES:
        raise ValueError(f"`_class_name` is {shown(name)}: {REFUSED_CLASSES[name]}")
    if name not in CLASSES:
        rule = f"be one of the {len(CLASSES)} classes that docs/configs.md lists"
        remedy = "use RotaryEmbedding.axial or RotaryEmbedding.from_inv_freq for others"
        raise ArgumentError("_class_name", config.get("_class_name"), rule, remedy)
    return multi_axis.parse(config, name, CLASSES[name], without_nulls(config))


def is_vision(config: Config) -> bool:
    """Return True for the config of a vision tower, or of a model type that is refused like one."""
    name = model_type(_backbone(config))
    return name in TOWERS or name in REFUSED


def parse(config: Config) -> MultiAxisConfig:
    """Parse the config of a vision tower: `config["vision_config"]` of a model, see `tower`.

    Raises ValueError or TypeError if a key is missing or has a value that is not allowed, or if
    the model does not rotate pairs.
    Source: the modules of the same names in transformers 5.24.
    """
    part = _backbone(config)
    name = model_type(part)
    if name in REFUSED:
        raise ValueError(f"`model_type` is {shown(name)}: {REFUSED[name]}")
    row = TOWERS[name]
    values = _standard_names(_flat(row, without_nulls(part)))
    return multi_axis.parse(config, name, row, values)


def tower(config: Config) -> dict[str, Any]:
    """Return the vision part of a multimodal config, with its model type.

    Parameters
    ----------
    config : mapping
        The config of the whole model; of Qwen's Omni models the thinker has the vision part.

    Returns
    -------
    dict
        A config for `RotaryEmbedding.from_config`.

    Raises
    ------
    ValueError
        If the config has no `vision_config`.

    Examples
    --------
    >>> part = tower({"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}})
    >>> part["model_type"]
    'qwen2_vl_vision'
    """
    if not isinstance(config, Mapping):
        raise ArgumentTypeError("config", config, "be the content of a config file")
    check_containers(config)
    thinker = config.get("thinker_config")
    config = thinker if isinstance(thinker, Mapping) else config
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`; give the config of a multimodal model")
    own = part.get("model_type")
    whole = config.get("model_type")
    names = (own, PARTS.get(own), PARTS.get(whole))
    known = next((name for name in names if name in TOWERS or name in REFUSED), own)
    return {**part, "model_type": known or _unnamed_type(part) or PARTS.get(whole, whole) or ""}


def model_type(config: Config) -> str:
    """Return the model type of a config, of the tower for one that has the keys of a vision part.

    Older files of vision parts have the model type of the whole model, or none.
    """
    name = str(config.get("model_type") or "")
    is_part = not config.keys().isdisjoint(_DATA["marks"]) and _WHOLE.isdisjoint(config)
    if name in TOWERS or not is_part:
        return name
    return str(PARTS.get(name, name)) if name else _unnamed_type(config)


def _unnamed_type(config: Config) -> str:
    """Return the model type or class of a file without one; its keys tell, or "" if they do not."""
    found = (name for keys, name in _DATA["unnamed"] if config.keys() >= set(keys))
    return str(next(found, ""))


def _backbone(config: Config) -> Config:
    """Return the config of the backbone that the encoder of a config wraps, or the config."""
    part = config.get("backbone_config")
    return part if isinstance(part, Mapping) and _WHOLE.isdisjoint(config) else config


def _standard_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the numbers that are read under their usual keys."""
    for other, key in _DATA["names"].items():
        value = config.get(other)
        if value is not None and config.setdefault(key, value) != value:
            rule = f"equal `{key}`, {shown(config[key])}, or be left out"
            raise ArgumentError(other, value, rule)
    return config


def _flat(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the rope parameters at the top level, for a class that has them."""
    if "rope_type" not in row.only:
        return values
    key, own = own_section(values)
    known = {"type": "rope_type", "rope_theta": "rope_theta", **{name: name for name in row.only}}
    section = {known.get(name, f"{key}.{name}"): own[name] for name in own}
    others = {name: values[name] for name in values if name not in SECTIONS}
    return others | without_nulls(section)
