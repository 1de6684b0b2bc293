"""Differences of single model types' code: each a function from a config to one in standard keys.

A quirk gets the keys of a file under standard names, without nulls. It returns them with standard
keys for its own, or refuses them. The table of model types has what several types share, and the
keys with names of rotations that a quirk reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError
from rope_cpu.models.keys import own_section
from rope_cpu.models.model_types import Config

Change = Callable[[Config], Config]

_QUIRKS: dict[str, Change] = {}


def with_quirks(config: Config) -> Config:
    """Return a config after the quirk of its model type."""
    change = _QUIRKS.get(str(config.get("model_type")))
    return config if change is None else change(config)


def _quirk(*model_types: str) -> Callable[[Change], Change]:
    """Register the change of the configs of some model types."""

    def register(change: Change) -> Change:
        _QUIRKS.update(dict.fromkeys(model_types, change))
        return change

    return register


def _with_sections(config: Config, change: Change) -> Config:
    """Return a config with a change made to its section, or to those of its layer types."""
    key, section = own_section(config)
    if not section:
        return config
    nested = {label: change(part) for label, part in section.items() if isinstance(part, Mapping)}
    return {**config, key: {**section, **nested} if nested else change(section)}


def _rope_type_means(name: str, **meaning: Any) -> Change:
    """Return the change of a rope type of that name to another, with the keys that belong to it."""

    def change(section: Config) -> Config:
        if section.get("rope_type") != name:
            return section
        return {**meaning, **section, "rope_type": meaning["rope_type"]}

    return lambda config: _with_sections(config, change)


# Sources: transformers configuration_phi3 and configuration_sarvam_mla; for the order of M-RoPE
# ming_flash_omni in vLLM-Omni.
_quirk("phi3", "phi3_v", "phi4mm", "phi4_multimodal")(
    _rope_type_means("yarn", rope_type="longrope")
)
_quirk("sarvam_mla")(_rope_type_means("deepseek_yarn", rope_type="yarn"))
_VIDEO_ROPE = {"rope_type": "default", "video_rope": True, "mrope_section": [8, 12, 12]}
_quirk("bailing_moe_v2", "bailing_moe_linear")(_rope_type_means("video_rope", **_VIDEO_ROPE))


@_quirk("bailing_hybrid")
def _video_rope_order(config: Config) -> Config:
    """Give M-RoPE sections the order of video_rope (bailing_moe_v3.py in vLLM)."""

    def change(section: Config) -> Config:
        return {"video_rope": True, **section} if "mrope_section" in section else section

    return _with_sections(config, change)


@_quirk("ernie4_5_vl_moe_text")
def _row_column_time(config: Config) -> Config:
    """Turn pairs of (row, column, time) to those of (time, row, column), and their order.

    Source: modeling_ernie4_5_vl_moe in transformers, which takes no scaling.
    """
    key, section = own_section(config)
    rope_type = section.get("rope_type", "default")
    if rope_type not in ("default", "mrope"):
        raise ArgumentError("rope_type", rope_type, "be default for Ernie-4.5-VL")
    pairs = section.get("mrope_section", [22, 22, 20])
    counts = scalars.whole_numbers("mrope_section", pairs, most=limits.HEAD_DIM, longest=3)
    own = {"mrope_section": [*counts[2:], *counts[:2]], "video_rope": True}
    return {**config, key: {**section, **own}}


@_quirk("hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe")
def _alpha_alone(config: Config) -> Config:
    """Leave out the keys that the code ignores beside `alpha` (modeling_hunyuan.py)."""
    ignored = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")

    def change(section: Config) -> Config:
        if not section.get("alpha"):
            return section
        return {key: value for key, value in section.items() if key not in ignored}

    return _with_sections(config, change)


@_quirk("deepseek_v4", "deepseek_v41_text")
def _compressed_layers(config: Config) -> Config:
    """Name layers by their sections, and give YaRN no attention factor.

    Source: transformers configuration_deepseek_v4; for the section of the compressed layers and
    the ratios of layers, configs/deepseek_v41.py in SGLang.
    """
    own = config.get("compress_rope_parameters")
    changed = dict(config)
    key, section = own_section(config)
    is_nested = any(isinstance(part, Mapping) for part in section.values())
    if own:
        section = {**section, "compress": own} if is_nested else own
        if "rope_theta" in own:
            changed.pop("compress_rope_theta", None)
    if not is_nested and section.get("rope_type") == "yarn":
        section = {"attention_factor": 1.0, **section}
    changed[key] = section
    if config.get("layer_types"):
        kinds = config["layer_types"]
        changed["layer_types"] = [
            "main" if kind in ("sliding_attention", "main") else "compress" for kind in kinds
        ]
    return changed


@_quirk("mimo_v2_flash")
def _default_share(config: Config) -> Config:
    """Fill the rotated share of the default rope type (transformers modeling_mimo_v2_flash)."""
    share = config.get("partial_rotary_factor", 0.334)

    def change(section: Config) -> Config:
        rope_type = section.get("rope_type", "default")
        return {"partial_rotary_factor": share, **section} if rope_type == "default" else section

    return _with_sections(config, change)


@_quirk("qwen")
def _dynamic_ntk(config: Config) -> Config:
    """Raise the base beyond the context where asked (modeling_qwen.py of Qwen/Qwen-7B)."""
    if config.get("use_dynamic_ntk") is not True:
        return config
    key, section = own_section(config)
    return {**config, key: {"rope_type": "dynamic_powers", **section}}


@_quirk("chatglm")
def _theta_ratio(config: Config) -> Config:
    """Multiply the base by `rope_ratio` (modeling_chatglm.py of THUDM/chatglm3-6b)."""
    key, section = own_section(config)
    ratio = scalars.real_number("rope_ratio", config.get("rope_ratio", 1))
    theta = scalars.real_number("rope_theta", section.get("rope_theta", 10000.0))
    return {**config, key: {**section, "rope_theta": ratio * theta}}


@_quirk("plamo")
def _shared_heads(config: Config) -> Config:
    """Count key heads by the query heads that share one (plamo.py in mlx-lm)."""
    heads = _count("num_attention_heads", config, 32)
    group = _count("n_shared_head", config, 8)
    return {**config, "num_key_value_heads": math.ceil(heads / group)}


@_quirk("falcon", "RefinedWebModel")
def _falcon_heads(config: Config) -> Config:
    """Have one key head unless the config says otherwise (transformers modeling_falcon)."""
    if config.get("multi_query", True) and not config.get("new_decoder_architecture"):
        return {**config, "num_key_value_heads": 1}
    return config


@_quirk("hf_olmo", "molmo")
def _one_key_head(config: Config) -> Config:
    """Have one key head where asked (olmo/model.py of allenai/OLMo)."""
    return {**config, "num_key_value_heads": 1} if config.get("multi_query_attention") else config


@_quirk("zamba2")
def _double_heads(config: Config) -> Config:
    """Derive heads of double width: attention reads two inputs (transformers modeling_zamba2)."""
    heads = _count("num_attention_heads", config, 32)
    hidden = config.get("hidden_size", 2560)
    hidden = scalars.whole_number("hidden_size", hidden, 1, limits.HIDDEN_SIZE)
    return {"head_dim": 2 * hidden // heads, **config}


@_quirk("cohere2_moe")
def _rotated_dense_layers(config: Config) -> Config:
    """List the rotated layers: sliding ones, and dense ones unless their windows alternate.

    Source: transformers modeling_cohere2_moe.
    """
    kinds = config.get("layer_types")
    if not kinds or config.get("prefix_dense_sliding_window_pattern", 1) != 1:
        return config
    first = config.get("first_k_dense_replace", 0)
    first = scalars.whole_number("first_k_dense_replace", first, 0, limits.LAYERS)
    dense = config.get("mlp_layer_types") or ["dense"] * first
    rotated = [
        "dense" in dense[index : index + 1] or kind != "full_attention"
        for index, kind in enumerate(kinds)
    ]
    return {**config, "no_rope_layers": [int(flag) for flag in rotated]}


@_quirk("molmo2_text")
def _scaled_layers(config: Config) -> Config:
    """Refuse a model of scaled and unscaled layers (transformers modeling_molmo2)."""
    count = _count("num_hidden_layers", config, 36)
    layers = _layers("rope_scaling_layers", config, range(count))
    if len(set(layers)) < count:
        rule = "list every layer, as a model with scaled and unscaled layers is not read"
        raise ArgumentError("rope_scaling_layers", layers, rule)
    return config


@_quirk("mllama_text_model")
def _cross_attention(config: Config) -> Config:
    """Name the layers that attend to images and are not rotated (transformers modeling_mllama)."""
    layers = _layers("cross_attention_layers", config, range(3, 40, 5))
    count = _count("num_hidden_layers", config, 40)
    kinds = ["cross_attention" if i in layers else "full_attention" for i in range(count)]
    return {"layer_types": kinds, **config}


@_quirk("nemotron-nas")
def _blocks(config: Config) -> Config:
    """List the key heads of each layer, 0 for one without attention (modeling_decilm.py)."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list | tuple):
        raise ArgumentTypeError("block_configs", blocks, "be a list with an object for each layer")
    scalars.check_length("block_configs", blocks, limits.LAYERS)
    heads = _count("num_attention_heads", config, 32)
    counts = [_key_heads(block, heads) for block in blocks]
    return {**config, "num_key_value_heads": counts, "no_rope_layers": counts}


def _key_heads(block: Any, heads: int) -> int:
    """Return the number of key heads of a block, 0 if it has no attention."""
    attention = block.get("attention") if isinstance(block, Mapping) else None
    if not isinstance(attention, Mapping):
        raise ArgumentTypeError("block_configs", block, "hold objects with an object `attention`")
    if attention.get("no_op") or attention.get("replace_with_linear"):
        return 0
    return heads // _count("n_heads_in_group", attention, None)


def _count(key: str, config: Config, default: int | None) -> int:
    """Return a number of heads or of layers."""
    return scalars.whole_number(key, config.get(key, default), 1, limits.LAYERS)


def _layers(key: str, config: Config, default: range) -> tuple[int, ...]:
    """Return the indices of some layers."""
    layers = config.get(key, default)
    return scalars.whole_numbers(key, layers, 0, most=limits.LAYERS, longest=limits.LAYERS)
