"""Tensors of safetensors files, read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Array

# Dtypes of the format that weights may have; tensors of others can be listed, but not read.
_DTYPES = ("F64", "F32", "F16", "BF16")

_INDEX_SUFFIX = ".safetensors.index.json"


class SafetensorsFile(Mapping[str, Array]):
    """The tensors of a safetensors file by name; a tensor is read whenever it is looked up.

    Raises ValueError, which names the file, if it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.open("rb").close()  # OSError with the path; those of safetensors lack it
        opened: Any = safe_open
        try:
            self._file = opened(path, framework="numpy")
        except SafetensorError as error:
            reason = cut(str(error))
            raise ValueError(f"{shown(str(path))} is not a safetensors file: {reason}") from None
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, a new array."""
        if name not in self._names:
            raise KeyError(name)
        dtype_name = self._file.get_slice(name).get_dtype()
        if dtype_name not in _DTYPES:
            raise ValueError(
                f"{shown(name)} in {shown(str(self._path))} has dtype {shown(dtype_name)}; it must "
                f"be {', '.join(_DTYPES)}"
            )
        tensor: Array = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


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
        path = self._folder / self._file_names[name]
        tensors = SafetensorsFile(path)
        if name not in tensors:
            raise ValueError(
                f"{shown(str(path))} lacks {shown(name)}, which the index says is in it; the two "
                "belong to different checkpoints"
            )
        return tensors[name]

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
