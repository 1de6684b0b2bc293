"""Reader of the header of a GGUF file: its metadata, and the few tensors that are asked for.

Arrays are not unpacked, except short ones of numbers: of the 400,000 strings of the vocabulary of
Llama 3 only the lengths are read.

References
----------
docs/gguf.md of ggml-org/ggml; `gguf_init_from_file_impl` in gguf.cpp of llama.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from mmap import ACCESS_READ, mmap
from struct import Struct
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.models.model_types import Config

MAGIC = b"GGUF"

# Bounds of loops: keys, tensors, and strings in an array. Published: 50, 50,000 and 300,000.
_ENTRIES = 2**16
_STRINGS = 2**20

# Bytes of a header up to its last array of strings. Published: 2^24.
_HEADER = 2**26

# Bytes of a value that are kept: a longer string, such as a chat template, is cut, and a longer
# array is skipped. One of numbers has at most one for each layer.
_KEPT = 2**12

_ALIGNMENT = "general.alignment"

_U64 = Struct("<Q")

# The NumPy dtype of each value type, by its number in the file; "" for strings and arrays.
_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_STRING = 8
_ARRAY = 9
_SIZE = 10

# The tensor types that are read, by their number in the file.
_TENSOR_DTYPES = ("<f4", "<f2")


def is_gguf(path: str) -> bool:
    """Return True for a file whose name or first bytes are those of a GGUF file."""
    with open(path, "rb") as file:
        return path.endswith(".gguf") or file.read(len(MAGIC)) == MAGIC


def read_header(path: str, wanted: Collection[str]) -> tuple[dict[str, Any], dict[str, Float64]]:
    """Read the header of a GGUF file of version 2 or 3, little-endian.

    Parameters
    ----------
    path : str
        The file.
    wanted : container of str
        Names of tensors to read: of one dimension, in float32 or float16.

    Returns
    -------
    values : dict
        Metadata by key: numbers, the first 4,096 bytes of strings, and lists of numbers of at most
        4,096 bytes. None stands for other values.
    tensors : dict
        The tensors that were asked for and are in the file, as float64 of shape (elements,).

    Raises
    ------
    ValueError
        If the file is damaged, of another format or version, or larger than the bounds above.
    OSError
        If the file cannot be read.
    """
    with open(path, "rb") as opened:
        file = mmap(opened.fileno(), 0, access=ACCESS_READ)
    with file:
        if _bytes(file, 4) != MAGIC:
            raise ValueError(f"the file does not begin with {MAGIC!r}")
        whole_number("version", _integer(file, 4), 2, 3)  # a big-endian file has another
        tensor_count = whole_number("tensor_count", _integer(file, 8), 0, _ENTRIES)
        key_count = whole_number("metadata_kv_count", _integer(file, 8), 0, _ENTRIES)
        values = _entries(file, key_count, _value)
        places = _entries(file, tensor_count, _place)
        places = {name: places[name] for name in wanted if name in places}
        return values, _tensors(file, places, values.get(_ALIGNMENT, 32))


def _entries(file: mmap, count: int, read: Callable[[mmap, str], Any]) -> dict[str, Any]:
    """Read so many entries, each after its name; raise for a name that appears twice."""
    found: dict[str, Any] = {}
    for _ in range(count):
        name = _string(file)
        if name in found:
            raise ValueError(f"the name {shown(name)} appears twice")
        found[name] = read(file, name)
    return found


def _value(file: mmap, key: str) -> Any:
    """Read a value; None for one that is not kept."""
    kind = _integer(file, 4)
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _numbers(file, key, kind, 1)[0]
    kind = _integer(file, 4)
    count = _integer(file, 8)
    if kind != _STRING:
        return _numbers(file, key, kind, count)
    _skip_strings(file, key, count)
    return None


def _numbers(file: mmap, key: str, kind: int, count: int) -> Any:
    """Read a list of numbers, or skip a long one; raise for arrays of arrays, unknown types."""
    if kind >= len(_DTYPES) or not _DTYPES[kind]:
        raise ValueError(f"the value of {shown(key)} has type {kind}, which is not read here")
    dtype = np.dtype(_DTYPES[kind])
    size = count * dtype.itemsize
    if size <= _KEPT:
        return np.frombuffer(_bytes(file, size), dtype).tolist()
    _skip(file, size)
    return None


def _skip_strings(file: mmap, key: str, count: int) -> None:
    """Move past an array of strings: the one loop that matters for the time."""
    if count > _STRINGS or file.tell() > _HEADER:
        raise ValueError(f"{shown(key)} has {count} strings at byte {file.tell()}, too many")
    last = len(file) - 8
    at = file.tell()
    for _ in range(count):
        at += 8 + _U64.unpack_from(file, at if at < last else last)[0]
    _skip(file, at - file.tell())


def _place(file: mmap, name: str) -> tuple[Any, int, int]:
    """Read the sizes, the type and the offset of a tensor."""
    shape = _numbers(file, name, _SIZE, _integer(file, 4))
    return shape, _integer(file, 4), _integer(file, 8)


def _tensors(file: mmap, places: Config, alignment: Any) -> dict[str, Float64]:
    """Read the tensors at some places in the data, which begin behind the header."""
    alignment = whole_number(_ALIGNMENT, alignment, 1, 2**32)
    if alignment & (alignment - 1):
        raise ArgumentError(_ALIGNMENT, alignment, "be a power of 2")
    start = -(-file.tell() // alignment) * alignment
    return {name: _tensor(file, name, start, *place) for name, place in places.items()}


def _tensor(file: mmap, name: str, start: int, shape: Any, kind: int, offset: int) -> Float64:
    """Read a tensor of one dimension."""
    is_long = len(shape or ()) != 1 or shape[0] > limits.HEAD_DIM
    if is_long or kind >= len(_TENSOR_DTYPES):
        finding = Finding(f"has type {kind} and shape {shown(shape)}")
        rule = f"have type 0 or 1 (float32, float16) and one dimension of at most {limits.HEAD_DIM}"
        raise ArgumentError(name, finding, rule)
    dtype = np.dtype(_TENSOR_DTYPES[kind])
    _skip(file, start + offset - file.tell())
    return np.frombuffer(_bytes(file, shape[0] * dtype.itemsize), dtype).astype(np.float64)


def _string(file: mmap) -> str:
    """Read a string, of which the end is left out if it is long."""
    length = _integer(file, 8)
    kept = _bytes(file, min(length, _KEPT))
    _skip(file, length - len(kept))
    return kept.decode("utf-8", errors="replace")


def _integer(file: mmap, size: int) -> int:
    return int.from_bytes(_bytes(file, size), "little")


def _bytes(file: mmap, count: int) -> bytes:
    """Read so many bytes."""
    _skip(file, count)
    return file[file.tell() - count : file.tell()]


def _skip(file: mmap, count: int) -> None:
    """Move by so many bytes; raise at the end of the file."""
    if count > len(file) - file.tell():
        raise ValueError(f"the file ends after {len(file)} bytes and is incomplete")
    file.seek(count, os.SEEK_CUR)
