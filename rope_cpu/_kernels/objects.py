"""NumPy arrays as kernels see them: their fields, read where they lie, without a word to NumPy or Numba.

For each array that it takes, Numba makes a record and counts a reference: 40 ns an array, and it knows no bfloat16. A
kernel that only looks while its caller holds the arrays needs neither. The fields are those of NumPy's binary interface
(PyArrayObject_fields in ndarraytypes.h), after the part that all objects have.
"""

from __future__ import annotations

from ctypes import c_int64
from typing import Any

import numpy as np

from rope_cpu._kernels.compiler import LOOK_CLOSER
from rope_cpu._kernels.flow import Ending
from rope_cpu._kernels.integers import Integer, Words, choose

# Where an array lies, as compiled code knows it: address, shape and strides.
ArrayView = tuple[Integer, Words, Words]

_HEAD = object.__basicsize__  # bytes that all objects begin with; the last word of them is the type
ITEMS = tuple.__basicsize__  # where the items of a tuple begin, after their number
_WORDS = 7  # data, rank, shape, strides, base, dtype, flags; rank and flags in the lower half
_WRITEABLE = 0x400  # of an array's flags
_LOWER = 0xFFFFFFFF
_DTYPE_BITS = ~0xFF000000  # of the second word of a dtype: kind, character, byte order and number, but not its flags


def look() -> None:
    """Look at an array and a tuple where their fields should lie.

    Raises RuntimeError where they do not: with a NumPy or a Python that did not exist when this was written.
    """
    array = np.zeros((3, 5, 7, 11), np.float32)[1:, ::2]
    kind = c_int64.from_address(id(array) + _HEAD - 8).value
    data, rank, shape, strides, _, dtype, flags = (c_int64 * _WORDS).from_address(id(array) + _HEAD)
    word = c_int64.from_address(dtype + _HEAD + 8).value if dtype == id(array.dtype) else 0
    found = kind, data, rank & _LOWER, word & 0xFFFF, word >> 32
    if found == (id(np.ndarray), array.ctypes.data, array.ndim, int.from_bytes(b"ff", "little"), array.dtype.num):
        axes = [tuple((c_int64 * array.ndim).from_address(at)) for at in (shape, strides)]
        pair = array, None
        known, held = ((c_int64 * 2).from_address(id(pair) + at) for at in (_HEAD - 8, ITEMS))
        as_known = [*known, *held] == [id(tuple), 2, id(array), id(None)]
        if as_known and axes == [array.shape, array.strides] and flags & _WRITEABLE:
            return
    raise RuntimeError(f"arrays of NumPy {np.__version__} are not laid out as these kernels read them; use NumPy 2")


def dtype_word(dtype: np.dtype[Any]) -> int:
    """Return the word that tells a dtype from others, as `view` reads it."""
    return c_int64.from_address(id(dtype) + _HEAD + 8).value & _DTYPE_BITS


def items(at: Integer, kind: Integer, end: Ending) -> Words:
    """Where the two items of the tuple at an address lie.

    kind: where `tuple` itself lies. end: left with LOOK_CLOSER where there is no such tuple.
    """
    (found,) = (at + (_HEAD - 8)).words(1)
    end.leave_if(found != kind, LOOK_CLOSER)
    (count,) = (at + _HEAD).words(1)
    end.leave_if(count != 2, LOOK_CLOSER)
    return (at + ITEMS).words(2)


def location(at: Integer) -> tuple[Integer, Integer]:
    """Where the first element of the array at an address lies, and where its shape does."""
    data, _, shape = (at + _HEAD).words(3)
    return data, shape


def view(at: Integer, kind: Integer, rank: Integer | int, end: Ending) -> tuple[ArrayView, Integer, Integer]:
    """Where the array at an address lies, the `dtype_word` of its dtype, and whether it is writable.

    kind: where `numpy.ndarray` itself lies. rank: number of axes, 4, or where that is not known beforehand also 3, to
    add one of length 1 in front. That word is the same for all equal dtypes, which may be several objects. end: left
    with LOOK_CLOSER where there is no such array.
    """
    (found,) = (at + (_HEAD - 8)).words(1)
    end.leave_if(found != kind, LOOK_CLOSER)
    data, axes, shape_at, strides_at, _, dtype, flags = (at + _HEAD).words(_WORDS)
    end.leave_if(axes & _LOWER != rank, LOOK_CLOSER)
    (word,) = (dtype + (_HEAD + 8)).words(1)
    shape, strides = (_four(place, rank, missing) for place, missing in ((shape_at, 1), (strides_at, 0)))
    return (data, shape, strides), word & _DTYPE_BITS, flags & _WRITEABLE != 0


def _four(at: Integer, rank: Integer | int, missing: int) -> Words:
    """Return what is said of four axes, at an address; of three, `missing` is said of another one before them."""
    if isinstance(rank, int):
        return at.words(rank)
    (first,), rest = at.words(1), (at + (rank - 3) * 8).words(3)
    return choose(rank == 4, first, missing), *rest
