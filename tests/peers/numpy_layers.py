"""A layer of `attention_layer` in NumPy: projections, append, attention."""

import numpy as np

import rope_cpu

PAGES = 48
PAGE_SIZE = 8


def projected(x, weights, name):
    """Return hidden states times a projection, with its bias if it has one."""
    y = x @ np.float32(getattr(weights, name)).T
    bias = getattr(weights, f"{name}_bias")
    return y if bias is None else y + bias


def in_steps(layer, weights, hidden, steps):
    """Return the results of a layer, step by step over one sequence.

    steps: numbers of tokens.
    """
    shape = (PAGES, PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
    cache = rope_cpu.KVCache.zeros(*shape, dtype=np.float32)
    rope = layer.rope or rope_cpu.RotaryEmbedding.from_inv_freq(np.zeros(layer.head_dim // 2))
    pages = [np.arange(PAGES)[::-1]]
    results = []
    for stop, count in zip(np.cumsum(steps), steps, strict=True):
        batch = rope_cpu.Batch(
            seq_lens=[stop], query_lens=[count], page_table=pages, page_size=PAGE_SIZE
        )
        x = hidden[0, stop - count : stop]
        rows = [projected(x, weights, name) for name in "qkv"]
        q, k, v = (row.reshape(count, -1, layer.head_dim) for row in rows)
        ids = batch.cache_position
        if rope.axes > 1:  # text has the same id on every axis
            ids = np.repeat(ids[:, None], rope.axes, axis=1)
        plan = rope.plan(ids, layout="thd")
        norms = {name: getattr(weights, name) for name in ("q_norm", "k_norm", "v_norm")}
        q_rot = plan.append(q, k, v, cache, batch, **norms)
        if layer.query_factors is not None:
            q_rot *= layer.query_factors(batch.cache_position)[:, None, None]
        y = rope_cpu.attention(q_rot, cache, batch, sinks=weights.sinks, **layer.options)
        results.append(projected(y.reshape(count, -1), weights, "o"))
    return np.concatenate(results)
