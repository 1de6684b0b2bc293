"""ONNX's own backend cases of rotations, through exported graphs and through apply_rotary."""

import numpy as np
import pytest
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
