"""The attention of one layer, from a model's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    """

    facts: Attention
    layer_type: str | None
    head_dim: int
    num_heads: int
    num_kv_heads: int
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
        cannot express the model's attention.

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
    return describe_layer(parsed, parsed.attention, layer, layer_type).options()


def describe_layer(
    config: ModelConfig, facts: Attention, layer: int | None, layer_type: str | None
) -> LayerAttention:
    """Return the attention of a layer; raise ValueError or TypeError if it cannot be exported.

    facts: those of the config, perhaps changed. layer, layer_type: at most one may be given.
    """
    _check_parts(facts, config.model_type)
    # The pairing plays no part, and an unknown model type has none.
    spec = config.spec(layer_type, layer, interleaved=None if config.is_known else False)
    factor = float(np.max(spec.attention_factor))
    if facts.qk_norm == "after" and factor != 1:
        raise ValueError(
            f"norms of queries and keys follow a rotation with an attention factor of {factor:.6g}"
        )
    layer_type = _layer_type(config, facts, layer, layer_type)
    window = facts.window_of(layer_type) or None
    if window is not None and not facts.causal:
        raise ValueError(f"layers have a window of {window} keys on both sides")
    try:
        num_heads, num_kv_heads = config.heads(layer_type)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the config's {error}") from error
    if num_heads is None or num_kv_heads is None:
        raise ValueError(
            f"the config lacks the number of heads; add one of {', '.join(HEADS_KEYS)}"
        )
    return LayerAttention(
        facts=facts,
        layer_type=layer_type,
        head_dim=spec.head_dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=window,
    )


def _check_parts(facts: Attention, model_type: str | None) -> None:
    """Raise ValueError if `export_attention` cannot express a part of a model's attention."""
    part = next(_inexpressible_parts(facts), None)
    if part is not None:
        raise ValueError(
            f"model type {cut(str(model_type))} has {part}, which the export cannot write"
        )
    if facts.qk_norm is not None and facts.norm_epsilon is None:
        raise ValueError("the config lacks the epsilon of the norms; add rms_norm_eps")


def _inexpressible_parts(facts: Attention) -> Iterator[str]:
    """Yield the parts of a model's attention that `export_attention` cannot express."""
    if facts.latent:
        yield "latent attention (kv_lora_rank), of which only a part of each head rotates"
    if facts.qk_norm == "after" and facts.norm_weighted:
        yield "norms of queries and keys after the rotation"
    if facts.qk_norm is not None and facts.norm_other is not None:
        yield f"norms of queries and keys other than of each head: {facts.norm_other}"
    if facts.v_norm:
        yield "norms of values"
    if facts.chunk:
        yield f"chunks of {facts.chunk} tokens (attention_chunk_size)"
    if facts.query_scale:
        yield f"queries scaled by their position ({facts.query_scale})"
    if facts.own_cache:
        yield f"a cache of its own: {facts.own_cache}"
    if facts.other:
        yield f"an attention of its own: {facts.other}"


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
