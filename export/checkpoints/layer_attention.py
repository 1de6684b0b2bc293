"""The attention of one layer, from a model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import cut, shown
from rope_cpu.configs.attention_facts import FULL_LAYERS, WINDOW_LAYERS, Attention
from rope_cpu.configs.layers import KNOWN_LAYER_TYPES
from rope_cpu.configs.model_config import HEADS_KEYS, ModelConfig
from rope_cpu.configs.model_types import ALL_LAYERS
from rope_cpu.configs.reader import read

from ..weights import INPUT


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """The attention of one layer of a model, or of all layers of one type.

    facts: of the model. window: number of keys that a query attends to, None for all keys.
    num_heads, num_kv_heads: None if the config does not determine them.
    """

    facts: Attention
    layer_type: str | None
    head_dim: int
    num_heads: int | None
    num_kv_heads: int | None
    window: int | None

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.head_dim**-0.5 if self.facts.scale is None else self.facts.scale

    @property
    def softcap(self) -> float | None:
        """The c of c·tanh(score/c), None without."""
        return self.facts.softcap or None

    def options(self) -> dict[str, Any]:
        """Return the arguments of `export_attention`, with norms and sinks as inputs."""
        facts = self.facts
        options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "v_head_dim": self.head_dim,
            "causal": facts.causal,
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
        }
        if facts.qk_norm is not None:
            ones = np.ones(self.head_dim)
            options["qk_norm"] = INPUT if facts.norm_weighted else (ones, ones)
            options["norm_epsilon"] = facts.norm_epsilon
            options["norm_offset"] = facts.norm_offset
        if facts.sinks:
            options["sinks"] = INPUT
        return options


def attention_options(
    config: str | PathLike[str] | Mapping[str, Any],
    *,
    layer: int | None = None,
    layer_type: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `export_attention` for one layer of a model.

    Norms and sinks are inputs of the graph; `attention_weights` has their values.

    Parameters
    ----------
    config : path or mapping
        A config.json, its folder, or its content, as in `RotaryEmbedding.from_config`.
    layer : int, optional
        The index of the layer, from 0. Needed if layers differ, unless `layer_type` is given.
    layer_type : str, optional
        The layer type instead ("full_attention", "sliding_attention").

    Returns
    -------
    dict
        num_heads, num_kv_heads, v_head_dim, causal, window, softcap and scale; qk_norm,
        norm_epsilon and norm_offset for a model that norms queries and keys; sinks for one with
        attention sinks.

    Raises
    ------
    TypeError, ValueError
        If the config is invalid, if layers differ and none is chosen, or if `export_attention`
        cannot express the model's attention. The text has all reasons.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> config = {"model_type": "gemma2", "num_hidden_layers": 26}
    >>> options = export.attention_options(config, layer=0)
    >>> options["window"], options["softcap"], options["scale"]
    (4096, 50.0, 0.0625)
    >>> rope = RotaryEmbedding.from_config(config, layer=0)
    >>> model = export.export_attention(rope, **options)
    """
    parsed = read(config)
    described, problems = describe_layer(parsed, parsed.attention, layer, layer_type)
    if described is None or problems:
        raise ValueError("; ".join(problems))
    return described.options()


def describe_layer(
    config: ModelConfig, facts: Attention, layer: int | None, layer_type: str | None
) -> tuple[LayerAttention | None, list[str]]:
    """Return the attention of a layer, and all reasons why it cannot be exported.

    The attention is None where the config and the arguments do not determine the layer.

    facts: those of the config, perhaps changed. layer, layer_type: at most one may be given.
    """
    problems = inexpressible_parts(facts, config.model_type)
    try:
        # The pairing plays no part, and an unknown model type has none.
        spec = config.spec(layer_type, layer, interleaved=None if config.is_known else False)
    except (TypeError, ValueError) as error:
        return None, [str(error), *problems]
    factor = float(np.max(spec.attention_factor))
    if facts.qk_norm == "after" and not facts.norm_weighted and factor != 1:
        problems.append(
            f"norms of queries and keys follow a rotation with an attention factor of {factor:.6g}"
        )
    window = None
    is_determined = True
    try:
        layer_type = _layer_type(config, facts, layer, layer_type)
        window = facts.window_of(layer_type) or None
    except ValueError as error:
        problems.append(str(error))
        is_determined = False
    heads: tuple[int | None, int | None] = (None, None)
    try:
        heads = config.heads(layer_type)
    except (TypeError, ValueError) as error:
        problems.append(f"the config's {error}")
    if None in heads:
        problems.append(f"the config lacks the number of heads; add one of {', '.join(HEADS_KEYS)}")
    if window is not None and not facts.causal:
        problems.append(f"layers have a window of {window} keys on both sides")
    if not is_determined:
        return None, problems
    num_heads, num_kv_heads = heads
    described = LayerAttention(
        facts=facts,
        layer_type=layer_type,
        head_dim=spec.head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=window,
    )
    return described, problems


def inexpressible_parts(facts: Attention, model_type: str | None) -> list[str]:
    """Return the parts of a model's attention that `export_attention` cannot express."""
    parts = []
    if facts.latent:
        parts.append("latent attention (kv_lora_rank), of which only a part of each head rotates")
    if facts.qk_norm == "after" and facts.norm_weighted:
        parts.append("norms of queries and keys after the rotation")
    if facts.qk_norm is not None and facts.norm_other is not None:
        parts.append(f"norms of queries and keys other than of each head: {facts.norm_other}")
    if facts.v_norm:
        parts.append("norms of values")
    if facts.chunk:
        parts.append(f"chunks of {facts.chunk} tokens (attention_chunk_size)")
    if facts.query_scale:
        parts.append(f"queries scaled by their position ({facts.query_scale})")
    if facts.own_cache:
        parts.append(f"a cache of its own: {facts.own_cache}")
    if facts.other:
        parts.append(f"an attention of its own: {facts.other}")
    name = cut(str(model_type))
    problems = [f"model type {name} has {part}, which the export cannot write" for part in parts]
    if facts.qk_norm is not None and not facts.norm_other and facts.norm_epsilon is None:
        problems.append("the config lacks the epsilon of the norms; add rms_norm_eps")
    return problems


def _layer_type(
    config: ModelConfig, facts: Attention, layer: int | None, layer_type: str | None
) -> str | None:
    """Return the layer type of a layer, or of all rotated layers; None if it plays no part.

    Raises ValueError if it is needed and not given, or if its kind of attention is not known.
    """
    if layer is not None:
        layer_type = layer_type_at(config, layer)
    elif layer_type is None:
        names = _rotated_types(config)
        if len(names) > 1:
            if facts.window is None or facts.window_in_all_layers:
                return None
            listed = cut(", ".join(sorted(map(str, names))))
            raise ValueError(f"layers differ ({listed}); give `layer` or `layer_type`")
        layer_type = next(iter(names), None)
    if layer_type not in (None, *FULL_LAYERS, *WINDOW_LAYERS):
        raise ValueError(f"the attention of layers of type {shown(layer_type)} is not known")
    return layer_type


def layer_type_at(config: ModelConfig, layer: int) -> str | None:
    """Return the layer type of a layer of the model."""
    return config.layers.entries[layer].layer_type


def _rotated_types(config: ModelConfig) -> set[str | None]:
    """Return the layer types of the rotated layers; None among them stands for no type."""
    parameters = config.rope_parameters
    if config.layers.entries:
        return {entry.layer_type for entry in config.layers.entries if entry.rotated}
    names = config.values.get(KNOWN_LAYER_TYPES, tuple(parameters))
    return {name or None for name in names if parameters.get(name, ALL_LAYERS) is not None}
