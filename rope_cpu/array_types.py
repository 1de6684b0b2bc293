"""Dtypes, layouts and array types that the whole package shares."""

from __future__ import annotations

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
Dtype = DtypeName | np.dtype[Any] | type[Any]
CacheDtype = CacheDtypeName | np.dtype[Any] | type[Any]

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

# The integers that kernels take 16-bit floats as.
INTEGER_VIEWS = {"float16": np.dtype(np.int16), "bfloat16": np.dtype(np.uint16)}


class CacheFormat(NamedTuple):
    """How the caches of a dtype are stored.

    dtype: of keys and values. kernel_dtype: of the views of them that kernels take. has_scales:
    whether each head vector has a scale, in float32.
    """

    dtype: np.dtype[Any]
    kernel_dtype: np.dtype[Any]
    has_scales: bool = False


# The formats of caches by the names of their dtypes.
CACHE_FORMATS = {
    "float32": CacheFormat(DTYPES["float32"], DTYPES["float32"]),
    "float16": CacheFormat(DTYPES["float16"], INTEGER_VIEWS["float16"]),
    "bfloat16": CacheFormat(DTYPES["bfloat16"], INTEGER_VIEWS["bfloat16"]),
    "int8": CacheFormat(np.dtype(np.int8), np.dtype(np.int8), has_scales=True),
}
CACHE_NAMES = {row.dtype: name for name, row in CACHE_FORMATS.items()}

# The views of other layouts as bshd, (batch, seq, heads, head_dim), which kernels take.
BSHD_VIEWS: dict[str, Callable[[Array], Array]] = {
    "bhsd": lambda x: x.transpose(0, 2, 1, 3),
    "sbhd": lambda x: x.transpose(1, 0, 2, 3),
    "thd": lambda x: x[None],
}
