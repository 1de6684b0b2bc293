"""Dtypes, layouts and array types that the whole package shares."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Intp = NDArray[np.intp]

# The values of arguments, for type checkers. A dtype may be given as NumPy's object or class, too.
Layout = Literal["bshd", "bhsd", "sbhd", "thd"]
DtypeName = Literal["float32", "float64", "float16", "bfloat16"]
CacheDtypeName = Literal["float32", "float16", "bfloat16", "int8"]
ValueDtypeName = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Dtype = DtypeName | np.dtype[Any] | type[Any]
CacheDtype = CacheDtypeName | np.dtype[Any] | type[Any]
ValueDtype = ValueDtypeName | np.dtype[Any] | type[Any]

# The dtypes of arrays that can be rotated, by name.
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
DTYPE_LIST = ", ".join(DTYPES)  # for error texts

# The dtype of the arithmetic, and of cos and sin, for each dtype of arrays.
COMPUTE_DTYPES = {
    DTYPES["float32"]: "float32",
    DTYPES["float64"]: "float64",
    DTYPES["float16"]: "float32",
    DTYPES["bfloat16"]: "float32",
}

# The positions of the axes (batch, token, head) in each layout; packed tokens have no batch axis.
LAYOUT_AXES: dict[str, tuple[int | None, int, int]] = {
    "bshd": (0, 1, 2),
    "bhsd": (0, 2, 1),
    "sbhd": (1, 0, 2),
    "thd": (None, 0, 1),
}
LAYOUTS = tuple(LAYOUT_AXES)

# The integers that kernels take 16-bit floats as.
INTEGER_VIEWS = {"float16": np.dtype(np.int16), "bfloat16": np.dtype(np.uint16)}


GROUP = 32  # elements of an int4 value that share a scale


class CacheFormat(NamedTuple):
    """How the keys or values of a cache are stored.

    dtype: of their array. kernel_dtype: of the view of it that kernels take. scale_dtype: of their
    scales, None if they have none. packed: elements in an item of the array. group: elements that
    share a scale; by default those of a head vector.
    """

    dtype: np.dtype[Any]
    kernel_dtype: np.dtype[Any]
    scale_dtype: np.dtype[Any] | None = None
    packed: int = 1
    group: int | None = None

    def scale_shape(self, vectors: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of vectors (pages, page_size, kv_heads, width)."""
        return vectors[:3] if self.group is None else (*vectors[:3], vectors[3] // self.group)


# The formats of keys by name, and those of values, which may have 4 bits.
CACHE_FORMATS = {
    "float32": CacheFormat(DTYPES["float32"], DTYPES["float32"]),
    "float16": CacheFormat(DTYPES["float16"], INTEGER_VIEWS["float16"]),
    "bfloat16": CacheFormat(DTYPES["bfloat16"], INTEGER_VIEWS["bfloat16"]),
    "int8": CacheFormat(np.dtype(np.int8), np.dtype(np.int8), DTYPES["float32"]),
}
_INT4 = CacheFormat(np.dtype(np.uint8), np.dtype(np.uint8), DTYPES["float16"], 2, GROUP)
VALUE_FORMATS = CACHE_FORMATS | {"int4": _INT4}


class CacheKind(NamedTuple):
    """What the kernels of a cache are compiled for.

    key: a key of `CACHE_FORMATS`. value: a key of `VALUE_FORMATS`. hadamard: whether keys are
    stored times the Hadamard matrix.
    """

    key: str
    value: str
    hadamard: bool = False

    def __str__(self) -> str:
        """Return the name, such as "int8", "int8-int4" or "int8-int4-hadamard"."""
        stored = dict.fromkeys((self.key, self.value))  # each once
        return "-".join(stored) + ("-hadamard" if self.hadamard else "")


# The kinds by name, and the formats by the dtypes of arrays.
_KINDS = itertools.product(CACHE_FORMATS, VALUE_FORMATS, (False, True))
CACHE_KINDS = {str(kind): kind for kind in itertools.starmap(CacheKind, _KINDS)}

FORMAT_NAMES = {row.dtype: name for name, row in VALUE_FORMATS.items()}

# The views of other layouts as bshd, (batch, seq, heads, head_dim), which kernels take.
BSHD_VIEWS: dict[str, Callable[[Array], Array]] = {
    "bhsd": lambda x: x.transpose(0, 2, 1, 3),
    "sbhd": lambda x: x.transpose(1, 0, 2, 3),
    "thd": lambda x: x[None],
}
