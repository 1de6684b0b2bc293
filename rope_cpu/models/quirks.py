"""Differences of single model types' code: each a function from a config to one in standard keys.

A quirk gets the keys of a file under standard names, with its section under one key, the defaults
of its model type, and without nulls. It returns them with standard keys for its own, or refuses
them. The table of model types has what several types share, and the keys with names of rotations
that a quirk reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError
from rope_cpu.models.keys import SECTION, with_new_names
from rope_cpu.models.model_types import Config

Values = dict[str, Any]
Change = Callable[[Any], Values]

_QUIRKS: dict[str, Change] = {}


def with_quirks(values: Values) -> Values:
    """Return a config after the quirk of its model type."""
    change = _QUIRKS.get(str(values.get("model_type")))
    return values if change is None else change(values)


def _quirk(*model_types: str) -> Callable[[Change], Change]:
    """Register the change of the configs of some model types."""

    def register(change: Change) -> Change:
        _QUIRKS.update(dict.fromkeys(model_types, change))
        return change

    return register


@_quirk("ernie4_5_vl_moe_text")
def _row_column_time(values: Values) -> Values:
    """Turn pairs of (row, column, time) to those of (time, row, column), and their order.

    Source: modeling_ernie4_5_vl_moe in transformers, which takes no scaling.
    """
    section = values[SECTION]
    rope_type = section.get("rope_type", "default")
    if rope_type not in ("default", "mrope"):
        raise ArgumentError("rope_type", rope_type, "be default for Ernie-4.5-VL")
    pairs = section.get("mrope_section", [22, 22, 20])
    counts = scalars.whole_numbers("mrope_section", pairs, most=limits.HEAD_DIM, longest=3)
    own = {"mrope_section": [*counts[2:], *counts[:2]], "video_rope": True}
    return {**values, SECTION: {**section, **own}}


@_quirk("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
def _alpha_alone(values: Values) -> Values:
    """Leave out the keys that the code ignores beside `alpha` (modeling_hunyuan.py)."""
    ignored = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")
    section = values[SECTION]
    if section.get("alpha"):
        section = {key: section[key] for key in section if key not in ignored}
    return {**values, SECTION: section}


@_quirk("deepseek_v4", "deepseek_v41_text")
def _compressed_layers(values: Values) -> Values:
    """Name layers by their sections, and give YaRN no attention factor.

    Source: transformers configuration_deepseek_v4; for the section of the compressed layers and
    the ratios of layers, configs/deepseek_v41.py in SGLang.
    """
    section = values[SECTION]
    own = with_new_names(values.get("compress_rope_parameters", {}))
    changed = dict(values)
    if any(isinstance(part, Mapping) for part in section.values()):
        changed[SECTION] = {**section, "compress": own} if own else section
    else:  # one section is that of the compressed layers, whose base is beside it
        unscaled = own or {key: value for key, value in section.items() if key != "rope_theta"}
        factor = {"attention_factor": 1.0} if unscaled.get("rope_type") == "yarn" else {}
        changed[SECTION] = {**factor, **unscaled}
    if "layer_types" in values:
        changed["layer_types"] = [
            "main" if kind in ("sliding_attention", "main") else "compress"
            for kind in values["layer_types"]
        ]
    return changed


@_quirk("qwen")
def _dynamic_ntk(values: Values) -> Values:
    """Raise the base beyond the context where asked (modeling_qwen.py of Qwen/Qwen-7B)."""
    if values.get("use_dynamic_ntk") is not True:
        return values
    return {**values, SECTION: {"rope_type": "dynamic_powers", **values[SECTION]}}


@_quirk("chatglm")
def _theta_ratio(values: Values) -> Values:
    """Multiply the base by `rope_ratio` (modeling_chatglm.py of THUDM/chatglm3-6b)."""
    section = values[SECTION]
    ratio = scalars.real_number("rope_ratio", values.get("rope_ratio", 1))
    theta = scalars.real_number("rope_theta", section.get("rope_theta", 10000.0))
    return {**values, SECTION: {**section, "rope_theta": ratio * theta}}


@_quirk("plamo")
def _shared_heads(values: Values) -> Values:
    """Count key heads by the query heads that share one (plamo.py in mlx-lm)."""
    heads = _count("num_attention_heads", values)
    group = _count("n_shared_head", values)
    return {**values, "num_key_value_heads": math.ceil(heads / group)}


@_quirk("falcon", "RefinedWebModel", "hf_olmo", "molmo")
def _one_key_head(values: Values) -> Values:
    """Have one key head where asked.

    Sources: transformers modeling_falcon; olmo/model.py of allenai/OLMo.
    """
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        return {**values, "num_key_value_heads": 1}
    return values


@_quirk("zamba2")
def _double_heads(values: Values) -> Values:
    """Derive heads of double width: attention reads two inputs (transformers modeling_zamba2)."""
    heads = _count("num_attention_heads", values)
    hidden = scalars.whole_number("hidden_size", values["hidden_size"], 1, limits.HIDDEN_SIZE)
    return {"head_dim": 2 * hidden // heads, **values}


@_quirk("cohere2_moe")
def _rotated_dense_layers(values: Values) -> Values:
    """List the rotated layers: sliding ones, and dense ones unless their windows alternate.

    Source: transformers modeling_cohere2_moe.
    """
    kinds = values.get("layer_types")
    if not kinds or values["prefix_dense_sliding_window_pattern"] != 1:
        return values
    key = "first_k_dense_replace"
    first = scalars.whole_number(key, values[key], 0, limits.LAYERS)
    dense = values.get("mlp_layer_types") or ["dense"] * first
    rotated = [
        "dense" in dense[index : index + 1] or kind != "full_attention"
        for index, kind in enumerate(kinds)
    ]
    return {**values, "no_rope_layers": [int(flag) for flag in rotated]}


@_quirk("molmo2_text")
def _scaled_layers(values: Values) -> Values:
    """Refuse a model of scaled and unscaled layers (transformers modeling_molmo2)."""
    count = _count("num_hidden_layers", values)
    key = "rope_scaling_layers"
    layers = values.get(key, range(count))
    layers = scalars.whole_numbers(key, layers, 0, most=limits.LAYERS, longest=limits.LAYERS)
    if len(set(layers)) < count:
        rule = "list every layer, as a model with scaled and unscaled layers is not read"
        raise ArgumentError(key, layers, rule)
    return values


@_quirk("nemotron-nas")
def _blocks(values: Values) -> Values:
    """List the key heads of each layer, 0 for one without attention (modeling_decilm.py)."""
    blocks = values.get("block_configs")
    if not isinstance(blocks, list | tuple):
        raise ArgumentTypeError("block_configs", blocks, "be a list with an object for each layer")
    scalars.check_length("block_configs", blocks, limits.LAYERS)
    heads = _count("num_attention_heads", values)
    counts = [_key_heads(block, heads) for block in blocks]
    return {**values, "num_key_value_heads": counts, "no_rope_layers": counts}


def _key_heads(block: Any, heads: int) -> int:
    """Return the number of key heads of a block, 0 if it has no attention."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ArgumentTypeError("block_configs", block, "hold objects with an object `attention`")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    return heads // _count("n_heads_in_group", attention)


def _count(key: str, values: Config) -> int:
    """Return a number of heads or of layers."""
    return scalars.whole_number(key, values.get(key), 1, limits.LAYERS)
