"""Tensors of safetensors files, read one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Array

# Names in the format → dtypes; tensors of others can be listed, but not read.
_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# The format's own limit.
_MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

_INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsFile(Mapping[str, Array]):
    """The tensors of a safetensors file by name; a tensor is read whenever it is looked up.

    Raises ValueError, which names the file, if it is damaged.

    References
    ----------
    https://huggingface.co/docs/safetensors/index#format
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, self._size - _LENGTH_BYTES):
                raise self._error(f"its header has {length} bytes")
            text = file.read(length)
        self._data_start = _LENGTH_BYTES + length
        header = _json_object(path, text)
        header.pop("__metadata__", None)
        self._entries: dict[str, Any] = header

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, a new array."""
        entry = self._entries[name]
        try:
            dtype_name = entry["dtype"]
            shape = tuple(scalars.whole_number("shape", size, 0) for size in entry["shape"])
            start, end = entry["data_offsets"]
            is_valid = 0 <= start <= end <= self._size - self._data_start
        except (KeyError, TypeError, ValueError):
            raise self._error(f"the entry of {shown(name)} is {shown(entry)}") from None
        if dtype_name not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise self._error(f"{shown(name)} has dtype {shown(dtype_name)}; it must be {known}")
        dtype = _DTYPES[dtype_name]
        count = math.prod(shape)
        if not is_valid or end - start != count * dtype.itemsize:
            raise self._error(f"{shown(name)} has shape {shape} and data at {start} to {end}")
        offset = self._data_start + start
        return np.fromfile(self._path, dtype, count, offset=offset).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{shown(str(self._path))} is not a safetensors file: {problem}")


class ShardedTensors(Mapping[str, Array]):
    """The tensors of several safetensors files, from the index beside them."""

    def __init__(self, path: Path) -> None:
        index = _json_object(path, path.read_bytes()).get("weight_map")
        if not isinstance(index, Mapping) or not all(map(_is_file_name, index.values())):
            raise ValueError(f"{shown(str(path))} has no `weight_map` of tensors to file names")
        self._folder = path.parent
        self._file_names = dict(index)

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, a new array."""
        return SafetensorsFile(self._folder / self._file_names[name])[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_names)

    def __len__(self) -> int:
        return len(self._file_names)


def open_tensors(path: str | PathLike[str]) -> Mapping[str, Array]:
    """Return the tensors of a safetensors file, or of those that an index lists.

    Raises ValueError if the file is another one, OSError if it cannot be read.
    """
    file = Path(path)
    if file.name.endswith(_INDEX_SUFFIX):
        return ShardedTensors(file)
    if file.suffix != ".safetensors":
        raise ValueError(
            f"`tensors` is {shown(str(path))}; it must be a file *.safetensors or *{_INDEX_SUFFIX}"
        )
    return SafetensorsFile(file)


def _json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{shown(str(path))} does not hold valid JSON") from None
    if not isinstance(content, dict):
        raise ValueError(f"{shown(str(path))} does not hold a JSON object")
    return content


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value
