"""Adapter for the language model of Ernie-4.5-VL, alone or inside the file of the whole model.

It has three position axes in an order that no key of a section describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_config import OneRotationConfig
from rope_cpu.configs.model_types import ModelFacts
from rope_cpu.configs.rope_parameters import head_dim, own_section
from rope_cpu.configs.text import language_model, with_defaults
from rope_cpu.frequencies import axes
from rope_cpu.frequencies.scaling import rope_type_name, without_nulls
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes

MODEL_TYPES = ("ernie4_5_vl_moe", "ernie4_5_vl_moe_text")


@dataclass(frozen=True, kw_only=True)
class ErnieConfig(OneRotationConfig):
    """The config of Ernie-4.5-VL's language model; positions are (time, row, column)."""

    def _only_spec(self, angle_dtype: str) -> RopeSpec:
        return _three_axes(self.values, angle_dtype)


def is_ernie(raw: Mapping[str, Any]) -> bool:
    """Return True for a config of Ernie-4.5-VL, of its language model or of the whole model."""
    return raw.get("model_type") in MODEL_TYPES


def parse(raw: Mapping[str, Any]) -> ErnieConfig:
    """Parse a config of Ernie-4.5-VL.

    Raises ValueError or TypeError if a key is missing or has a value that is not allowed.
    Source: modeling_ernie4_5_vl_moe in transformers 5.23.
    """
    text, facts = language_model(raw)
    values = with_defaults(text, facts or ModelFacts())
    return ErnieConfig(source=raw, model_type=raw["model_type"], values=values)


def _three_axes(values: Mapping[str, Any], angle_dtype: str) -> RopeSpec:
    """Return the rotation of the three axes.

    Time has the slowest pairs; row and column alternate in the others.
    """
    _, own = own_section(values)
    section = without_nulls(own)
    rope_type = rope_type_name(section)
    if rope_type != "default":
        raise ValueError(f"`rope_type` is {shown(rope_type)}; Ernie-4.5-VL takes only default")
    # Pairs of row, column and time, in this order.
    axis_pairs = axes.checked_mrope_section(
        "mrope_section", section.get("mrope_section", (22, 22, 20))
    )
    width = head_dim(values, ModelFacts(), None)
    theta = section.get("rope_theta", values["rope_theta"])
    inv_freq = axes.base_frequencies(theta, width, angle_dtype)
    is_split = len(axis_pairs) == 3 and sum(axis_pairs) == inv_freq.size
    if not is_split or axis_pairs[0] != axis_pairs[1]:
        raise ValueError(
            f"`mrope_section` is {shown(list(axis_pairs))}; it must split {inv_freq.size} pairs "
            "into three numbers, with as many rows as columns"
        )
    rows, columns, times = axis_pairs
    pair_axis = axes.time_last_pair_axis((times, rows, columns))
    return from_inv_freq(
        spread_over_axes(inv_freq, pair_axis, max(pair_axis) + 1),
        head_dim=width,
        interleaved=True,
        pair_axis=pair_axis,
        rope_type="default",
        shared_id=True,
        angle_dtype=angle_dtype,
    )
