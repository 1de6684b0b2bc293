"""ONNX's own backend cases, through the graphs that we export, under onnxruntime."""

import numpy as np
import pytest
from onnx_cases import cases, inputs_of, outputs_of

from rope_cpu import RotaryEmbedding, export
from rope_cpu.export import runtime


def described(case):
    """What a case asks for: the name says it, in the expanded models too, which hold no RotaryEmbedding node."""
    return {
        "interleaved": "interleaved" in case.name,
        "partial": "rotary_dim" in case.name,
        "ids": "no_position_ids" not in case.name,
        "packed": "3d_input" in case.name,
    }


ROTARY = cases("test_rotary_embedding")


def test_there_are_sixteen_rotary_cases():
    assert len(ROTARY) == 16


@pytest.mark.parametrize("target", ["primitive", "onnx", "ort"])
@pytest.mark.parametrize("case", ROTARY, ids=lambda case: case.name)
def test_rotary_case_through_the_exported_graph(case, target):
    asked, feeds = described(case), inputs_of(case)
    (expected,) = outputs_of(case).values()
    head_dim, pairs = 8, feeds["cos_cache"].shape[-1]
    assert pairs == (2 if asked["partial"] else 4)
    rope = RotaryEmbedding.from_inv_freq(np.ones(pairs), head_dim=head_dim, interleaved=asked["interleaved"])
    model = export.export_rope(
        rope,
        target=target,
        inputs=("input",),
        layout="bsd" if asked["packed"] else "bhsd",
        num_heads=4 if asked["packed"] else None,
        positions="position_ids" if asked["ids"] else "none",
        table_inputs=True,
    )
    (result,) = runtime.session(model).run(None, feeds)
    np.testing.assert_allclose(result, expected, rtol=case.rtol, atol=case.atol)
    # The same numbers to the last bits: the cases' own tolerance would forgive a wrong rounding.
    np.testing.assert_allclose(result, expected, rtol=0, atol=3e-7)
