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
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.configs.gguf import MAGIC

VERSIONS = (2, 3)

# Bounds of loops over a header. Published: 50 keys, 50,000 tensors, 800,000 strings in arrays.
_KEYS = 2**12
_TENSORS = 2**16
_STRINGS = 2**20

# Bytes of names and of strings that are kept; longer values, such as chat templates, are skipped.
_NAME_BYTES = 2**10
_KEPT_BYTES = 2**10

# Elements of arrays of numbers that are kept: one for each layer.
_KEPT_ELEMENTS = 2**10

_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"

_U32 = Struct("<I")
_U64 = Struct("<Q")

# Value types by their number in the file: the number of a type and its NumPy dtype.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING = 8
_ARRAY = 9

# The tensor types that are read, by their number in the file.
_TENSOR_DTYPES = {0: "<f4", 1: "<f2"}


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file.

    Parameters
    ----------
    values : dict
        Metadata by key: numbers, strings of at most 1,024 bytes, lists of at most 1,024 numbers.
        None stands for other values.
    tensors : dict
        The tensors that were asked for and are in the file, as float64 of shape (elements,).
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Float64] = field(default_factory=dict)


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
    Header

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
            return _Reader(content).header(wanted)


class _Reader:
    """A position in the bytes of a file, which moves forward."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = len(content)
        self._at = 0

    def header(self, wanted: Container[str]) -> Header:
        """Read the whole header."""
        self._check_version()
        tensor_count = self._count("tensors", _TENSORS)
        key_count = self._count("keys", _KEYS)
        values = self._values(key_count)
        places = self._tensor_places(tensor_count, wanted)
        start = self._data_start(values.get(_ALIGNMENT, 32))
        tensors = {name: self._tensor(name, start, *place) for name, place in places.items()}
        return Header(values, tensors)

    def _check_version(self) -> None:
        if self._bytes(4) != MAGIC:
            raise ValueError(f"the file begins with {shown(self._content[:4])}, not with {MAGIC!r}")
        version = self._u32()
        if version & 0xFFFF == 0:
            raise ValueError(
                "the file is big-endian, or damaged; `gguf-convert-endian FILE little` of the "
                "package gguf converts it"
            )
        if version not in VERSIONS:
            raise ValueError(
                f"the file has GGUF version {version}; known are 2 and 3. Convert the model again"
            )

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
        kind = self._u32()
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0]

    def _array(self, key: str) -> list[Any] | None:
        """Read an array of numbers, or skip a long one and one of strings."""
        kind = self._u32()
        count = self._u64()
        if kind == _STRING:
            self._skip_strings(key, count)
            return None
        if count <= _KEPT_ELEMENTS:
            return self._numbers(key, kind, count)
        self._skip(count * self._width(key, kind))
        return None

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        width = self._width(key, kind)
        values: list[Any] = np.frombuffer(self._bytes(count * width), _NUMBERS[kind]).tolist()
        return values

    def _width(self, key: str, kind: int) -> int:
        """Return the bytes of a number; raise for types that are no numbers."""
        if kind not in _NUMBERS:
            what = "an array of arrays" if kind == _ARRAY else f"of unknown type {kind}"
            raise ValueError(f"the value of {shown(key)} is {what}")
        return np.dtype(_NUMBERS[kind]).itemsize

    def _skip_strings(self, key: str, count: int) -> None:
        """Move past an array of strings: the one loop that matters for the time."""
        self._strings_left -= count
        if count * _U64.size > self._size - self._at:
            raise self._truncated()
        if self._strings_left < 0:
            raise ValueError(
                f"{shown(key)} has {count} strings; arrays may have {_STRINGS} strings in all"
            )
        content = self._content
        length_at = _U64.unpack_from
        at = self._at
        last = self._size - _U64.size
        for _ in range(count):
            if at > last:
                raise self._truncated()
            at += 8 + length_at(content, at)[0]
        self._at = at
        self._skip(0)

    def _string(self) -> str | None:
        """Read a string, or skip a long one."""
        length = self._u64()
        if length > _KEPT_BYTES:
            self._skip(length)
            return None
        return self._bytes(length).decode("utf-8", errors="replace")

    def _name(self, what: str) -> str:
        """Read the name of a key or of a tensor."""
        length = self._u64()
        if length > _NAME_BYTES:
            raise ValueError(f"{what} has a name of {length} bytes; at most {_NAME_BYTES} are read")
        return self._bytes(length).decode("utf-8", errors="replace")

    def _tensor_places(
        self, count: int, wanted: Container[str]
    ) -> dict[str, tuple[list[int], int, int]]:
        """Return shape, type and offset of the wanted tensors."""
        places: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(count):
            name = self._name("a tensor")
            dimensions = self._u32()
            if dimensions > _DIMENSIONS:
                raise ValueError(f"the tensor {shown(name)} has {dimensions} dimensions")
            shape = [self._u64() for _ in range(dimensions)]
            kind = self._u32()
            offset = self._u64()
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
            raise ValueError(
                f"the tensor {shown(name)} has shape {shown(shape)}; it must have one dimension of "
                f"at most {limits.HEAD_DIM} elements"
            )
        if kind not in _TENSOR_DTYPES:
            raise ValueError(
                f"the tensor {shown(name)} has type {kind}; it must be float32 (0) or float16 (1)"
            )
        dtype = np.dtype(_TENSOR_DTYPES[kind])
        self._at = start + offset
        values: Float64 = np.frombuffer(self._bytes(shape[0] * dtype.itemsize), dtype).astype(
            np.float64
        )
        return values

    def _count(self, what: str, most: int) -> int:
        count = self._u64()
        if count > most:
            raise ValueError(f"the header has {count} {what}; at most {most} are read")
        return count

    def _u32(self) -> int:
        value: int = _U32.unpack(self._bytes(_U32.size))[0]
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack(self._bytes(_U64.size))[0]
        return value

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
