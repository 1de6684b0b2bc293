"""Faults that the fuzz tests found, each with the least input that shows it."""

from __future__ import annotations

import pytest

from rope_cpu import RotaryEmbedding, export


@pytest.mark.parametrize("suffix", ["json", "textproto", "onnxtxt", "onnx", ""])
@pytest.mark.parametrize("content", [b"{}", b"{", b"\xff", b"ir_version: x"])
def test_a_file_that_is_no_model_is_refused_whatever_its_suffix(tmp_path, suffix, content):
    """Suffixes of other formats let onnx parse the file as those, and protobuf's ParseError went out."""
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="`model` is .*, which is no ONNX file"):
        export.validate(path, RotaryEmbedding(16))
