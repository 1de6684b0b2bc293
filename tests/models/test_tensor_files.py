"""Reading safetensors files: every dtype, shapes, and files that are damaged."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from control_characters import MARK, WRITTEN
from safetensors_files import write_safetensors

from rope_cpu.models.tensors import open_tensors, read_tensor


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
    assert tensors == {"a.weight": file, "b": file}
    assert read_tensor(file, "a.weight").dtype == first.dtype
    np.testing.assert_array_equal(read_tensor(file, "a.weight"), first)
    np.testing.assert_array_equal(read_tensor(file, "b"), second)


def test_a_dtype_that_is_not_real_is_refused_when_it_is_read(file):
    write_safetensors(file, {"a": np.zeros(3, np.int64), "b": np.zeros(3)})
    assert list(open_tensors(file)) == ["a", "b"]
    with pytest.raises(ValueError, match=r"`a` has dtype 'I64' in .*; it must have one of F64"):
        read_tensor(file, "a")
    assert read_tensor(file, "b").shape == (3,)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(struct.pack("<Q", 2**40) + b"{}", id="long header"),
        pytest.param(struct.pack("<Q", 2) + b"{{", id="no JSON"),
    ],
)
def test_a_damaged_file_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors.* cannot be read as safetensors: "):
        open_tensors(file)


def test_an_error_of_the_format_is_escaped(file):
    header = json.dumps({"a": {"dtype": MARK, "shape": [], "data_offsets": [0, 0]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="cannot be read as safetensors: ") as error:
        open_tensors(file)
    text = str(error.value)
    assert text.isprintable()
    assert WRITTEN in text or "forged" not in text  # old releases do not quote the file


def test_a_truncated_file_is_refused(file):
    write_safetensors(file, {"a": np.ones(32)})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"cannot be read as safetensors: "):
        open_tensors(file)


def test_a_missing_file_is_an_os_error(file):
    with pytest.raises(FileNotFoundError):
        open_tensors(file)


@pytest.mark.parametrize("weight_map", [None, 3, {"a": 3}, {"a": "../model.safetensors"}])
def test_a_damaged_index_is_refused(tmp_path, weight_map):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match="has no `weight_map` of tensors to file names"):
        open_tensors(index)


def test_a_folder_stands_for_its_weights(tmp_path, file):
    """One file takes precedence over an index, as in transformers."""
    write_safetensors(tmp_path / "part.safetensors", {"a": np.ones(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert list(open_tensors(str(tmp_path))) == ["a"]
    write_safetensors(file, {"b": np.ones(3)})
    assert list(open_tensors(tmp_path)) == ["b"]


def test_a_folder_without_weights_is_an_os_error(tmp_path, file):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        open_tensors(tmp_path)
    file.mkdir()  # a folder with the name of a file
    with pytest.raises(IsADirectoryError, match=r"model\.safetensors"):
        open_tensors(tmp_path)


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    write_safetensors(tmp_path / "part.safetensors", {"a": np.ones(3)})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys("ab", "part.safetensors")}))
    tensors = open_tensors(index)
    assert read_tensor(tensors["a"], "a").shape == (3,)
    with pytest.raises(ValueError, match=r"part\.safetensors' cannot be read .* tensor b"):
        read_tensor(tensors["b"], "b")
