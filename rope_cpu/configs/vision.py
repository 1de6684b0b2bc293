"""Adapter for configs of vision towers in transformers.

One table, vision.json: from a model type to the distribution of pairs among the position axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs import rope_parameters
from rope_cpu.configs.model_config import OneRotationConfig
from rope_cpu.configs.model_types import REFUSED, data
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes


@dataclass(frozen=True)
class Tower:
    """The rotation of one vision tower: a row of vision.json.

    pairs: distribution of pairs among axes, a name in `_PAIR_LAYOUTS`. order: the axes in the order
    of their pairs. rope_theta: the default base. partial: the only partial_rotary_factor that the
    model accepts. head_dim: key of the width that heads share, or a name in `_HEAD_DIMS`. axes: its
    position axes, keys of axes.json.
    """

    pairs: str
    order: Sequence[int] = (0, 1)
    interleaved: bool = False
    rope_theta: float = 10000.0
    partial: float = 1.0
    head_dim: str = "hidden_size"
    axes: Sequence[str] = ("row", "column")


_DATA = data("vision.json")
TOWERS = {
    name: Tower(**{key: value for key, value in row.items() if key != "types"})
    for row in _DATA["towers"]
    for name in row["types"]
}


@dataclass(frozen=True, kw_only=True)
class VisionConfig(OneRotationConfig):
    """The config of a vision tower.

    Positions are (row, column), or (time, row, column) for video. They start at 0, but at 1 for
    Llama-4 (the class token has id 0) and EfficientLoFTR (which rotates all heads as one vector).
    DINOv3, EoMT and Sapiens-2 take patch centres from -1 to 1.
    """

    tower: Tower
    head_dim: int
    rope_theta: float

    def _only_spec(self, angle_dtype: str) -> RopeSpec:
        pair_layout = _PAIR_LAYOUTS[self.tower.pairs]
        return pair_layout(self.tower, self.head_dim, self.rope_theta, angle_dtype)


def is_vision(config: Mapping[str, Any]) -> bool:
    """Return True for the config of a vision tower, or of a model type that is refused like one."""
    name = model_type(config)
    return name in TOWERS or name in REFUSED


def parse(config: Mapping[str, Any]) -> VisionConfig:
    """Parse the config of a vision tower: `config["vision_config"]` of a model, see `tower`.

    Raises ValueError or TypeError if a key is missing or has a value that is not allowed, or if
    the model does not rotate pairs.
    Source: the modules of the same names in transformers 5.24.
    """
    name = model_type(config)
    if name in REFUSED:
        raise ValueError(f"`model_type` is {shown(name)}: {REFUSED[name]}")
    values = without_nulls(config)
    row = TOWERS[name]
    return VisionConfig(
        source=config,
        model_type=name,
        values=values,
        axes=row.axes,
        tower=row,
        head_dim=_head_dim(values, row),
        rope_theta=_theta(values, row),
    )


def tower(config: Mapping[str, Any]) -> dict[str, Any]:
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


def model_type(config: Mapping[str, Any]) -> str:
    """Return the model type of a config; a `patch_size` marks a vision part."""
    name = config.get("model_type")
    is_part = "patch_size" in config and "vision_config" not in config
    return _part_type(config, name) if is_part else str(name or "")


def _part_type(part: Mapping[str, Any], name: str | None) -> str:
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


def _head_dim(values: Mapping[str, Any], row: Tower) -> int:
    """Return the width of a head in elements."""
    own_rule = _HEAD_DIMS.get(row.head_dim)
    if own_rule is not None:
        return own_rule(values)
    width_key = row.head_dim
    if values.get("head_dim") is not None:
        return whole_number("head_dim", values["head_dim"], 2, limits.HEAD_DIM)
    width = _first_value(values, width_key, f"vt_{width_key}")
    heads = _first_value(values, "num_attention_heads", "num_heads", "vt_num_attention_heads")
    width = whole_number(width_key, width, 2, limits.HIDDEN_SIZE)
    heads = whole_number("num_attention_heads", heads, 1, limits.HEADS)
    if width % heads:
        raise ValueError(f"`{width_key}` is {width}, which {heads} heads cannot share equally")
    return int(width // heads)


def _first_value(config: Mapping[str, Any], *keys: str) -> Any:
    """Return the value of the first key that is present; raise if none is."""
    for key in keys:
        if key in config:
            return config[key]
    raise ValueError(f"`config` has no `{keys[0]}`")


def _projection_head_dim(values: Mapping[str, Any]) -> int:
    """Return hidden_size // heads: the projections are heads · head_dim wide."""
    return rope_parameters.head_dim(values, None)


def _all_heads_dim(values: Mapping[str, Any]) -> int:
    """Return the width of all heads, which are rotated as one vector."""
    hidden_size = _first_value(values, "hidden_size")
    return whole_number("hidden_size", hidden_size, 1, limits.HEAD_DIM)


def _memory_head_dim(values: Mapping[str, Any]) -> int:
    """Return the head_dim of the memory attention of SAM 2."""

    def number(name: str, most: int) -> int:
        key = f"memory_attention_{name}"
        return whole_number(key, _first_value(values, key), 1, most)

    width = number("hidden_size", limits.HIDDEN_SIZE)
    rate = number("downsample_rate", limits.HIDDEN_SIZE)
    heads = number("num_attention_heads", limits.HEADS)
    return width // (rate * heads)


# Rules for head_dim other than a share of the width under a key, by their name in `Tower.head_dim`.
_HEAD_DIMS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "own projections": _projection_head_dim,
    "memory attention": _memory_head_dim,
    "all heads": _all_heads_dim,
}


def _theta(values: Mapping[str, Any], row: Tower) -> float:
    """Return the base; raise for a section with other keys than the base and its type."""
    key, own = rope_parameters.own_section(values)
    section = without_nulls(own)
    rope_type = section.get("rope_type", section.get("type", "axial"))
    if rope_type not in ("axial", "default"):
        raise ValueError(f"`rope_type` is {shown(rope_type)}; vision towers take no scaling")
    partial = section.get("partial_rotary_factor", row.partial)
    if partial != row.partial:
        raise ValueError(
            f"`partial_rotary_factor` is {shown(partial)}; this vision tower has {row.partial}"
        )
    allowed = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    unknown = [name for name in section if name not in allowed]
    if unknown:
        raise ValueError(f"`{key}` holds {shown(unknown)}; a vision tower does not use these keys")
    theta = section.get("rope_theta", values.get("rope_theta", row.rope_theta))
    return real_number("rope_theta", theta)


def _consecutive_runs(row: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give each axis a run of pairs across the head, the runs in the order of `Tower.order`."""
    count = len(row.order)
    frequencies = axes.base_frequencies(theta, 2 * (head_dim // count // 2), angle_dtype)
    inv_freq = np.tile(frequencies, count)
    pair_axis = np.repeat(row.order, frequencies.size)
    return _spec(inv_freq, pair_axis, head_dim, row.interleaved, angle_dtype)


def _alternating_pairs(row: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give each of n axes every n-th pair; n consecutive pairs share a frequency."""
    count = len(row.order)
    frequencies = axes.base_frequencies(theta, head_dim // count, angle_dtype)
    inv_freq = np.repeat(frequencies, count)
    pair_axis = np.tile(row.order, frequencies.size)
    return _spec(inv_freq, pair_axis, head_dim, row.interleaved, angle_dtype)


def _half_blocks(row: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Pair elements within each half of the head, row first (Gemma-4)."""
    frequencies = axes.base_frequencies(theta, 2 * (head_dim // 4), angle_dtype)
    return axes.concatenated_axes(
        [frequencies, frequencies], head_dim=head_dim, blocks=2, angle_dtype=angle_dtype
    )


def _alternating_frequencies(row: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give even frequencies of the whole head to the row, odd ones to the column (Pixtral)."""
    frequencies = axes.base_frequencies(theta, head_dim, angle_dtype)
    return axes.concatenated_axes(
        [frequencies[0::2], frequencies[1::2]], head_dim=head_dim, angle_dtype=angle_dtype
    )


def _revolutions(row: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give row and column a run of pairs each; positions count revolutions (DINOv3)."""
    frequencies = 2 * np.pi * axes.base_frequencies(theta, head_dim // 2, angle_dtype)
    return axes.concatenated_axes(
        [frequencies, frequencies], head_dim=head_dim, angle_dtype=angle_dtype
    )


def _spec(
    inv_freq: Float64, pair_axis: Any, head_dim: int, interleaved: bool, angle_dtype: str
) -> RopeSpec:
    """Return the rotation of pair j on axis pair_axis[j] with frequency inv_freq[j]."""
    return from_inv_freq(
        spread_over_axes(inv_freq, pair_axis, int(pair_axis.max()) + 1),
        head_dim=head_dim,
        interleaved=interleaved,
        pair_axis=tuple(pair_axis.tolist()),
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


# Distributions of pairs among axes, by their name in `Tower.pairs`.
_PAIR_LAYOUTS: dict[str, Callable[[Tower, int, float, str], RopeSpec]] = {
    "runs": _consecutive_runs,
    "every nth": _alternating_pairs,
    "blocks": _half_blocks,
    "alternate": _alternating_frequencies,
    "revolutions": _revolutions,
}
