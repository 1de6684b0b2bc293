"""A NumPy layer of `attention_layer`, append and attention, against transformers' modules."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from peers.attention_cases import (
    ALL_CASES,
    CAPACITY,
    STEPS,
    WIDTH,
    expected,
    rotary,
)

import rope_cpu

pytestmark = pytest.mark.peers

PAGE_SIZE = 8
NOT_ROTATED = rope_cpu.RotaryEmbedding.from_inv_freq(np.zeros(WIDTH // 2))


def projected(x, weights, name):
    """Return hidden states times a projection, with its bias if it has one."""
    y = x @ getattr(weights, name).T
    bias = getattr(weights, f"{name}_bias")
    return y if bias is None else y + bias


def in_steps(layer, weights, hidden):
    """Return the results of a layer, step by step over one sequence."""
    shape = (CAPACITY // PAGE_SIZE, PAGE_SIZE, layer.num_kv_heads, layer.head_dim)
    cache = rope_cpu.KVCache.zeros(*shape, dtype=np.float32)
    rope = layer.rope or NOT_ROTATED
    pages = [np.arange(len(cache.key))[::-1]]
    results = []
    for stop, count in zip(np.cumsum(STEPS), STEPS, strict=True):
        batch = rope_cpu.Batch(
            seq_lens=[stop], query_lens=[count], page_table=pages, page_size=PAGE_SIZE
        )
        x = hidden[0, stop - count : stop]
        rows = [projected(x, weights, name) for name in "qkv"]
        q, k, v = (row.reshape(count, -1, layer.head_dim) for row in rows)
        plan = rope.plan(batch.cache_position, layout="thd")
        norms = {name: getattr(weights, name) for name in ("q_norm", "k_norm", "v_norm")}
        q_rot = plan.append(q, k, v, cache, batch, **norms)
        if layer.query_factors is not None:
            q_rot *= layer.query_factors(batch.cache_position)[:, None, None]
        y = rope_cpu.attention(q_rot, cache, batch, sinks=weights.sinks, **layer.options)
        results.append(projected(y.reshape(count, -1), weights, "o"))
    return np.concatenate(results)


@pytest.mark.parametrize("name", ALL_CASES)
def test_a_layer_of_a_server_is_that_of_the_model(name):
    """A different order of sums may be 4 times as far off as the module in float32."""
    index = ALL_CASES[name].layer
    peer = expected(name)
    layer = rope_cpu.attention_layer(peer.config, index)
    if layer.rope is not None:  # with the float32 angles of transformers
        layer = replace(layer, rope=rotary(peer.config, index))
    result = in_steps(layer, layer.weights(peer.state), peer.hidden)
    error = np.abs(result - peer.result[0]).max()
    print(f"{name:<20} {error:.1e}, the module in float32 {peer.own_error:.1e}")
    assert error <= 4 * peer.own_error
