"""The forward pass of a decoder in NumPy, over the sequences of one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import rope_cpu
from rope_server.weights import Array, Layer, Linear, Weights

FEW_ROWS = 64  # up to which OpenBLAS is faster with the weight on the left


def forward(
    weights: Weights,
    caches: list[rope_cpu.KVCache],
    tokens: Sequence[int],
    batch: rope_cpu.Batch,
    lengths: Sequence[int],
    rows: Sequence[int],
) -> Array:
    """Return the logits (rows, vocabulary) of some tokens of a step; append all to the caches.

    tokens: the new tokens of all sequences, packed. lengths: the length that the keys of each
    sequence are rotated for, which is that of its whole prompt while it comes in chunks. rows: the
    places of the tokens whose logits are needed.
    """
    x = weights.embedding[np.asarray(tokens)] * weights.embedding_scale
    plans = [
        rope.at_length(lengths).plan(
            batch.cache_position, layout="thd", cu_seqlens=batch.cu_seqlens
        )
        for rope in weights.ropes
    ]
    for layer, cache in zip(weights.layers, caches, strict=True):
        y = attention(
            layer, normed(x, layer.norms["attention"], weights), plans[layer.rope], cache, batch
        )
        x = x + _normed_after(y, layer, "after_attention", weights)
        y = mlp(layer, normed(x, layer.norms["mlp"], weights), weights.activation)
        x = x + _normed_after(y, layer, "after_mlp", weights)
    logits = product(normed(x[np.asarray(rows, np.intp)], weights.norm, weights), weights.head)
    if weights.logit_softcap:
        logits = weights.logit_softcap * np.tanh(logits / weights.logit_softcap)
    return logits


def attention(
    layer: Layer,
    x: Array,
    plan: rope_cpu.RotaryPlan,
    cache: rope_cpu.KVCache,
    batch: rope_cpu.Batch,
) -> Array:
    """Return the result of a layer's attention; append the keys and values to the cache."""
    facts = layer.facts
    heads = linear(layer.qkv, x).reshape(len(x), -1, facts.head_dim)
    q, k, v = np.split(heads, [facts.num_heads, facts.num_heads + facts.num_kv_heads], axis=1)
    norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
    q = plan.append(q, k, v, cache, batch, out=q, **norms)
    y = rope_cpu.attention(q, cache, batch, **layer.options)
    return linear(layer.out, y.reshape(len(x), -1))


def mlp(layer: Layer, x: Array, activation: str) -> Array:
    """Return the result of a layer's MLP."""
    gate, up = np.split(linear(layer.gate_up, x), 2, axis=1)
    return linear(layer.down, ACTIVATIONS[activation](gate) * up)


def silu(x: Array) -> Array:
    """Return x · sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp(-x) = inf makes it 0
        return x / (1 + np.exp(-x))


def gelu_tanh(x: Array) -> Array:
    """Return the approximation of GELU by tanh."""
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (1 + np.tanh(inner))


ACTIVATIONS = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}


def normed(x: Array, weight: Array, weights: Weights) -> Array:
    """Return the RMS norm of each row."""
    mean_square = np.mean(x * x, axis=1, keepdims=True)
    return x / np.sqrt(mean_square + weights.epsilon) * weight


def linear(projection: Linear, x: Array) -> Array:
    """Return a projection of each row."""
    y = product(x, projection.weight)
    return y if projection.bias is None else y + projection.bias


def product(x: Array, weight: Array) -> Array:
    """Return x @ weight.T."""
    if len(x) <= FEW_ROWS:
        return np.ascontiguousarray((weight @ x.T).T)
    return x @ weight.T


def _normed_after(y: Array, layer: Layer, place: str, weights: Weights) -> Array:
    return normed(y, layer.norms[place], weights) if place in layer.norms else y
