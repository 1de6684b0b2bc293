"""Rotated attention in float64, in one pass over all tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import tolerance
from rope_cpu.export import reference
from rope_cpu.export.attention_options import AttentionOptions

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

Array = NDArray[Any]
Float64 = NDArray[np.float64]

# What float32 and float64 attention over a few dozen tokens of normal values may be off by.
ABSOLUTE = {np.dtype(np.float64): 1e-14}
ABSOLUTE_FLOAT32 = 2e-6


def outputs(
    rope: RotaryEmbedding, options: AttentionOptions, tables: dict[str, Array], drawn: dict[str, Array]
) -> dict[str, tuple[Float64, Float64]]:
    """Return what each output of a model has to be, exact, and how far it may lie from that."""
    asked = rope, options, tables, drawn
    present = {"present_key": cached(*asked, "k"), "present_value": cached(*asked, "v")} if options.past else {}
    return {"attention": attended(*asked)} | present


def attended(
    rope: RotaryEmbedding, options: AttentionOptions, tables: dict[str, Array], drawn: dict[str, Array]
) -> tuple[Float64, Float64]:
    """Return the exact result (batch, tokens, heads, width), or (batch, tokens, out), and its bound.

    drawn: q, k, v (batch, tokens, heads, width) or hidden (batch, tokens, in); ids; attention_mask. The bound is the
    absolute error of the arithmetic, times the size of the values, one rounding of the result, and what rounding the
    keys to the cache's dtype and the angles to float64 does to the scores and so to the weights: at most twice the
    largest change of a score.
    """
    dtype = np.dtype(options.rope.dtype)
    q, k, v = (_ready(rope, options, tables, drawn, name) for name in "qkv")
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (np.repeat(x, options.heads // options.kv_heads, axis=1) for x in (k, v))
    allowed, added = _masks(options, drawn, q.shape[2])
    scores = options.scale * q @ k.swapaxes(-1, -2)
    if options.softcap is not None:
        scores = options.softcap * np.tanh(scores / options.softcap)
    scores = np.where(allowed, scores + added, -np.inf)
    most = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True)
    result = np.where(total > 0, weights / np.where(total > 0, total, 1), 0) @ v
    half = 0.0 if dtype.itemsize > 2 else float(tolerance.half_ulp(1.0, dtype))
    turned = half + 4 * _angle_error(rope, options, drawn)
    change = options.scale * turned * (np.abs(q).sum(axis=-1, keepdims=True) * np.abs(k).max())
    size = np.abs(v).max(axis=-2, keepdims=True)
    relative = np.maximum(1.0, size) * ABSOLUTE.get(dtype, ABSOLUTE_FLOAT32)
    bound = relative + size * (2 * change + (half if options.hidden is not None else 0))
    result, bound = (x.transpose(0, 2, 1, 3) for x in (result, np.broadcast_to(bound, result.shape)))
    if options.output is not None:
        result, bound = _output(result, bound, tables)
    return result, bound + tolerance.half_ulp(result, dtype)


def cached(
    rope: RotaryEmbedding, options: AttentionOptions, tables: dict[str, Array], drawn: dict[str, Array], name: str
) -> tuple[Float64, Float64]:
    """Return the keys or values (k or v) that are cached, (batch, kv_heads, tokens, width), exact, and their bound."""
    exact = _ready(rope, options, tables, drawn, name).transpose(0, 2, 1, 3)
    if name == "v" and "hidden" not in drawn:
        return exact, np.zeros_like(exact)
    dtype = np.dtype(options.rope.dtype)
    size = np.maximum(1.0, np.abs(exact).max(axis=-1, keepdims=True))
    relative = ABSOLUTE.get(dtype, ABSOLUTE_FLOAT32) + 2 * _angle_error(rope, options, drawn)
    return exact, tolerance.half_ulp(exact, dtype) + size * relative


def _angle_error(rope: RotaryEmbedding, options: AttentionOptions, drawn: dict[str, Array]) -> float:
    """Return what angles may be off by where the graph computes them, in radians."""
    if options.rope.tables:
        return 0.0
    return float(reference.turns(rope, drawn["ids"])[2].max(initial=0.0)) * 2.0**-53


def _ready(
    rope: RotaryEmbedding, options: AttentionOptions, tables: dict[str, Array], drawn: dict[str, Array], name: str
) -> Float64:
    """Return q, k or v in float64: projected, normed, rotated."""
    heads, width = (options.heads if name == "q" else options.kv_heads), rope.head_dim
    if "hidden" in drawn:
        x = drawn["hidden"].astype(np.float64) @ tables[f"{name}_weight"].astype(np.float64)
        x = x + tables.get(f"{name}_bias", np.zeros(1)).astype(np.float64)
        x = x.reshape(*x.shape[:2], heads, options.v_head_dim if name == "v" else width)
    else:
        x = drawn[name].astype(np.float64)
    if name == "v":
        return x
    if f"{name}_norm" in tables:
        root = np.sqrt((x * x).mean(axis=-1, keepdims=True) + options.epsilon)
        x = x / root * tables[f"{name}_norm"].astype(np.float64)
    return reference.rotated(rope, x, drawn["ids"], inverse=False, computed=False)[0]


def _masks(options: AttentionOptions, drawn: dict[str, Array], tokens: int) -> tuple[Array, Array]:
    """Return where attention is allowed, and what is added to the scores, each as (batch, heads, seq, seq)."""
    query, key = np.arange(tokens)[:, None], np.arange(tokens)
    allowed = np.ones((1, 1, tokens, tokens), bool)
    if options.causal:
        allowed = allowed & (key <= query)
    if options.window is not None:
        allowed = allowed & (key > query - options.window)
    if options.mask == "none":
        return allowed, np.zeros(1)
    mask = drawn["attention_mask"]
    if options.mask == "float":
        return allowed, mask.astype(np.float64)
    return allowed & (mask[:, None, None, :] if options.mask == "padding" else mask), np.zeros(1)


def _output(result: Float64, bound: Float64, tables: dict[str, Array]) -> tuple[Float64, Float64]:
    weight = tables["o_weight"].astype(np.float64)
    flat = result.reshape(*result.shape[:2], -1)
    exact = flat @ weight + tables.get("o_bias", np.zeros(1)).astype(np.float64)
    return exact, bound.reshape(flat.shape) @ np.abs(weight)
