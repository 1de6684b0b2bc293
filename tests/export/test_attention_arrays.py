"""Sinks and weights of norms: inputs of an attention model, or initializers in it."""

import numpy as np
import pytest
from attention_oracle import attention, half_ulp, normed
from conftest import DTYPES
from onnx import helper

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.validation import session as runtime

TARGETS = ("primitive", "onnx", "ort")
ROPE = RotaryEmbedding(32, rope_theta=500.0)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 32, "layout": "bshd"}


def draw(rng, dtype=np.float32, batch=2, seq=9):
    """Return q, k, v (batch, seq, heads, width) and sinks that take a fair share of the weights."""
    q = rng.standard_normal((batch, seq, 4, 32)).astype(dtype)
    k = rng.standard_normal((batch, seq, 2, 32)).astype(dtype)
    v = rng.standard_normal((batch, seq, 2, 32)).astype(dtype)
    sinks = rng.uniform(-1, 3, 4).astype(dtype)
    return q, k, v, sinks


def run(model, tensors, arrays, steps):
    """Run a model of layout bshd in steps; arrays: its further inputs. Return the attention."""
    session = runtime.open_session(model, 1)
    k, v = tensors[1:]
    cache = [np.zeros((len(x), 2, 0, 32), x.dtype) for x in (k, v)]
    done = 0
    results = []
    for count in steps:
        span = slice(done, done + count)
        feeds = {
            name: np.ascontiguousarray(x[:, span]) for name, x in zip("qkv", tensors, strict=True)
        }
        feeds |= {"past_key": cache[0], "past_value": cache[1], **arrays}
        done += count
        shapes = [(len(k), count, 4, 32), *[(len(k), 2, done, 32)] * 2]
        result, *cache = runtime.run(session, feeds, shapes)
        results.append(result)
    return np.concatenate(results, axis=1)


def agrees(result, known):
    exact, bound = known
    difference = np.abs(result.astype(np.float64) - exact)
    return bool((difference <= bound + half_ulp(exact, result.dtype)).all())


def ids(batch, seq):
    return np.broadcast_to(np.arange(seq), (batch, seq))


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "all": {"window": 4, "softcap": 3.0, "scale": 0.4},
}


@pytest.mark.parametrize("source", ["input", "array"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("target", TARGETS)
def test_sinks_take_their_share_of_the_softmax(target, kind, name, source, rng):
    if kind == "float64" and target != "primitive":
        pytest.skip("refused")
    dtype = DTYPES[kind]
    q, k, v, sinks = draw(rng, dtype)
    argument = "input" if source == "input" else sinks
    model = export.export_attention(
        ROPE, **HEADS, target=target, dtype=dtype, sinks=argument, **OPTIONS[name]
    )
    arrays = {"sinks": sinks} if source == "input" else {}
    exact_sinks = sinks.astype(np.float64)
    want = attention(ROPE, q, k, v, ids(2, 9), kind, sinks=exact_sinks, **OPTIONS[name])
    for steps in ((9,), (6, 1, 1, 1)):
        assert agrees(run(model, (q, k, v), arrays, steps), want), steps
    without = attention(ROPE, q, k, v, ids(2, 9), kind, **OPTIONS[name])
    assert not agrees(run(model, (q, k, v), arrays, (9,)), without)


@pytest.mark.parametrize("target", ["primitive", "onnx"])
def test_sinks_without_a_causal_mask(target, rng):
    q, k, v, sinks = draw(rng)
    model = export.export_attention(
        ROPE, **HEADS, target=target, sinks=sinks, causal=False, past=False
    )
    (result,) = runtime.open_session(model).run(None, {"q": q, "k": k, "v": v})
    want = attention(ROPE, q, k, v, ids(2, 9), "float32", causal=False, sinks=sinks)
    assert agrees(result, want)


@pytest.mark.parametrize("mask", ["padding", "bool", "float"])
@pytest.mark.parametrize("target", TARGETS)
def test_validate_covers_sinks_norms_and_masks(target, mask):
    model = export.export_attention(
        ROPE, **HEADS, target=target, mask=mask, sinks="input", qk_norm="input"
    )
    report = export.validate(model, ROPE)
    assert report.passed, str(report)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weights_of_norms_are_inputs(target, offset, rng):
    q, k, v, _ = draw(rng)
    weights = rng.uniform(0.5, 1.5, (2, 32)).astype(np.float32)
    arrays = {
        "q_norm_weight": weights[0] - np.float32(offset),
        "k_norm_weight": weights[1] - np.float32(offset),
    }
    model = export.export_attention(
        ROPE, **HEADS, target=target, qk_norm="input", norm_offset=offset, norm_epsilon=1e-5
    )
    exact = [x.astype(np.float64) + offset for x in arrays.values()]
    queries, keys = (
        normed((x.astype(np.float64), np.zeros(x.shape)), weight, 1e-5, "float32")
        for x, weight in zip((q, k), exact, strict=True)
    )
    want = attention(ROPE, queries, keys, v, ids(2, 9), "float32")
    assert agrees(run(model, (q, k, v), arrays, (6, 1, 2) if target != "ort" else (9,)), want)


def test_the_offset_is_added_to_weights_that_are_initializers(rng):
    weights = rng.uniform(-0.5, 0.5, (2, 32))
    plain = export.export_attention(ROPE, **HEADS, qk_norm=tuple(weights + 1))
    offset = export.export_attention(ROPE, **HEADS, qk_norm=tuple(weights), norm_offset=1.0)
    assert plain.graph == offset.graph


@pytest.mark.parametrize("target", TARGETS)
def test_validate_finds_wrong_sinks(target):
    """A graph whose sinks are doubled."""
    model = export.export_attention(ROPE, **HEADS, target=target, sinks="input")
    for node in model.graph.node:
        node.input[:] = ["twice" if name == "sinks" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Add", ["sinks", "sinks"], ["twice"]))
    report = export.validate(model, ROPE)
    assert not report.passed
    assert not report.outcomes[0].problem
