"""Faults that the fuzz tests found, each with the least input that shows it."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import read_only

from rope_cpu import RotaryEmbedding, apply_rotary, export


@pytest.mark.parametrize("suffix", ["json", "textproto", "onnxtxt", "onnx", ""])
@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b"ir_version: x"])
def test_a_file_that_is_no_model_is_refused_whatever_its_suffix(tmp_path, suffix, content):
    """By such suffixes onnx chose another parser, and protobuf's ParseError reached the caller."""
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"`model` is .*; it must be an ONNX file"):
        export.validate(path, RotaryEmbedding(16))


def test_a_model_without_one_of_its_outputs_is_reported():
    """KeyError went out of validate, which never raises because a model is wrong."""
    rope = RotaryEmbedding(16)
    model = export.export_attention(rope, num_heads=2)
    (left_out,) = [value for value in model.graph.output if value.name == "present_value"]
    model.graph.output.remove(left_out)
    report = export.validate(model, rope)
    assert not report.passed
    assert any("present_value" in outcome.problem for outcome in report.outcomes)


def test_a_model_with_a_name_that_is_no_text_is_reported(tmp_path):
    """UnicodeDecodeError left validate, because onnx could not print the name that it missed."""
    rope, path = RotaryEmbedding(16), tmp_path / "model.onnx"
    written = export.export_rope(rope, max_positions=40).SerializeToString()
    assert b"cos_cache" in written
    path.write_bytes(written.replace(b"cos_cache", b"\x9fos_cache", 1))
    assert not export.validate(path, rope).passed


def other_order(x):
    return x.astype(x.dtype.newbyteorder())


@pytest.mark.parametrize("name", ["float32", "float64", "float16"])
def test_the_other_byte_order_is_refused_after_arrays_with_the_same_flags(name):
    """They were rotated as native ones after a read-only or unaligned array.

    Numba looks such arrays up by number of axes, contiguity, writability and type number.
    """
    x, plan = np.ones((1, 3, 4, 16), name), RotaryEmbedding(16).plan([0, 1, 2])
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(name).reshape(x.shape)
    plan.rotate(unaligned, out=unaligned)
    plan.rotate(read_only(x.copy()))
    out, cos = np.zeros_like(other_order(x)), np.ones((3, 8), np.float32)
    calls = {
        "k": lambda: plan(x, other_order(x)),
        "k, read-only": lambda: plan(x, read_only(other_order(x))),
        "out": lambda: plan.rotate(x, out=out),
        "out of apply_rotary": lambda: apply_rotary(x, cos, cos, out=out),
    }
    for call in calls.values():
        with pytest.raises(TypeError, match=r"has dtype [<>]f"):
            call()
    assert not out.any()
