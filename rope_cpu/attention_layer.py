"""`attention_layer`: one layer's attention, from a model's config and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

from numpy.typing import NDArray

from rope_cpu.array_types import Array
from rope_cpu.caches.rms_norm import RMSNorm
from rope_cpu.models.layer import EXPRESSED, SERVED, Layer
from rope_cpu.models.model import Model
from rope_cpu.models.reader import read
from rope_cpu.models.tensors import layer_arrays
from rope_cpu.rotation.embedding import RotaryEmbedding


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionWeights:
    """The weights of a layer's attention, under one set of names for all models.

    Attributes
    ----------
    q, k, v : array, (heads · head_dim, hidden)
        Projections of hidden states: ``x @ q.T`` are the queries. In the checkpoint's dtype.
    o : array, (hidden, num_heads · value_dim), or None
        Projection of the result; None where it is outside of the attention module, as in RoFormer.
    q_bias, k_bias, v_bias, o_bias : array, or None
        Biases of the projections.
    q_norm, k_norm, v_norm : RMSNorm, or None
        The norms for `RotaryPlan.append`; None for a model without.
    sinks : array of float, (num_heads,), or None
        The attention sinks for `attention`; None for a model without.
    """

    q: Array
    k: Array
    v: Array
    o: Array | None = None
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    o_bias: Array | None = None
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    v_norm: RMSNorm | None = None
    sinks: Array | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionLayer(Layer):
    """The attention of one layer of a model; `attention_layer` makes it from a config.

    It has further attributes: facts that `attention_layer` refuses, or that these follow from.

    Parameters
    ----------
    num_heads, num_kv_heads : int
        Numbers of query heads, and of heads of keys and values.
    head_dim, value_dim : int
        Widths of a head vector of queries and keys, and of values.
    scale : float
        Factor on the scores.
    rope : RotaryEmbedding, optional
        The rotation; None for a layer without one.
    causal : bool
        A query attends only to keys up to its own position.
    window : int, optional
        Number of keys that a query attends to, its own included; None for all.
    softcap : float, optional
        The c of c·tanh(score/c).
    has_sinks : bool
        The softmax has a learned term besides the scores.
    qk_norm : {"before", "after", None}
        Queries and keys are normed before or after the rotation, or not at all. Norms after it have
        no weights, and commute with it.
    v_norm : bool
        Values are normed, without weights.
    norm_weighted : bool
        The norms of queries and keys have weights.
    norm_offset : float
        Added to these weights.
    norm_epsilon : float
        Added to the mean square.
    query_factors : callable, optional
        From positions, an array of integers, to the float32 factors on the queries at these
        positions. `attention` has no argument for them: multiply what `append` returns by
        ``layer.query_factors(batch.cache_position)[:, None, None]``.
    model_type : str, optional
        The model type, which decides the order of rows in fused projections.
    index : int, optional
        The layer's index, which its tensors' names have; None for the only layer of a state dict.

    Examples
    --------
    >>> import rope_cpu
    >>> layer = rope_cpu.attention_layer({"model_type": "gemma3_text"}, 0)
    >>> layer.options
    {'scale': 0.0625, 'window': 4096, 'softcap': None}
    """

    num_heads: int = field()
    num_kv_heads: int = field()
    head_dim: int = field()
    value_dim: int = field()
    scale: float = field()
    norm_epsilon: float = 1e-6
    rope: RotaryEmbedding | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `rope_cpu.attention`; sinks are among the weights.

        Raises ValueError for attention that is not causal.
        """
        if not self.causal:
            raise ValueError("the layer attends in both directions, and `attention` is causal")
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap}

    def weights(self, tensors: Mapping[str, Any] | str | PathLike[str]) -> AttentionWeights:
        """Return the weights of the layer.

        Parameters
        ----------
        tensors : mapping of str to array, or path
            A state dict, of NumPy arrays or of PyTorch tensors; or a safetensors file, the
            *.safetensors.index.json of several, or a folder with model.safetensors or
            model.safetensors.index.json. Names are those of the checkpoint, with any prefix. Files
            need the package safetensors, and only the layer's own tensors are read.

        Returns
        -------
        AttentionWeights

        Raises
        ------
        TypeError, ValueError
            If tensors are missing, not finite or no floats, have other shapes than the config says,
            or belong to a part of the attention that is not known, such as a gate.
        OSError
            If a file cannot be read.

        Examples
        --------
        >>> import numpy as np, rope_cpu
        >>> config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
        ...           "num_key_value_heads": 2, "num_hidden_layers": 1}
        >>> rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
        >>> state = {f"model.layers.0.self_attn.{name}.weight": np.ones((count, 64))
        ...          for name, count in rows.items()}
        >>> weights = rope_cpu.attention_layer(config, 0).weights(state)
        >>> weights.k.shape, weights.k_bias
        ((32, 64), None)
        """
        arrays: dict[str, Any] = layer_arrays(self, tensors)
        if self.qk_norm is not None:
            for name in ("q_norm", "k_norm"):
                arrays[name] = self._norm(arrays.get(name))
        if self.v_norm:
            arrays["v_norm"] = RMSNorm(None, self.norm_epsilon)
        return AttentionWeights(**arrays)

    def _norm(self, weight: NDArray[Any] | None) -> RMSNorm:
        """Return the norm with a weight, None for a norm without."""
        offset = self.norm_offset if self.norm_weighted else 0.0
        return RMSNorm(weight, self.norm_epsilon, offset=offset)


def attention_layer(
    config: str | PathLike[str] | Mapping[str, Any] | Model, index: int
) -> AttentionLayer:
    """Return the attention of one layer of a model, as its config describes it.

    Parameters
    ----------
    config : path or mapping
        A config.json, its folder, or its content, as in `RotaryEmbedding.from_config`.
    index : int
        The index of the layer, from 0.

    Returns
    -------
    AttentionLayer

    Raises
    ------
    TypeError, ValueError
        If the config is invalid, if its model type is not known, or if the model has a part of
        attention that these objects do not express: latent attention, chunks, norms over the whole
        projection, tokens that attend in both directions.
    OSError
        If the file cannot be read.

    Examples
    --------
    >>> import rope_cpu
    >>> config = {"model_type": "gemma2", "num_hidden_layers": 26}
    >>> layer = rope_cpu.attention_layer(config, 1)
    >>> layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.rope.rope_type
    (8, 4, 256, 'default')
    >>> layer.options
    {'scale': 0.0625, 'window': None, 'softcap': 50.0}
    """
    parsed = read(config)
    parsed.at("index", index, own_keys=True)
    layer = parsed.layer(parsed.attention, (*EXPRESSED, *SERVED), index)
    rope = None if layer.spec is None else RotaryEmbedding.from_spec(layer.spec)
    return AttentionLayer(**vars(layer), rope=rope)
