"""Configurations of vision towers in transformers → spec: one table, model type → how pairs belong to axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.configs import rope_parameters, text
from rope_cpu.configs.model_config import ModelConfig, of_all_layers
from rope_cpu.configs.model_types import ModelFacts, by_type
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import type_of, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, on_axes
from rope_cpu.validation.scalars import Float64, real_number, whole_number, whole_numbers

Builder = Callable[[int, float, str], RopeSpec]


# Model types without a rotation of heads that could be described, and why.
REFUSED = by_type("refused.json")


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
        raise ValueError(f"`model_type` is {name!r}: {REFUSED[name]}")
    if name in _ERNIE:
        values = text.with_defaults(*text.language_model(config))
        rotation = of_all_layers(partial(_ernie, values))
    else:
        found = TOWERS[name]
        head_dim, theta = found.head_dim(values), _theta(values, found)
        rotation = of_all_layers(partial(found.build, head_dim, theta))
    return ModelConfig(source=config, model_type=name, values=values, rotation=rotation)


def tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the vision part of a whole model's configuration, with the model type that `read` knows it by.

    Raises ValueError where there is no vision part.
    """
    part = config.get("vision_config")
    if not isinstance(part, Mapping):
        raise ValueError("`config` has no `vision_config`")
    return {**part, "model_type": _part_type(part, part.get("model_type") or config.get("model_type"))}


def model_type(config: Mapping[str, Any]) -> str:
    """Return the model type of a configuration; a vision part is recognised by its `patch_size`."""
    name = config.get("model_type")
    is_part = "patch_size" in config and "vision_config" not in config
    return _part_type(config, name) if is_part else str(name or "")


def _part_type(part: Mapping[str, Any], name: str | None) -> str:
    """Return a vision part's own model type, where older files repeat that of the whole model or name none."""
    if not name:
        return next((named for keys, named in UNNAMED if keys <= part.keys()), "")
    return next((known for known in (name, f"{name}_vision", f"{name}_vision_encoder") if known in TOWERS), name)


@dataclass(frozen=True)
class Tower:
    """How one vision tower rotates: its head_dim, its default base, and which pair belongs to which axis."""

    build: Builder
    rope_theta: float = 10000.0
    partial: float = 1.0  # the only partial_rotary_factor that the model works with
    head_dim: Callable[[Mapping[str, Any]], int] = lambda config: _head_dim(config, "hidden_size")


def _head_dim(config: Mapping[str, Any], width_key: str) -> int:
    if config.get("head_dim") is not None:
        return whole_number("head_dim", config["head_dim"], 2)
    width = _first(config, width_key, f"vt_{width_key}")
    heads = _first(config, "num_attention_heads", "num_heads", "vt_num_attention_heads")
    width, heads = whole_number(width_key, width, 2), whole_number("num_attention_heads", heads)
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


def _memory_head_dim(config: Mapping[str, Any]) -> int:
    keys = ("memory_attention_hidden_size", "memory_attention_downsample_rate", "memory_attention_num_attention_heads")
    width, rate, heads = (whole_number(key, _first(config, key)) for key in keys)
    return width // (rate * heads)


def _theta(config: Mapping[str, Any], known: Tower) -> float:
    """Return the base; raise for a section that asks for more than that."""
    key, own = rope_parameters.own_section(config)
    section = without_nulls(own)
    rope_type = section.get("rope_type", section.get("type", "axial"))
    if rope_type not in ("axial", "default"):
        raise ValueError(f"`rope_type` is {rope_type!r}; vision towers take no scaling")
    partial = section.get("partial_rotary_factor", known.partial)
    if partial != known.partial:
        raise ValueError(f"`partial_rotary_factor` is {partial!r}; this vision tower has {known.partial}")
    unknown = set(section) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    if unknown:
        raise ValueError(f"`{key}` holds {sorted(unknown)}, which a vision tower has no use for")
    return real_number("rope_theta", section.get("rope_theta", config.get("rope_theta", known.rope_theta)))


def _runs(order: tuple[int, ...], interleaved: bool) -> Builder:
    """Give each axis a run of pairs across the head, the runs in the order of these axes."""

    def build(head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
        each = axes.base_frequencies(theta, 2 * (head_dim // len(order) // 2), angle_dtype)
        pair_axis = np.repeat(order, each.size)
        return _spec(np.tile(each, len(order)), pair_axis, head_dim, interleaved, angle_dtype)

    return build


def _every_nth(order: tuple[int, ...], interleaved: bool) -> Builder:
    """Give each axis every n-th pair, n axes sharing a frequency."""

    def build(head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
        each = axes.base_frequencies(theta, head_dim // len(order), angle_dtype)
        pair_axis = np.tile(order, each.size)
        return _spec(np.repeat(each, len(order)), pair_axis, head_dim, interleaved, angle_dtype)

    return build


def _blocks(head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Rotate each half of the head in itself, the first with the row (Gemma-4)."""
    each = axes.base_frequencies(theta, 2 * (head_dim // 4), angle_dtype)
    return axes.axis_after_axis([each, each], head_dim=head_dim, blocks=2, angle_dtype=angle_dtype)


def _alternate(head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give even frequencies of the whole head to the row, odd ones to the column (Pixtral)."""
    every = axes.base_frequencies(theta, head_dim, angle_dtype)
    return axes.axis_after_axis([every[0::2], every[1::2]], head_dim=head_dim, angle_dtype=angle_dtype)


def _in_revolutions(head_dim: int, theta: float, angle_dtype: str) -> RopeSpec:
    """Give row and column a run of pairs each, and positions the unit of a revolution (DINOv3)."""
    each = 2 * np.pi * axes.base_frequencies(theta, head_dim // 2, angle_dtype)
    return axes.axis_after_axis([each, each], head_dim=head_dim, angle_dtype=angle_dtype)


_ERNIE = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")


def _ernie(config: Mapping[str, Any], angle_dtype: str) -> RopeSpec:
    """Give time the slowest pairs, and row and column every second of the others (the text model of Ernie-4.5-VL)."""
    section = without_nulls(rope_parameters.own_section(config)[1])
    if type_of(section) != "default":
        raise ValueError(f"`rope_type` is {type_of(section)!r}; Ernie-4.5-VL takes only default")
    shares = whole_numbers("mrope_section", section.get("mrope_section", (22, 22, 20)))
    head_dim = _floored_head_dim(config)
    every = axes.base_frequencies(section.get("rope_theta", config["rope_theta"]), head_dim, angle_dtype)
    if len(shares) != 3 or shares[0] != shares[1] or sum(shares) != every.size:
        raise ValueError(
            f"`mrope_section` is {list(shares)}; it must split {every.size} pairs into three, rows as columns"
        )
    pair_axis = np.append(1 + np.arange(2 * shares[0]) % 2, np.zeros(shares[2], dtype=int))
    return replace(_spec(every, pair_axis, head_dim, True, angle_dtype), rope_type="default", shared_id=True)


def _spec(inv_freq: Float64, pair_axis: Any, head_dim: int, interleaved: bool, angle_dtype: str) -> RopeSpec:
    """Return the rotation in which pair j rotates with axis pair_axis[j] at frequency inv_freq[j]."""
    return from_inv_freq(
        on_axes(inv_freq, pair_axis, int(pair_axis.max()) + 1),
        head_dim=head_dim,
        interleaved=interleaved,
        pair_axis=tuple(pair_axis.tolist()),
        rope_type="axial",
        angle_dtype=angle_dtype,
    )


_ROW_COLUMN = Tower(_runs((0, 1), interleaved=False))
_MEMORY = Tower(_runs((0, 1), interleaved=True), head_dim=_memory_head_dim)

TOWERS: dict[str, Tower] = {
    **dict.fromkeys(
        (
            "cohere_compass_vision", "dots3_note_vision_encoder", "ernie4_5_vl_moe_vision", "exaone4_5_vision",
            "glm4v_moe_vision", "glm4v_vision", "glm5_next_vision", "glm_ocr_vision", "mlcd_vision_model",
            "muse_glimmer_vision", "muse_spark_vision", "paddleocr_vl_vision", "qwen2_5_omni_vision_encoder",
            "qwen2_5_vl_vision", "qwen3_5_moe_vision", "qwen3_5_vision", "qwen3_omni_moe_vision_encoder",
            "qwen3_vl_moe_vision", "qwen3_vl_vision", "qwen4_exp_vision", "video_llama_3_vision",
        ),
        _ROW_COLUMN,
    ),
    "qwen2_vl_vision": Tower(_ROW_COLUMN.build, head_dim=lambda config: _head_dim(config, "embed_dim")),
    "lfm3_vl_vision": Tower(_ROW_COLUMN.build, rope_theta=1e6),
    "step3p5_vision": Tower(_runs((1, 0), interleaved=False)),
    "minimax_m3_vl_vision": Tower(_runs((0, 1, 2), interleaved=False)),
    "inkling2_vision": Tower(_runs((1, 0), interleaved=True)),
    "llama4_vision_model": Tower(_runs((1, 0), interleaved=True), head_dim=_floored_head_dim),
    "sam3_vit_model": Tower(_runs((0, 1), interleaved=True)),
    **dict.fromkeys(("edgetam_video", "sam2_video", "sam3_tracker_video"), _MEMORY),
    "kimi_k25_vision": Tower(_every_nth((1, 0), interleaved=False)),
    "gemma4_vision": Tower(_blocks, rope_theta=100.0),
    "pixtral": Tower(_alternate),
    **dict.fromkeys(("dinov3_vit", "eomt_dinov3", "sapiens2"), Tower(_in_revolutions, rope_theta=100.0)),
    # Before heads part: one vector of hidden_size, and four times the frequencies of a head.
    "efficientloftr": Tower(
        _every_nth((0, 1), interleaved=True),
        head_dim=lambda config: whole_number("hidden_size", _first(config, "hidden_size")),
        partial=4.0,
    ),
}  # fmt: skip

# Keys of vision parts in files that name no model type. Their models rotate alike, but for where the width stands.
_QWEN = {"depth", "num_heads", "spatial_merge_size", "temporal_patch_size"}
UNNAMED = (
    ({"vt_hidden_size", "vt_num_attention_heads"}, "kimi_k25_vision"),
    (_QWEN | {"embed_dim"}, "qwen2_vl_vision"),
    (_QWEN, "qwen2_5_vl_vision"),
)
