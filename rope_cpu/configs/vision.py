"""Configurations of vision towers in transformers → spec: one table, model type → how pairs belong to axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import real_number, whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs import rope_parameters, text
from rope_cpu.configs.model_config import ModelConfig, of_all_layers
from rope_cpu.configs.model_types import ModelFacts, by_type, data
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import type_of, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, on_axes


@dataclass(frozen=True)
class Tower:
    """How one vision tower rotates, a row of vision.json.

    pairs: how they belong to axes, see _PAIRS; order: the axes in their order. rope_theta: the default base.
    partial: the only partial_rotary_factor that the model works with. head_dim: the key of the width that heads share,
    or a name in _HEAD_DIMS.
    """

    pairs: str
    order: Sequence[int] = (0, 1)
    interleaved: bool = False
    rope_theta: float = 10000.0
    partial: float = 1.0
    head_dim: str = "hidden_size"


# Model types without a rotation of heads that could be described, and why.
REFUSED = by_type("refused.json")

_DATA = data("vision.json")
TOWERS = {
    name: Tower(**{key: value for key, value in row.items() if key != "types"})
    for row in _DATA["towers"]
    for name in row["types"]
}


def is_vision(config: Mapping[str, Any]) -> bool:
    """Return True for the configuration of a vision tower, or of Ernie-4.5-VL, whose text has several axes too."""
    name = model_type(config)
    return name in TOWERS or name in REFUSED or name in _ERNIE


def parse(config: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a vision tower, parsed.

    config: of the tower itself (`config["vision_config"]`, see `tower`). Two language models are met here as well,
        because of their several axes: that of Ernie-4.5-VL, whose order of axes no key of a section describes, is
        read, alone or in the whole model; that of HunYuan-VL is refused.

    Positions have the coordinates (row, column), (time, row, column) for video and text. They start at 0, but at 1 for
    Llama-4 (the class token has id 0) and EfficientLoFTR (all heads as one vector); DINOv3, EoMT and Sapiens-2 take
    patch centres from -1 to 1.

    Raises ValueError or TypeError where a key is missing or holds what it must not, or the model does not rotate pairs.
    Source: the modules of the same names in transformers 5.23.
    """
    name, values = model_type(config), without_nulls(config)
    if name in REFUSED:
        raise ValueError(f"`model_type` is {shown(name)}: {REFUSED[name]}")
    if name in _ERNIE:
        values = text.with_defaults(*text.language_model(config))
        rotation = of_all_layers(partial(_ernie, values))
    else:
        row = TOWERS[name]
        own_head_dim = _HEAD_DIMS.get(row.head_dim)
        head_dim = own_head_dim(values) if own_head_dim else _head_dim(values, row.head_dim)
        rotation = of_all_layers(partial(_PAIRS[row.pairs], row, head_dim, _theta(values, row)))
    return ModelConfig(source=config, model_type=name, values=values, rotation=rotation)


def tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vision part of a whole model's configuration, with the model type that `read` knows it by.

    Raises ValueError where there is no vision part.
    """
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`")
    return {
        **part,
        "model_type": _part_type(part, part.get("model_type") or config.get("model_type")),
    }


def model_type(config: Mapping[str, Any]) -> str:
    """Return the model type of a configuration; a vision part is recognised by its `patch_size`."""
    name = config.get("model_type")
    is_part = "patch_size" in config and "vision_config" not in config
    return _part_type(config, name) if is_part else str(name or "")


def _part_type(part: Mapping[str, Any], name: str | None) -> str:
    """Return a vision part's own model type, where older files repeat that of the whole model or name none."""
    if not name:
        # Keys of files without a model type; those of the two Qwen models differ in where the width stands.
        return next((named for keys, named in _DATA["unnamed"] if part.keys() >= set(keys)), "")
    return next(
        (known for known in (name, f"{name}_vision", f"{name}_vision_encoder") if known in TOWERS),
        name,
    )


def _head_dim(config: Mapping[str, Any], width_key: str) -> int:
    if config.get("head_dim") is not None:
        return whole_number("head_dim", config["head_dim"], 2, limits.HEAD_DIM)
    width = _first(config, width_key, f"vt_{width_key}")
    heads = _first(config, "num_attention_heads", "num_heads", "vt_num_attention_heads")
    width = whole_number(width_key, width, 2, limits.HIDDEN_SIZE)
    heads = whole_number("num_attention_heads", heads, 1, limits.HEADS)
    if width % heads:
        raise ValueError(f"`{width_key}` is {width}, which {heads} heads cannot share equally")
    return width // heads


def _floored_head_dim(config: Mapping[str, Any]) -> int:
    """Return the head_dim of a model with projections of its own width, heads · head_dim, whatever hidden_size is."""
    return rope_parameters.head_dim(config, ModelFacts(), None)


def _first(config: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if key in config:
            return config[key]
    raise ValueError(f"`config` has no `{keys[0]}`")


def _hidden_size(config: Mapping[str, Any]) -> int:
    """Return the width of all heads, which are rotated as one vector."""
    return whole_number("hidden_size", _first(config, "hidden_size"), 1, limits.HEAD_DIM)


def _memory_head_dim(config: Mapping[str, Any]) -> int:
    def number(name: str, most: int) -> int:
        key = f"memory_attention_{name}"
        return whole_number(key, _first(config, key), 1, most)

    width = number("hidden_size", limits.HIDDEN_SIZE)
    rate = number("downsample_rate", limits.HIDDEN_SIZE)
    heads = number("num_attention_heads", limits.HEADS)
    return width // (rate * heads)


def _theta(config: Mapping[str, Any], known: Tower) -> float:
    """Return the base; raise for a section that asks for more than that."""
    key, own = rope_parameters.own_section(config)
    section = without_nulls(own)
    rope_type = section.get("rope_type", section.get("type", "axial"))
    if rope_type not in ("axial", "default"):
        raise ValueError(f"`rope_type` is {shown(rope_type)}; vision towers take no scaling")
    partial = section.get("partial_rotary_factor", known.partial)
    if partial != known.partial:
        raise ValueError(
            f"`partial_rotary_factor` is {shown(partial)}; this vision tower has {known.partial}"
        )
    unknown = [
        name
        for name in section
        if name not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")
    ]
    if unknown:
        raise ValueError(f"`{key}` holds {shown(unknown)}, which a vision tower has no use for")
    return real_number(
        "rope_theta", section.get("rope_theta", config.get("rope_theta", known.rope_theta))
    )


def _runs(tower: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give each axis a run of pairs across the head, the runs in the order of these axes."""
    each = axes.base_frequencies(theta, 2 * (head_dim // len(tower.order) // 2), angle_dtype)
    inv_freq, pair_axis = np.tile(each, len(tower.order)), np.repeat(tower.order, each.size)
    return _spec(inv_freq, pair_axis, head_dim, tower.interleaved, angle_dtype)


def _every_nth(tower: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give each of n axes every n-th pair, n pairs sharing a frequency."""
    each = axes.base_frequencies(theta, head_dim // len(tower.order), angle_dtype)
    inv_freq, pair_axis = np.repeat(each, len(tower.order)), np.tile(tower.order, each.size)
    return _spec(inv_freq, pair_axis, head_dim, tower.interleaved, angle_dtype)


def _blocks(tower: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Rotate each half of the head in itself, the first with the row (Gemma-4)."""
    each = axes.base_frequencies(theta, 2 * (head_dim // 4), angle_dtype)
    return axes.axis_after_axis([each, each], head_dim=head_dim, blocks=2, angle_dtype=angle_dtype)


def _alternate(tower: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give even frequencies of the whole head to the row, odd ones to the column (Pixtral)."""
    every = axes.base_frequencies(theta, head_dim, angle_dtype)
    return axes.axis_after_axis(
        [every[0::2], every[1::2]], head_dim=head_dim, angle_dtype=angle_dtype
    )


def _in_revolutions(tower: Tower, head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give row and column a run of pairs each, and positions the unit of a revolution (DINOv3)."""
    each = 2 * np.pi * axes.base_frequencies(theta, head_dim // 2, angle_dtype)
    return axes.axis_after_axis([each, each], head_dim=head_dim, angle_dtype=angle_dtype)


_ERNIE = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")


def _ernie(config: Mapping[str, Any], angle_dtype: str) -> RopeSpec:
    """Give time the slowest pairs, and row and column every second of the others (the text model of Ernie-4.5-VL)."""
    section = without_nulls(rope_parameters.own_section(config)[1])
    if type_of(section) != "default":
        raise ValueError(
            f"`rope_type` is {shown(type_of(section))}; Ernie-4.5-VL takes only default"
        )
    shares = axes.mrope_shares("mrope_section", section.get("mrope_section", (22, 22, 20)))
    head_dim = _floored_head_dim(config)
    every = axes.base_frequencies(
        section.get("rope_theta", config["rope_theta"]), head_dim, angle_dtype
    )
    if len(shares) != 3 or shares[0] != shares[1] or sum(shares) != every.size:
        raise ValueError(
            f"`mrope_section` is {shown(list(shares))}; it must split {every.size} pairs into three, rows as columns"
        )
    pair_axis = np.append(1 + np.arange(2 * shares[0]) % 2, np.zeros(shares[2], dtype=int))
    return replace(
        _spec(every, pair_axis, head_dim, True, angle_dtype), rope_type="default", shared_id=True
    )


def _spec(
    inv_freq: Float64, pair_axis: Any, head_dim: int, interleaved: bool, angle_dtype: str
) -> RopeSpec:
    """Return the rotation in which pair j rotates with axis pair_axis[j] at frequency inv_freq[j]."""
    return from_inv_freq(
        on_axes(inv_freq, pair_axis, int(pair_axis.max()) + 1),
        head_dim=head_dim,
        interleaved=interleaved,
        pair_axis=tuple(pair_axis.tolist()),
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


# How pairs belong to axes, by the name of it in `Tower.pairs`.
_PAIRS: dict[str, Callable[[Tower, int, float, str], RopeSpec]] = {
    "runs": _runs,
    "every nth": _every_nth,
    "blocks": _blocks,
    "alternate": _alternate,
    "revolutions": _in_revolutions,
}
# Other ways to a head_dim than from the width under a key, by the name of it in `Tower.head_dim`.
_HEAD_DIMS: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "own projections": _floored_head_dim,
    "memory attention": _memory_head_dim,
    "all heads": _hidden_size,
}
