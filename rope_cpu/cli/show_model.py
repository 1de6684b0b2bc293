"""Facts of a model besides its rotation, for `rope-cpu show`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.configs.attention_facts import FACTS
from rope_cpu.configs.model_config import ModelConfig
from rope_cpu.configs.rope_parameters import is_latent
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.rotation.embedding import RotaryEmbedding


def contexts(
    rope: RotaryEmbedding, parameters: Mapping[str, Any], values: Mapping[str, Any]
) -> dict[str, int]:
    """Return the original context, for rope types that have one, and the maximum context.

    A config of YaRN whose maximum is the original one reaches `factor` times as far.
    """
    maximum = maximum_context(values)
    original = _original_context(rope, parameters, maximum)
    if original is None:
        return {"maximum context": maximum} if maximum else {}
    factor = parameters.get("factor")
    if maximum <= original and rope.rope_type == "yarn" and factor is not None:
        maximum = round(min(factor * original, limits.WHOLE))
    if maximum <= original:
        return {"original context": original}
    return {"original context": original, "maximum context": maximum}


def maximum_context(values: Mapping[str, Any]) -> int:
    """Return the max_position_embeddings of a config, 0 if it has none."""
    key = "max_position_embeddings"
    return scalars.whole_number(key, values.get(key, 0), 0)


def _original_context(
    rope: RotaryEmbedding, parameters: Mapping[str, Any], maximum: int
) -> int | None:
    if rope.spec.length_rule is not None:
        return rope.spec.length_rule.original_length
    key = "original_max_position_embeddings"
    rope_type = ROPE_TYPES.get(rope.rope_type)
    if rope_type is None or key not in rope_type.parameters:
        return None
    return int(parameters.get(key, maximum))


def head_width(rope: RotaryEmbedding, values: Mapping[str, Any]) -> int:
    """Return the width of a head; head_dim is that of its rotated slice with latent attention."""
    key = "qk_nope_head_dim"
    if not is_latent(values) or key not in values:
        return rope.head_dim
    return rope.head_dim + scalars.whole_number(key, values[key], 0, limits.HEAD_DIM)


def mscale_of_scores(
    config: ModelConfig, rope: RotaryEmbedding, parameters: Mapping[str, Any]
) -> float | None:
    """Return m(mscale_all_dim), with m(x) = 0.1·x·ln(factor) + 1, or 1 for a factor up to 1."""
    scale = parameters.get("mscale_all_dim")
    factor = parameters.get("factor")
    if config.model_type not in FACTS["mscale_of_scores"] or rope.rope_type != "yarn":
        return None
    if not scale or factor is None or not is_latent(config.values):
        return None
    return 0.1 * float(scale) * math.log(max(factor, 1)) + 1
