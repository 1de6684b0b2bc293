"""ONNX's own backend cases, run through exported graphs under onnxruntime."""

import numpy as np
import onnx
import pytest
from attention_runs import SEPARATE
from onnx import numpy_helper
from onnx_cases import cases, inputs_of, outputs_of

from rope_cpu import RotaryEmbedding, apply_rotary, export
from rope_cpu.export.validation import session as runtime


def case_options(case):
    """Return the options of a case from its name.

    The expanded models hold no RotaryEmbedding node, but have the same names.
    """
    return {
        "interleaved": "interleaved" in case.name,
        "partial": "rotary_dim" in case.name,
        "ids": "no_position_ids" not in case.name,
        "packed": "3d_input" in case.name,
    }


ROTARY = cases("rotary_embedding")


def test_there_are_sixteen_rotary_cases():
    assert len(ROTARY) == 16


@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_rotary_case_through_the_exported_graph(case, target):
    options = case_options(case)
    feeds = inputs_of(case)
    (expected,) = outputs_of(case).values()
    head_dim = 8
    tables = {name: feeds.pop(f"{name}_cache") for name in ("cos", "sin")}
    pairs = tables["cos"].shape[-1]
    assert pairs == (2 if options["partial"] else 4)
    rope = RotaryEmbedding.from_inv_freq(
        np.ones(pairs), head_dim=head_dim, interleaved=options["interleaved"]
    )
    model = export.export_rope(
        rope,
        target=target,
        inputs=("input",),
        layout="bsd" if options["packed"] else "bhsd",
        num_heads=4 if options["packed"] else None,
        max_positions=tables["cos"][..., 0].size,
    )
    if not options["ids"]:  # the case has a row of cos and sin for each token
        tokens = tables["cos"].shape[:2]
        feeds["position_ids"] = np.arange(np.prod(tokens)).reshape(tokens)
    for tensor in model.graph.initializer:
        if tensor.name in ("cos_cache", "sin_cache"):
            table = tables[tensor.name.removesuffix("_cache")].reshape(-1, pairs)
            tensor.CopyFrom(numpy_helper.from_array(table, tensor.name))
    (result,) = runtime.open_session(model).run(None, feeds)
    np.testing.assert_allclose(result, expected, rtol=case.rtol, atol=case.atol)
    # The same numbers to the last bits: the cases' own tolerance would forgive a wrong rounding.
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_rotary_case_through_apply_rotary(case):
    options = case_options(case)
    feeds = inputs_of(case)
    (expected,) = outputs_of(case).values()
    x = feeds["input"]
    layout = "bhsd"
    if options["packed"]:  # (batch, seq, heads·head_dim)
        x = x.reshape(*x.shape[:2], 4, 8)
        layout = "bshd"
    result = apply_rotary(
        x,
        feeds["cos_cache"],
        feeds["sin_cache"],
        feeds.get("position_ids"),
        interleaved=options["interleaved"],
        layout=layout,
    )
    np.testing.assert_allclose(result.reshape(expected.shape), expected, rtol=0, atol=3e-7)


# The expanded form of a case has the same inputs and outputs, and exports the same graph.
ATTENTION = [case for case in cases("attention") if not case.name.endswith("_expanded")]
ONNX_VERSION = tuple(int(part) for part in onnx.__version__.split(".")[:2])


def attention_attributes(case):
    """Return the attributes of the Attention node."""
    (node,) = (node for node in case.model.graph.node if node.op_type == "Attention")
    return {a.name: a.f if a.type == a.FLOAT else a.i for a in node.attribute}


def by_head(x, heads):
    """Return a 3-D or 4-D input as (batch, heads, seq, width)."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def attended_keys(attributes, new, total, past, valid):
    """Return the keys to which queries attend, as a mask (batch or 1, 1, new, total).

    It combines causality, windows and padding. The first query follows the past; with padding, the
    last query is at the last valid key.
    """
    start = past if valid is None else valid.reshape(-1, 1, 1, 1) - new
    query = np.arange(new)[:, None] + start
    key = np.arange(total)
    allowed = np.ones((1, 1, new, total), bool)
    if attributes.get("is_causal"):
        allowed = allowed & (key <= query)
    left = attributes.get("left_window_size", -1)
    right = attributes.get("right_window_size", -1)
    if left >= 0:
        allowed = allowed & (key >= query - left)
    if right >= 0:
        allowed = allowed & (key <= query + right)
    return allowed if valid is None else allowed & (key < valid.reshape(-1, 1, 1, 1))


def exported_inputs(case):
    """Return the inputs of an exported model that computes the same attention as a case.

    Queries and keys of an exported model belong to the same tokens. If a case has more keys than
    queries, the first keys are the past; with the identity as the rotation, that is the same.
    Everything that hides keys becomes one mask.
    """
    feeds = inputs_of(case)
    attributes = attention_attributes(case)
    kv_heads = attributes.get("kv_num_heads")
    q = by_head(feeds["Q"], attributes.get("q_num_heads"))
    k = by_head(feeds["K"], kv_heads)
    v = by_head(feeds["V"], kv_heads)
    if q.shape[3] == 1:  # no pair to rotate: a second element, zero, changes no score
        q = np.pad(q, [(0, 0)] * 3 + [(0, 1)])
        k = np.pad(k, [(0, 0)] * 3 + [(0, 1)])
    past = feeds["past_key"].shape[2] if "past_key" in feeds else 0
    if past:
        k = np.concatenate([feeds["past_key"], k], axis=2)
        v = np.concatenate([feeds["past_value"], v], axis=2)
    new = q.shape[2]
    total = k.shape[2]
    mask = feeds.get("attn_mask", np.ones((new, total), bool))
    if mask.shape[-1] < total:
        fill = False if mask.dtype == bool else -np.inf
        mask = np.pad(
            mask, [(0, 0)] * (mask.ndim - 1) + [(0, total - mask.shape[-1])], constant_values=fill
        )
    mask = np.broadcast_to(
        mask.reshape((1,) * (4 - mask.ndim) + mask.shape), (*q.shape[:2], new, total)
    )
    attended = attended_keys(attributes, new, total, past, feeds.get("nonpad_kv_seqlen"))
    if mask.dtype == bool:
        mask = mask & attended
    else:
        mask = np.where(attended, mask, -np.inf).astype(q.dtype)
    first = total - new
    inputs = {
        "q": q,
        "k": k[:, :, first:],
        "v": v[:, :, first:],
        "past_key": k[:, :, :first],
        "past_value": v[:, :, :first],
        "attention_mask": mask,
    }
    return {name: np.ascontiguousarray(value) for name, value in inputs.items()}


def test_attention_cases_are_there():
    """onnx 1.23 has 93 of them."""
    assert len(ATTENTION) >= 50


@pytest.mark.parametrize("target", SEPARATE)
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention_case_through_the_exported_graph(case, target):
    """Every case, also those for which onnxruntime has no kernel; scores are not compared."""
    feeds = exported_inputs(case)
    attributes = attention_attributes(case)
    if "softcap" in attributes and "attn_mask" in inputs_of(case) and ONNX_VERSION < (1, 23):
        pytest.skip("older versions of the specification cap the mask as well")
    model = export.export_attention(
        RotaryEmbedding.from_inv_freq(np.zeros(feeds["q"].shape[3] // 2)),
        num_heads=feeds["q"].shape[1],
        num_kv_heads=feeds["k"].shape[1],
        target=target,
        dtype=feeds["q"].dtype,
        causal=False,
        mask="bool" if feeds["attention_mask"].dtype == bool else "float",
        v_head_dim=feeds["v"].shape[3],
        softcap=attributes.get("softcap"),
        scale=attributes.get("scale", 1.0 if feeds["q"].shape[3] == 2 else None),
    )
    expected = outputs_of(case)
    shape = (*feeds["q"].shape[:3], feeds["v"].shape[3])
    cached = [
        (*feeds[n].shape[:2], feeds["attention_mask"].shape[3], feeds[n].shape[3])
        for n in ("k", "v")
    ]
    result, keys, values = runtime.run(runtime.open_session(model), feeds, [shape, *cached])
    want = by_head(expected["Y"], shape[1]).astype(np.float64)
    # Expected values of half precision are computed in it throughout, with some of its roundings.
    off = {"float32": 2e-6, "float16": 2.0**-9, "bfloat16": 2.0**-6}[str(result.dtype)]
    np.testing.assert_allclose(
        result.astype(np.float64), want, rtol=0, atol=off * max(1, np.abs(want).max())
    )
    if "present_key" in expected:
        np.testing.assert_array_equal(keys, expected["present_key"])
        np.testing.assert_array_equal(values, expected["present_value"])
