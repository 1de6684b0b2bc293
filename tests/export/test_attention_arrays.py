"""Sinks and weights of norms: inputs of an attention model, or initializers in it."""

import numpy as np
import pytest
from attention_oracle import attention, normed
from attention_runs import SEPARATE, agrees, count_on, draw_tensors, run_steps, targets_of
from conftest import DTYPES
from fewer_cases import pairwise
from onnx import helper

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export.targets import TARGETS
from rope_cpu.export.validation import session as runtime

ROPE = RotaryEmbedding(32, rope_theta=500.0)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "max_positions": 32, "layout": "bshd"}


def draw_sinks(rng, dtype=np.float32):
    """Return sinks that take a fair share of the weights."""
    return rng.uniform(-1, 3, 4).astype(dtype)


OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "softcap": {"softcap": 1.5},
    "all": {"window": 4, "softcap": 3.0, "scale": 0.4},
}


@pytest.mark.parametrize(
    ("target", "kind", "name", "source"),
    pairwise(
        TARGETS,
        DTYPES,
        OPTIONS,
        ("input", "array"),
        allowed=lambda target, kind, *_: target in targets_of(kind),
    ),
)
def test_sinks_take_their_share_of_the_softmax(target, kind, name, source, rng):
    dtype = DTYPES[kind]
    q, k, v = draw_tensors(rng, dtype, seq=9)
    sinks = draw_sinks(rng, dtype)
    argument = "input" if source == "input" else sinks
    model = export.export_attention(
        ROPE, **HEADS, target=target, dtype=dtype, sinks=argument, **OPTIONS[name]
    )
    arrays = {"sinks": sinks} if source == "input" else {}
    exact_sinks = sinks.astype(np.float64)
    want = attention(ROPE, q, k, v, count_on(2, 9), kind, sinks=exact_sinks, **OPTIONS[name])
    for steps in ((9,), (6, 1, 1, 1)):
        assert agrees(run_steps(model, (q, k, v), steps, arrays=arrays)[0], want), steps
    without = attention(ROPE, q, k, v, count_on(2, 9), kind, **OPTIONS[name])
    assert not agrees(run_steps(model, (q, k, v), (9,), arrays=arrays)[0], without)


@pytest.mark.parametrize("target", SEPARATE)
def test_sinks_without_a_causal_mask(target, rng):
    q, k, v = draw_tensors(rng, seq=9)
    sinks = draw_sinks(rng)
    model = export.export_attention(
        ROPE, **HEADS, target=target, sinks=sinks, causal=False, past=False
    )
    (result,) = runtime.open_session(model).run(None, {"q": q, "k": k, "v": v})
    want = attention(ROPE, q, k, v, count_on(2, 9), "float32", causal=False, sinks=sinks)
    assert agrees(result, want)


@pytest.mark.parametrize("mask", ["padding", "bool", "float"])
def test_validate_covers_sinks_norms_and_masks(target, mask):
    model = export.export_attention(
        ROPE, **HEADS, target=target, mask=mask, sinks="input", qk_norm="input"
    )
    report = export.validate(model, ROPE)
    assert report.passed, str(report)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_weights_of_norms_are_inputs(target, offset, rng):
    q, k, v = draw_tensors(rng, seq=9)
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
    want = attention(ROPE, queries, keys, v, count_on(2, 9), "float32")
    steps = (6, 1, 2) if TARGETS[target].takes_chunks else (9,)
    assert agrees(run_steps(model, (q, k, v), steps, arrays=arrays)[0], want)


def test_the_offset_is_added_to_weights_that_are_initializers(rng):
    weights = rng.uniform(-0.5, 0.5, (2, 32))
    plain = export.export_attention(ROPE, **HEADS, qk_norm=tuple(weights + 1))
    offset = export.export_attention(ROPE, **HEADS, qk_norm=tuple(weights), norm_offset=1.0)
    assert plain.graph == offset.graph


def test_validate_finds_wrong_sinks(target):
    """A graph whose sinks are doubled."""
    model = export.export_attention(ROPE, **HEADS, target=target, sinks="input")
    for node in model.graph.node:
        node.input[:] = ["twice" if name == "sinks" else name for name in node.input]
    model.graph.node.insert(0, helper.make_node("Add", ["sinks", "sinks"], ["twice"]))
    report = export.validate(model, ROPE)
    assert not report.passed
    assert not report.outcomes[0].problem
