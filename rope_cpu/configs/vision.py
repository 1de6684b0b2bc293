"""Adapter for configs of vision towers in transformers.

One table, vision.json: from a model type to its row, see `multi_axis.Row`.

Positions are (row, column), or (time, row, column) for video. They start at 0, but at 1 for Llama-4
(the class token has id 0) and EfficientLoFTR (which rotates all heads as one vector). DINOv3, EoMT
and Sapiens-2 take patch centres from -1 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments.texts import shown
from rope_cpu.configs import rope_parameters
from rope_cpu.configs.model_types import REFUSED, data
from rope_cpu.configs.multi_axis import Config, MultiAxisConfig, Row, rows_by_name
from rope_cpu.frequencies.scaling import without_nulls

_DATA = data("vision.json")
TOWERS = rows_by_name(_DATA["rows"])


def is_vision(config: Config) -> bool:
    """Return True for the config of a vision tower, or of a model type that is refused like one."""
    name = model_type(config)
    return name in TOWERS or name in REFUSED


def parse(config: Config) -> MultiAxisConfig:
    """Parse the config of a vision tower: `config["vision_config"]` of a model, see `tower`.

    Raises ValueError or TypeError if a key is missing or has a value that is not allowed, or if
    the model does not rotate pairs.
    Source: the modules of the same names in transformers 5.24.
    """
    name = model_type(config)
    if name in REFUSED:
        raise ValueError(f"`model_type` is {shown(name)}: {REFUSED[name]}")
    row = TOWERS[name]
    values = _flat(row, _standard_names(without_nulls(config)))
    return MultiAxisConfig(source=config, model_type=name, values=values, axes=row.axes, row=row)


def tower(config: Config) -> dict[str, Any]:
    """Return the vision part of a multimodal config, with its model type.

    Parameters
    ----------
    config : mapping
        The config of the whole model.

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
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`; give the config of a multimodal model")
    name = part.get("model_type") or config.get("model_type")
    return {**part, "model_type": _part_type(part, name)}


def model_type(config: Config) -> str:
    """Return the model type of a config; a `patch_size` marks a vision part."""
    name = config.get("model_type")
    is_part = "patch_size" in config and "vision_config" not in config
    return _part_type(config, name) if is_part else str(name or "")


def _part_type(part: Config, name: str | None) -> str:
    """Return the model type of a vision part; older files have that of the whole model, or none."""
    if not name:
        # The keys tell unnamed parts apart; two Qwen models differ in the key of the width.
        for keys, unnamed_type in _DATA["unnamed"]:
            if part.keys() >= set(keys):
                return str(unnamed_type)
        return ""
    for known in (name, f"{name}_vision", f"{name}_vision_encoder"):
        if known in TOWERS:
            return known
    return name


def _standard_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the width and the number of heads under their usual keys."""
    for key, others in _DATA["names"].items():
        for other in others:
            if other in config:
                config.setdefault(key, config[other])
    return config


def _flat(row: Row, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the base of the rope parameters at the top level; check the others."""
    key, own = rope_parameters.own_section(values)
    section = without_nulls(own)
    rope_type = section.pop("rope_type", section.pop("type", "axial"))
    if rope_type not in ("axial", "default"):
        raise ValueError(f"`rope_type` is {shown(rope_type)}; vision towers take no scaling")
    partial = section.pop("partial_rotary_factor", row.partial_rotary_factor)
    if partial != row.partial_rotary_factor:
        raise ValueError(
            f"`partial_rotary_factor` is {shown(partial)}; this vision tower has "
            f"{row.partial_rotary_factor}"
        )
    unknown = [name for name in section if name != "rope_theta"]
    if unknown:
        raise ValueError(f"`{key}` holds {shown(unknown)}; a vision tower does not use these keys")
    return {**values, **section}
