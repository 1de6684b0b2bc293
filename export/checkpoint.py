"""From a model's config and weights to the arguments of `export_attention` for a layer."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from os import PathLike
from typing import Any

import numpy as np

from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.models.layer import EXPRESSED, Layer
from rope_cpu.models.model import Model
from rope_cpu.models.reader import read
from rope_cpu.models.tensors import layer_arrays

from .options import INPUT


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
        If the config is invalid, if its model type is not known, if layers differ and none is
        chosen, or if `export_attention` cannot express the model's attention.

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
    return layer_options(exported_layer(parsed, parsed.attention, layer, layer_type))


def attention_weights(
    tensors: Mapping[str, Any] | str | PathLike[str],
    config: str | PathLike[str] | Mapping[str, Any],
    layer: int,
) -> dict[str, Any]:
    """Return the weights of one layer as arguments of `export_attention`.

    With `attention_options` they are all that the model's own attention needs; the input of the
    graph is then the layer's hidden states, after the norm before the attention.

    Parameters
    ----------
    tensors : mapping of str to array, or path
        A state dict, of NumPy arrays or of PyTorch tensors; or a safetensors file, the
        *.safetensors.index.json of several, or a folder with model.safetensors or
        model.safetensors.index.json. Names are those of the checkpoint, with any prefix.
        They tell its pairing too: `in_proj` of Gradium's Phonon has pairs (2i, 2i+1), and its rows
        are reordered to those of `q_proj` and `k_proj`, as transformers loads them.
    config : path or mapping
        The model's config.json, its folder, or its content.
    layer : int
        The index of the layer, from 0.

    Returns
    -------
    dict
        weights: projections and biases, in the dtype of the checkpoint; no output projection where
        it is not in the attention module, as in RoFormer. qk_norm: weights of the norms of q and of
        k, as the checkpoint has them. sinks: attention sinks. The last two only for models that
        have them.

    Raises
    ------
    TypeError, ValueError
        If the config is invalid or `export_attention` cannot express the attention; if tensors are
        missing or not finite, have other shapes than the config says, or belong to a part of the
        attention that cannot be expressed, such as a gate.
    OSError
        If a file cannot be read.

    Examples
    --------
    >>> import numpy as np
    >>> from rope_cpu import RotaryEmbedding, export
    >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    ...           "num_key_value_heads": 2, "num_hidden_layers": 1}
    >>> rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
    >>> state = {f"model.layers.0.self_attn.{name}.weight": np.ones((count, 64))
    ...          for name, count in rows.items()}
    >>> weights = export.attention_weights(state, config, 0)
    >>> sorted(weights["weights"])
    ['k', 'o', 'q', 'v']
    >>> options = export.attention_options(config, layer=0)
    >>> rope = RotaryEmbedding.from_config(config, layer=0)
    >>> model = export.export_attention(rope, **options | weights)
    """
    parsed = read(config)
    parsed.at("layer", layer, own_keys=True)
    facts = replace(parsed.attention, bidirectional_tokens=None)  # which concern no weights
    return layer_weights(exported_layer(parsed, facts, layer), tensors)


def exported_layer(
    config: Model,
    facts: Layer,
    layer: int | None,
    layer_type: str | None = None,
    stated: Container[str] = (),
) -> Layer:
    """Return a layer, see `Model.layer`; raise ValueError if no operators express its attention."""
    found = config.layer(facts, EXPRESSED, layer, layer_type, stated)
    if found.spec is None:
        raise ArgumentError("layer", layer, "select a layer that is rotated")
    if found.window is not None and not found.causal:
        raise ValueError(
            f"layers have a window of {found.window} keys on both sides; a mask can hold it (--set "
            "window=none --mask bool)"
        )
    return found


def layer_options(layer: Layer) -> dict[str, Any]:
    """Return the arguments of `export_attention` for a layer, with norms and sinks as inputs."""
    names = ("num_heads", "num_kv_heads", "causal", "window", "softcap", "scale")
    options: dict[str, Any] = {name: getattr(layer, name) for name in names}
    options["v_head_dim"] = layer.value_dim
    if layer.qk_norm is not None:
        ones = np.ones(layer.head_dim)
        options["qk_norm"] = INPUT if layer.norm_weighted else (ones, ones)
        options["norm_epsilon"] = layer.norm_epsilon
        options["norm_offset"] = layer.norm_offset
    if layer.has_sinks:
        options["sinks"] = INPUT
    return options


def layer_weights(
    layer: Layer, tensors: Mapping[str, Any] | str | PathLike[str], left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the weights of a layer as arguments of `export_attention`.

    left_out: see `layer_arrays`.
    """
    arrays = layer_arrays(layer, tensors, left_out)
    arguments: dict[str, Any] = {}
    if "q_norm" in arrays:
        arguments["qk_norm"] = (arrays.pop("q_norm"), arrays.pop("k_norm"))
    if "sinks" in arrays:
        arguments["sinks"] = arrays.pop("sinks")
    return {"weights": arrays} | arguments
