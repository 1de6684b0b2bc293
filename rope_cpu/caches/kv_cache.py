"""`KVCache`: a server's arrays of cached keys and values, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Required, Self, TypedDict, Unpack, overload

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.arrays import plain_array, refuse_overlap, refuse_shared, to_dtype
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import boolean, check_table_size, whole_number
from rope_cpu.array_types import (
    CACHE_FORMATS,
    FORMAT_NAMES,
    VALUE_FORMATS,
    Array,
    CacheDtype,
    CacheFormat,
    CacheKind,
    ValueDtype,
)
from rope_cpu.caches import set_fields

_CACHE_LINE = 64  # bytes
NO_SCALE = np.empty((0, 0, 0, 1), np.float32)  # of a cache without scales

# The attributes of a cache that hold its arrays.
CACHE_ARRAYS = ("key", "value", "key_scale", "value_scale")


class _Formats(TypedDict, total=False):
    """The options of `KVCache.zeros` besides `layers`, for type checkers."""

    dtype: Required[CacheDtype]
    value_dtype: ValueDtype | None
    value_dim: int | None
    hadamard: bool


@dataclass(frozen=True, init=False, repr=False, eq=False)
class KVCache:
    """The keys and values of one layer's cached tokens, in arrays that belong to the server.

    The arrays are checked once and never copied. `RotaryPlan.append` writes new tokens to them. A
    cache of read-only arrays, such as a mapped prefix, serves `attention` alone.

    A slot is a place for one token: page · page_size + place on the page. A contiguous cache
    (batch, capacity, kv_heads, width) has one page for each sequence. Arrays with heads first,
    (pages, kv_heads, page_size, width), are passed transposed, scales too:
    ``key.transpose(0, 2, 1, 3)``. `KVCache.zeros` allocates new arrays.

    Parameters
    ----------
    key : array of float32, float16, bfloat16 or int8, (pages, page_size, kv_heads, head_dim)
        Cached keys. Any strides, but the last axis contiguous.
    value : array of one of these dtypes, (pages, page_size, kv_heads, value width)
        Cached values, of the dtype of the keys or another. Key and value may be views of one array,
        but share no element, with one exception: in absorbed latent attention a value is a part of
        its key. `attention` takes such a cache, and `append` refuses it. An array of uint8,
        (pages, page_size, kv_heads, value width / 2), holds elements of 4 bits in groups of 32:
        byte i of a group has element i in its low half and i + 16 in its high half.
    key_scale, value_scale : array of float32, (pages, page_size, kv_heads), optional
        For int8, and then required: the scale of each head vector, max|x| / 127. `append` writes
        them. A head vector is its int8 values times its scale. It has the scale NaN if it holds NaN
        or infinity, and 0 if all elements are below 2^-120. For 4 bits float16,
        (pages, page_size, kv_heads, value width / 32), the scale of each group: −1/8 of its element
        of largest magnitude. An element is (half byte − 8) · scale. The scale is NaN if the group
        holds NaN, infinity, or numbers from 524,160 on, and 0 if it rounds to 0 in float16.
    hadamard : bool, default False
        Whether keys are stored as H·k. H is the orthonormal Hadamard matrix in natural order, in
        blocks of the largest power of two that divides head_dim: 1 if that is odd, which changes
        nothing. `append` transforms keys after norm and rotation, and `attention` its queries,
        whose products with them stay the same. A large channel, which makes int8 coarse for all
        others, is spread over its block. So are NaN and infinity, and scales are those of H·k, of
        which an element is up to sqrt(block) times as large as one of k: in float16, k must be
        below 65,504 / sqrt(block).

    Raises
    ------
    TypeError, ValueError
        If an array has another dtype or shape, or overlaps itself or another array. Keys of 4 bits
        are refused: the results of attention would err by a tenth and more.

    Notes
    -----
    A deep copy, or a pickled cache, has arrays of its own, in the same order of memory and on cache
    lines, and a value that is a part of its key is one again. Memory that two caches share is there
    twice then.

    References
    ----------
    The layout of 4 bits is that of ggml's type q4_0.

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> key, value = np.zeros((2, 100, 16, 8, 128), np.float32)  # 100 pages of 16 tokens
    >>> rope_cpu.KVCache(key, value)
    KVCache(float32, pages=100, page_size=16, kv_heads=8, head_dim=128, value_dim=128)
    """

    key: Array
    value: Array
    key_scale: Array | None
    value_scale: Array | None
    pages: int
    page_size: int  # tokens on a page
    kv_heads: int
    head_dim: int  # width of a key in elements
    value_dim: int  # width of a value in elements
    hadamard: bool
    _kind: CacheKind
    _caller_arrays: tuple[Array, ...]  # whose flags may become read-only
    _kernel_arrays: tuple[Array, ...]  # views of key, value and the scales, of 4 axes

    def __init__(
        self,
        key: Array,
        value: Array,
        *,
        key_scale: Array | None = None,
        value_scale: Array | None = None,
        hadamard: bool = False,
    ) -> None:
        kind = CacheKind(
            _format_of("key", key), _format_of("value", value), boolean("hadamard", hadamard)
        )
        key_format = CACHE_FORMATS[kind.key]
        value_format = VALUE_FORMATS[kind.value]
        _check_shape("key", key)
        _check_shape("value", value)
        value_dim = _value_dim(value, value_format)
        if value.shape[:3] != key.shape[:3]:
            rule = f"have the pages, page_size and kv_heads of `key`, {key.shape[:3]}"
            raise ArgumentError("value", Finding.shape_of(value), rule)
        _check_scale("key_scale", key_scale, key_format, key.shape)
        _check_scale("value_scale", value_scale, value_format, (*key.shape[:3], value_dim))
        arrays = dict(zip(CACHE_ARRAYS, (key, value, key_scale, value_scale), strict=True))
        given = {name: x for name, x in arrays.items() if x is not None}
        _check_memory(given)
        if _is_part(value, key):  # held read-only, because `append` writes both
            if kind.hadamard:
                finding = Finding("is True, but `value` is a part of `key`")
                raise ArgumentError("hadamard", finding, "be False for a value in its key")
            given["value"] = value.view()
            given["value"].flags.writeable = False
        # Views keep their shape when the caller changes that of an array in place.
        views = (
            np.asarray(given["key"]).view(key_format.kernel_dtype),
            np.asarray(given["value"]).view(value_format.kernel_dtype),
            _scale_view(key_scale),
            _scale_view(value_scale),
        )
        sizes = dict(zip(("pages", "page_size", "kv_heads", "head_dim"), key.shape, strict=True))
        set_fields(self, **arrays, **sizes, value_dim=value_dim, hadamard=kind.hadamard)
        set_fields(self, _kind=kind, _caller_arrays=tuple(given.values()), _kernel_arrays=views)

    @overload
    @classmethod
    def zeros(
        cls, pages: int, page_size: int, kv_heads: int, head_dim: int, **options: Unpack[_Formats]
    ) -> Self: ...

    @overload
    @classmethod
    def zeros(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        layers: int,
        **options: Unpack[_Formats],
    ) -> list[Self]: ...

    @classmethod
    def zeros(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: CacheDtype,
        value_dtype: ValueDtype | None = None,
        value_dim: int | None = None,
        hadamard: bool = False,
        layers: int | None = None,
    ) -> Self | list[Self]:
        """Allocate a cache, or one for each layer, in the layout that attention reads fastest.

        In memory the heads come first, (pages, kv_heads, page_size, width), and every array starts
        on a cache line of 64 bytes. The attributes are views of the usual shapes. A page of memory
        is taken when it is first written.

        Parameters
        ----------
        pages, page_size, kv_heads, head_dim : int
            Number of pages, tokens on a page, key heads, and width of a key in elements.
        dtype : dtype
            Of the keys: float32, float16, bfloat16 or int8; the last with scales.
        value_dtype : dtype, optional
            Of the values: one of these or int4; by default that of the keys.
        value_dim : int, optional
            Width of a value; by default head_dim. For int4 a multiple of 32.
        hadamard : bool, default False
            Whether keys are stored times the Hadamard matrix.
        layers : int, optional
            Number of caches in a list. By default one cache is returned alone.

        Returns
        -------
        cache : KVCache, or list of KVCache
            The cache, or `layers` of them, filled with zeros.

        Raises
        ------
        TypeError, ValueError
            If a size is no whole number of at least 1, or keys or values have no such dtype.

        Examples
        --------
        >>> import ml_dtypes, rope_cpu
        >>> rope_cpu.KVCache.zeros(100, 16, 8, 128, dtype=ml_dtypes.bfloat16)
        KVCache(bfloat16, pages=100, page_size=16, kv_heads=8, head_dim=128, value_dim=128)
        >>> caches = rope_cpu.KVCache.zeros(100, 16, 8, 128, dtype="int8", layers=32)
        >>> len(caches), caches[0].key.shape, caches[0].key_scale.shape
        (32, (100, 16, 8, 128), (100, 16, 8))

        Two fifths of the memory of bfloat16:

        >>> cache = rope_cpu.KVCache.zeros(
        ...     100, 16, 8, 128, dtype="int8", value_dtype="int4", hadamard=True
        ... )
        >>> cache.value.shape, cache.value_scale.shape
        ((100, 16, 8, 64), (100, 16, 8, 4))
        """
        width = head_dim if value_dim is None else value_dim
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        for name, size in {**sizes, "head_dim": head_dim, "value_dim": width}.items():
            whole_number(name, size)
        shape = tuple(sizes.values())
        check_table_size("pages", pages, *shape, max(head_dim, width), most=limits.WHOLE)
        key = value = _format_named("dtype", dtype, CACHE_FORMATS)
        if value_dtype is not None:
            value = _format_named("value_dtype", value_dtype, VALUE_FORMATS)
        if width % (value.group or 1):
            rule = f"be a multiple of {value.group} for int4, by default head_dim"
            raise ArgumentError("value_dim", width, rule)
        is_transformed = boolean("hadamard", hadamard)
        count = 1 if layers is None else whole_number("layers", layers, most=limits.LAYERS)
        caches = []
        for _ in range(count):
            arrays = _zeros("key", shape, head_dim, key) | _zeros("value", shape, width, value)
            caches.append(cls(**arrays, hadamard=is_transformed))
        return caches[0] if layers is None else caches

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the keys."""
        return self.key.dtype

    def __repr__(self) -> str:
        return (
            f"KVCache({self._kind}, pages={self.pages}, page_size={self.page_size}, "
            f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, value_dim={self.value_dim})"
        )

    def __copy__(self) -> KVCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        arrays: list[Any] = [getattr(self, name) for name in CACHE_ARRAYS]
        if _is_part(self.value, self.key):
            start = (self.value.ctypes.data - self.key.ctypes.data) // self.key.itemsize
            arrays[1] = slice(start, start + self.value_dim)
        return _restored, (self.hadamard, *arrays)


def _restored(hadamard: bool, key: Array, value: Any, *scales: Array | None) -> KVCache:
    """Return a cache of copies; value: a slice of the key's last axis if it is a part of it."""
    key = _heads_first_copy(key)
    value = key[..., value] if isinstance(value, slice) else _heads_first_copy(value)
    key_scale, value_scale = (None if x is None else _heads_first_copy(x) for x in scales)
    return KVCache(key, value, key_scale=key_scale, value_scale=value_scale, hadamard=hadamard)


def _heads_first_copy(x: Array) -> Array:
    """Return a copy in the layout of `KVCache.zeros`."""
    copy = _heads_first(x.shape, x.dtype)
    copy[...] = x
    return copy


def _zeros(name: str, shape: tuple[int, ...], width: int, row: CacheFormat) -> dict[str, Array]:
    """Return the arrays of new keys or values by name; shape: (pages, page_size, kv_heads)."""
    arrays = {name: _heads_first((*shape, width // row.packed), row.dtype)}
    if row.scale_dtype is not None:
        arrays[f"{name}_scale"] = _heads_first(row.scale_shape((*shape, width)), row.scale_dtype)
    return arrays


def _heads_first(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros of the shape (pages, page_size, kv_heads, …), in memory with the heads first.

    They start on a cache line. NumPy's large arrays start 16 bytes past one: each vector would be
    on one line more.
    """
    pages, page_size, kv_heads, *width = shape
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    zeros = memory[start : start + size].view(dtype)
    return zeros.reshape(pages, kv_heads, page_size, *width).swapaxes(1, 2)


def check_writeable(cache: KVCache, names: tuple[str, ...] = CACHE_ARRAYS) -> None:
    """Raise if one of these arrays of a cache is read-only, or was when the cache was made."""
    held = dict(zip(CACHE_ARRAYS, cache._kernel_arrays, strict=True))
    for name in names:
        given = getattr(cache, name)
        if given is not None and not (given.flags.writeable and held[name].flags.writeable):
            rule = "be writeable, and a value no part of its key"
            remedy = "make the KVCache from writeable arrays apart from each other"
            raise ArgumentError(f"cache.{name}", Finding("is read-only"), rule, remedy)


def _format_named(name: str, dtype: object, formats: dict[str, CacheFormat]) -> CacheFormat:
    """Return the format of keys or values of a dtype; raise if they have no such format."""
    row = {np.dtype(known): row for known, row in formats.items()}.get(to_dtype(dtype))
    if row is None:
        raise ArgumentTypeError(name, dtype, f"be one of {', '.join(formats)}")
    return row


def _format_of(name: str, x: object) -> str:
    """Return the name of the format of keys or values; raise if they are no such array."""
    x = plain_array(name, x, " that belongs to the server")
    formats = CACHE_FORMATS if name == "key" else VALUE_FORMATS
    found = FORMAT_NAMES.get(x.dtype)
    if found not in formats:
        dtypes = [str(row.dtype) for row in formats.values()]
        rule = f"be one of {', '.join(dtypes)} (native byte order)"
        raise ArgumentTypeError(name, Finding.dtype_of(x), rule)
    return found


def _check_shape(name: str, x: Array) -> None:
    if x.ndim != 4 or 0 in x.shape:
        rule = "be (pages, page_size, kv_heads, width), none 0"
        raise ArgumentError(name, Finding.shape_of(x), rule)
    _check_contiguous(name, x)


def _check_contiguous(name: str, x: Array) -> None:
    if x.shape[3] > 1 and x.strides[3] != x.itemsize:
        rule = f"have a contiguous last axis, of stride {x.itemsize}"
        raise ArgumentError(name, Finding(f"has strides {x.strides}"), rule)


def _value_dim(value: Array, row: CacheFormat) -> int:
    """Return the width of values in elements; raise unless they are whole groups."""
    width: int = value.shape[3] * row.packed
    if width % (row.group or 1):
        rule = f"have half as many bytes as elements, a multiple of {row.group}, on its last axis"
        raise ArgumentError("value", Finding.shape_of(value), rule)
    return width


def _check_scale(name: str, scale: object, row: CacheFormat, vectors: tuple[int, ...]) -> None:
    """Raise unless the scales of keys or values fit their format.

    vectors: the shape of the keys or values in elements.
    """
    format_name = FORMAT_NAMES[row.dtype]
    if row.scale_dtype is None:
        if scale is not None:
            rule = f"be left out, as {format_name} has no scales"
            raise ArgumentError(name, Finding("is given"), rule)
        return
    shape = row.scale_shape(vectors)
    like = f" of {row.scale_dtype} and shape {shape} for {format_name}"
    scale = plain_array(name, scale, like)
    if scale.dtype != row.scale_dtype:
        raise ArgumentTypeError(name, Finding.dtype_of(scale), f"be an array{like}")
    if scale.shape != shape:
        raise ArgumentError(name, Finding.shape_of(scale), f"be an array{like}")
    if row.group is not None:
        _check_contiguous(name, scale)


def _scale_view(scale: Array | None) -> Array:
    """Return the view of scales that kernels take, of 4 axes."""
    if scale is None:
        return NO_SCALE
    x = np.asarray(scale)
    return x[..., None] if x.ndim == 3 else x.view(np.int16)


def _check_memory(arrays: dict[str, Array]) -> None:
    """Raise if two elements of the arrays share memory."""
    earlier: dict[str, Array] = {}
    for name, x in arrays.items():
        refuse_overlap(name, x)
        if name != "value" or not _is_part(x, arrays["key"]):
            refuse_shared(name, x, earlier)
        earlier[name] = x


def _is_part(value: Array, key: Array) -> bool:
    """Return True if each value is some of the elements of the key of its slot."""
    start = value.ctypes.data - key.ctypes.data
    room = (key.shape[3] - value.shape[3]) * key.itemsize
    is_inside = 0 <= start <= room and room > 0
    return value.dtype == key.dtype and value.strides == key.strides and is_inside
