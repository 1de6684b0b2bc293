"""Reader of the header of a GGUF file: its metadata, and the few tensors that are asked for.

Arrays are not unpacked, except short ones of numbers: of the 400,000 strings of the vocabulary of
Llama 3 only the lengths are read.

References
----------
docs/gguf.md of ggml-org/ggml; `gguf_init_from_file_impl` in gguf.cpp of llama.cpp.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Container
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

MAGIC = b"GGUF"

# Bounds of loops over a header. Published: 50 keys, 50,000 tensors, 800,000 strings in arrays.
_KEYS = 2**12
_TENSORS = 2**16
_STRINGS = 2**20

# Bytes of names and of strings that are kept; longer values, such as chat templates, are skipped.
_KEPT_BYTES = 2**10

# Elements of arrays of numbers that are kept: one for each layer.
_KEPT_ELEMENTS = 2**10

_ALIGNMENT = "general.alignment"

_U64 = Struct("<Q")

# The NumPy dtype of each value type, by its number in the file; "" for strings and arrays.
_VALUE_DTYPES = ("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "", "", "<u8", "<i8", "<f8")
_STRING = 8
_ARRAY = 9

# The tensor types that are read, by their number in the file.
_TENSOR_DTYPES = ("<f4", "<f2")


# Metadata by key, and tensors by name.
Header: TypeAlias = tuple[dict[str, Any], dict[str, Float64]]


def is_gguf(path: str) -> bool:
    """Return True for a file whose name or first bytes are those of a GGUF file."""
    if path.endswith(".gguf") or not os.path.isfile(path):
        return os.path.isfile(path)
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_header(path: str, wanted: Container[str]) -> Header:
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
        Metadata by key: numbers, strings of at most 1,024 bytes, lists of at most 1,024 numbers.
        None stands for other values.
    tensors : dict
        The tensors that were asked for and are in the file, as float64 of shape (elements,).

    Raises
    ------
    ValueError
        If the file is damaged, of another format or version, or larger than the bounds above.
    OSError
        If the file cannot be read.
    """
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise ValueError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content).read(wanted)


class _Reader:
    """A position in the bytes of a file, which moves forward."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = 0

    def read(self, wanted: Container[str]) -> Header:
        """Read the whole header."""
        self._check_version()
        tensor_count = whole_number("tensor_count", self._integer(8), 0, _TENSORS)
        key_count = whole_number("metadata_kv_count", self._integer(8), 0, _KEYS)
        values = self._values(key_count)
        places = self._tensor_places(tensor_count, wanted)
        start = self._data_start(values.get(_ALIGNMENT, 32))
        tensors = {name: self._tensor(name, start, *place) for name, place in places.items()}
        return values, tensors

    def _check_version(self) -> None:
        if self._bytes(4) != MAGIC:
            raise ValueError(f"the file begins with {shown(self._content[:4])}, not with {MAGIC!r}")
        version = self._integer(4)
        if version & 0xFFFF == 0:
            remedy = "`gguf-convert-endian FILE little` of the package gguf converts it"
            raise ValueError(f"the file is big-endian, or damaged; {remedy}")
        if version not in (2, 3):
            raise ValueError(f"the file has GGUF version {version}; convert the model to 2 or 3")

    def _values(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self._strings_left = _STRINGS
        for _ in range(count):
            key = self._name("a key")
            if key in values:
                raise ValueError(f"the key {shown(key)} appears twice")
            values[key] = self._value(key)
        return values

    def _value(self, key: str) -> Any:
        """Read a value; None for one that is not kept."""
        kind = self._integer(4)
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[Any] | None:
        """Read an array of numbers, or skip a long one and one of strings."""
        kind = self._integer(4)
        count = self._integer(8)
        if kind == _STRING:
            self._skip_strings(key, count)
            return None
        if count <= _KEPT_ELEMENTS:
            return self._numbers(key, kind, count)
        self._skip(count * self._width(key, kind))
        return None

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        width = self._width(key, kind)
        values: list[Any] = np.frombuffer(self._bytes(count * width), _VALUE_DTYPES[kind]).tolist()
        return values

    def _width(self, key: str, kind: int) -> int:
        """Return the bytes of a number; raise for arrays of arrays and for unknown types."""
        if kind == _ARRAY or kind >= len(_VALUE_DTYPES):
            raise ValueError(f"the value of {shown(key)} has type {kind}, which is not read here")
        return np.dtype(_VALUE_DTYPES[kind]).itemsize

    def _skip_strings(self, key: str, count: int) -> None:
        """Move past an array of strings: the one loop that matters for the time."""
        self._strings_left -= count
        if count * _U64.size > self._size - self._at:
            raise self._truncated()
        if self._strings_left < 0:
            raise ValueError(f"{shown(key)} has {count} strings; all may have {_STRINGS}")
        content = self._content
        unpack = _U64.unpack_from
        at = self._at
        last = self._size - _U64.size
        for _ in range(count):
            if at > last:
                raise self._truncated()
            at += 8 + unpack(content, at)[0]
        self._at = at
        self._skip(0)

    def _string(self) -> str | None:
        """Read a string, or skip a long one."""
        length = self._integer(8)
        if length > _KEPT_BYTES:
            self._skip(length)
            return None
        return self._bytes(length).decode("utf-8", errors="replace")

    def _name(self, what: str) -> str:
        """Read the name of a key or of a tensor."""
        name = self._string()
        if name is None:
            raise ValueError(f"{what} has a name of more than {_KEPT_BYTES} bytes")
        return name

    def _tensor_places(self, count: int, wanted: Container[str]) -> dict[str, Any]:
        """Return shape, type and offset of the wanted tensors."""
        places: dict[str, Any] = {}
        for _ in range(count):
            name = self._name("a tensor")
            dimensions = self._integer(4)
            if dimensions > 4:
                raise ValueError(f"the tensor {shown(name)} has {dimensions} dimensions")
            shape = [self._integer(8) for _ in range(dimensions)]
            kind = self._integer(4)
            offset = self._integer(8)
            if name in places:
                raise ValueError(f"the tensor {shown(name)} appears twice")
            if name in wanted:
                places[name] = shape, kind, offset
        return places

    def _data_start(self, value: object) -> int:
        """Return where the data of tensors begin."""
        alignment = whole_number(_ALIGNMENT, value, 1, 2**32)
        if alignment & (alignment - 1):
            raise ValueError(f"`{_ALIGNMENT}` is {shown(alignment)}; it must be a power of 2")
        return -(-self._at // alignment) * alignment

    def _tensor(self, name: str, start: int, shape: list[int], kind: int, offset: int) -> Float64:
        """Read a tensor of one dimension."""
        if len(shape) != 1 or not 0 < shape[0] <= limits.HEAD_DIM:
            rule = f"it must have one dimension of at most {limits.HEAD_DIM} elements"
            raise ValueError(f"the tensor {shown(name)} has shape {shown(shape)}; {rule}")
        if kind >= len(_TENSOR_DTYPES):
            rule = "it must be float32 (0) or float16 (1)"
            raise ValueError(f"the tensor {shown(name)} has type {kind}; {rule}")
        dtype = np.dtype(_TENSOR_DTYPES[kind])
        self._at = start + offset
        content = self._bytes(shape[0] * dtype.itemsize)
        return np.frombuffer(content, dtype).astype(np.float64)

    def _integer(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _bytes(self, count: int) -> bytes:
        """Read so many bytes."""
        start = self._at
        self._skip(count)
        return self._content[start : self._at]

    def _skip(self, count: int) -> None:
        """Move forward; raise at the end of the file."""
        if count > self._size - self._at:
            raise self._truncated()
        self._at += count

    def _truncated(self) -> ValueError:
        return ValueError(f"the file ends after {self._size} bytes, within its header or a tensor")
