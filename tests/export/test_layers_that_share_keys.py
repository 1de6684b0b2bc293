"""Layers without keys of their own attend to the cache of a donor, an earlier layer (Gemma 3n).

Such a layer is fed the donor's new keys and values, before norm and rotation, with the donor's
cache: it writes the same numbers again, and attends to them.
"""

import numpy as np
import pytest
from attention_oracle import attention, exactly, normed
from attention_runs import agrees, count_on, draw_tensors

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32, rope_theta=500.0)
OPTIONS = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "layout": "bshd",
    "max_positions": 64,
    "window": 5,
    "qk_norm": "input",
}
TOKENS = 13
CAPACITY = 16
STEPS = ((0, 11), (11, 12), (12, 13))
PAST = ("past_key", "past_value")


@pytest.fixture
def inputs(rng):
    """Return q of a donor, k and v of it, q of the layer that shares them, and norms of the three.

    The weights are of the donor's queries, the donor's keys and the layer's queries.
    """
    q, k, v = draw_tensors(rng)
    q_sharing, *_ = draw_tensors(rng)
    return (q, k, v, q_sharing), rng.uniform(0.5, 1.5, (3, 32)).astype(np.float32)


def feeds_of(inputs, start, end):
    """Return the inputs of a step, beside the cache, of the donor and of the layer."""
    (q, k, v, q_sharing), (q_norm, k_norm, sharing_norm) = inputs
    part = {name: np.ascontiguousarray(x[:, start:end]) for name, x in (("k", k), ("v", v))}
    part["k_norm_weight"] = k_norm
    for x, norm in ((q, q_norm), (q_sharing, sharing_norm)):
        yield part | {"q": np.ascontiguousarray(x[:, start:end]), "q_norm_weight": norm}


def expected(inputs):
    """Return the attention of the layer's queries to the donor's keys and values."""
    (_, k, v, q_sharing), (_, k_norm, sharing_norm) = inputs
    queries = normed(exactly(q_sharing), sharing_norm.astype(np.float64), 1e-6, "float32")
    keys = normed(exactly(k), k_norm.astype(np.float64), 1e-6, "float32")
    return attention(ROPE, queries, keys, v, count_on(2, TOKENS), "float32", window=5)


def test_a_growing_cache(target, inputs):
    """Both layers are fed the donor's past."""
    session = runtime.open_session(export.export_attention(ROPE, **OPTIONS, target=target))
    cache = [np.zeros((2, 2, 0, 32), np.float32) for _ in PAST]
    results = []
    for start, end in STEPS:
        past = dict(zip(PAST, cache, strict=True))
        donor, sharing = feeds_of(inputs, start, end)
        _, *cache = session.run(None, donor | past)
        result, *again = session.run(None, sharing | past)
        np.testing.assert_array_equal(again, cache)
        results.append(result)
    assert agrees(np.concatenate(results, axis=1), expected(inputs))


@pytest.mark.parametrize("cache_dtype", [None, "int8"])
def test_a_shared_cache(target, cache_dtype, inputs):
    """Both layers have the donor's buffers."""
    if cache_dtype is not None and target != "ort":
        pytest.skip("refused")
    model = export.export_attention(
        ROPE, **OPTIONS, target=target, cache="shared", cache_dtype=cache_dtype
    )
    session = runtime.open_session(model)
    dtype = np.dtype(cache_dtype or np.float32)
    buffers = {name: np.zeros((2, 2, CAPACITY, 32), dtype) for name in PAST}
    scales = {f"{name}_scale": np.full((1, 2, 1, 32), 0.02, np.float32) for name in "kv"}
    arrays = buffers | (scales if cache_dtype else {})
    results = []
    for start, end in STEPS:
        arrays["past_lengths"] = np.full(2, start)
        result = np.zeros((2, end - start, 4, 32), np.float32)
        for feeds in feeds_of(inputs, start, end):
            before = [x.copy() for x in buffers.values()]
            export.bind(session, feeds | arrays, {"attention": result})()
        np.testing.assert_array_equal(list(buffers.values()), before)
        results.append(result)
    if cache_dtype is None:
        assert agrees(np.concatenate(results, axis=1), expected(inputs))
