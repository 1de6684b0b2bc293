"""The tensors of safetensors files, of which one is read at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Array

# Dtypes of safetensors files that weights may have; tensors of others can be listed, but not read.
DTYPES = ("F64", "F32", "F16", "BF16")

INDEX_SUFFIX = ".safetensors.index.json"
# The weights in the folder of a model, in the order in which transformers looks for them.
FOLDER_FILES = ("model.safetensors", f"model{INDEX_SUFFIX}")


class SafetensorsTensors(Mapping[str, Array]):
    """The tensors of safetensors files by name; each is read when it is looked up."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Store the file of each tensor."""
        self._files = files

    def __getitem__(self, name: str) -> Array:
        """Return a tensor, a new array; raise ValueError if it is not as the files say."""
        path = self._files[name]
        file = _opened(path)
        if name not in file.keys():  # noqa: SIM118 (it is no mapping)
            raise ValueError(
                f"{shown(str(path))} lacks {shown(name)}, which the index says is in it; the two "
                "belong to different checkpoints"
            )
        dtype_name = file.get_slice(name).get_dtype()
        if dtype_name not in DTYPES:
            raise ValueError(
                f"{shown(name)} in {shown(str(path))} has dtype {shown(dtype_name)}; it must be "
                f"{', '.join(DTYPES)}"
            )
        tensor: Array = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def open_tensors(path: str | PathLike[str]) -> SafetensorsTensors:
    """Return the tensors of a safetensors file, of those that an index lists, or of a folder.

    Raises ValueError if the file is another one, OSError if it cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        file = _weights_in(file)
    if file.name.endswith(INDEX_SUFFIX):
        files = _weight_map(file)
        return SafetensorsTensors({name: file.parent / part for name, part in files.items()})
    if file.suffix != ".safetensors":
        rule = f"be a file *.safetensors or *{INDEX_SUFFIX}, or a folder"
        raise ArgumentError("tensors", str(path), rule)
    return SafetensorsTensors(dict.fromkeys(_opened(file).keys(), file))


def _weights_in(folder: Path) -> Path:
    """Return the weights of a model's folder: one file, or the index of several."""
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    finding = Finding(f"is the folder {shown(str(folder))}")
    raise ArgumentError("tensors", finding, f"hold {' or '.join(FOLDER_FILES)}")


def _opened(path: Path) -> Any:
    """Return an open safetensors file; raise ValueError, which names it, if it is damaged."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        text = "safetensors files need a package to read them: pip install safetensors"
        raise ImportError(text, name="safetensors") from error
    path.open("rb").close()  # OSError with the path; those of safetensors lack it
    opened: Any = safe_open
    try:
        return opened(path, framework="numpy")
    except SafetensorError as error:
        reason = cut(str(error))
        raise ValueError(f"{shown(str(path))} is not a safetensors file: {reason}") from None


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file name of each tensor in an index."""
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError):
        content = None
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(map(_is_file_name, files.values())):
        raise ValueError(f"{shown(str(index))} has no `weight_map` of tensors to file names")
    return files


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and Path(value).name == value
