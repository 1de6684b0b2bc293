"""Reading safetensors files: every dtype, shapes, and files that are damaged."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors_files import write_safetensors

from rope_cpu.export.checkpoints.safetensors_file import open_tensors


@pytest.fixture
def file(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_tensors_come_back(file, rng, dtype, shape):
    first = np.asarray(rng.standard_normal(shape)).astype(dtype)
    second = np.ones((3, 2), np.float32)
    write_safetensors(file, {"a.weight": first, "b": second})
    tensors = open_tensors(file)
    assert list(tensors) == ["a.weight", "b"]
    assert len(tensors) == 2
    assert tensors["a.weight"].dtype == first.dtype
    np.testing.assert_array_equal(tensors["a.weight"], first)
    np.testing.assert_array_equal(tensors["b"], second)
    with pytest.raises(KeyError):
        tensors["c"]


def test_a_dtype_that_is_not_real_is_refused_when_it_is_read(file):
    write_safetensors(file, {"a": np.zeros(3, np.int64), "b": np.zeros(3)})
    tensors = open_tensors(file)
    with pytest.raises(ValueError, match="'a' has dtype 'I64'; it must be F64"):
        tensors["a"]
    assert tensors["b"].shape == (3,)


def raw_file(entry):
    text = json.dumps({"a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        pytest.param(b"", "its header has 0 bytes", id="empty"),
        pytest.param(struct.pack("<Q", 2**40) + b"{}", "its header has 1099511627776", id="long"),
        pytest.param(struct.pack("<Q", 2) + b"[]", "does not hold a JSON object", id="list"),
        pytest.param(struct.pack("<Q", 2) + b"{{", "does not hold valid JSON", id="no JSON"),
        pytest.param(raw_file(5), "the entry of 'a' is 5", id="no entry"),
        pytest.param(
            raw_file({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}), "has shape", id="size"
        ),
        pytest.param(
            raw_file({"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}),
            "the entry of 'a' is",
            id="negative",
        ),
        pytest.param(
            raw_file({"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}),
            "has shape",
            id="past the end",
        ),
        pytest.param(
            raw_file({"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}), "entry", id="shape"
        ),
        pytest.param(
            raw_file({"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}), "entry", id="float"
        ),
        pytest.param(
            raw_file({"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}),
            "has shape",
            id="start",
        ),
    ],
)
def test_a_damaged_file_is_refused(file, content, text):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=text):
        open_tensors(file)["a"]


@pytest.mark.parametrize("weight_map", [None, 3, {"a": 3}, {"a": "../model.safetensors"}])
def test_a_damaged_index_is_refused(tmp_path, weight_map):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="has no `weight_map` of tensors to file names"):
        open_tensors(index)
