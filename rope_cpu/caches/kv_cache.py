"""`KVCache`: a server's arrays of cached keys and values, checked once."""

from __future__ import annotations

import math
from typing import Any, Self, overload

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.arrays import elements_disjoint, not_an_array, share_memory, to_dtype
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import check_table_size, check_type, refuse_masked, whole_number
from rope_cpu.arguments.texts import did_you_mean
from rope_cpu.array_types import CACHE_FORMATS, CACHE_NAMES, Array, CacheDtype
from rope_cpu.caches import Immutable

_DTYPE_LIST = ", ".join(CACHE_FORMATS)  # for error texts

_CACHE_LINE = 64  # bytes
NO_SCALE = np.empty((0, 0, 0, 1), np.float32)  # of a cache without scales

# The attributes of a cache that hold its arrays.
CACHE_ARRAYS = ("key", "value", "key_scale", "value_scale")


class KVCache(Immutable):
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
    value : array of the same dtype, (pages, page_size, kv_heads, value width)
        Cached values. Key and value may be views of one array, but share no element, with one
        exception: in absorbed latent attention a value is a part of its key. `attention` takes such
        a cache, and `append` refuses it.
    key_scale, value_scale : array of float32, (pages, page_size, kv_heads), optional
        For int8, and then required: the scale of each head vector, max|x| / 127. `append` writes
        them. A head vector is its int8 values times its scale. It has the scale NaN if it holds NaN
        or infinity, and 0 if all elements are below 2^-120.

    Raises
    ------
    TypeError, ValueError
        If an array has another dtype or shape, or overlaps itself or another array.

    Notes
    -----
    A deep copy, or a pickled cache, has arrays of its own, in the same order of memory and on cache
    lines, and a value that is a part of its key is one again. Memory that two caches share is there
    twice then.

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> key, value = np.zeros((2, 100, 16, 8, 128), np.float32)  # 100 pages of 16 tokens
    >>> rope_cpu.KVCache(key, value)
    KVCache(float32, pages=100, page_size=16, kv_heads=8, head_dim=128, value_dim=128)
    """

    __slots__ = (
        "_caller_arrays",
        "_dtype_name",
        "_kernel_arrays",
        "head_dim",
        "key",
        "key_scale",
        "kv_heads",
        "page_size",
        "pages",
        "value",
        "value_dim",
        "value_scale",
    )
    key: Array
    value: Array
    key_scale: Array | None
    value_scale: Array | None
    pages: int
    page_size: int  # tokens on a page
    kv_heads: int
    head_dim: int  # width of a key in elements
    value_dim: int  # width of a value in elements
    _dtype_name: str
    _caller_arrays: tuple[Array, ...]  # whose flags may become read-only
    _kernel_arrays: tuple[Array, ...]  # views of key, value and the scales, of 4 axes

    def __init__(
        self,
        key: Array,
        value: Array,
        *,
        key_scale: Array | None = None,
        value_scale: Array | None = None,
    ) -> None:
        name = _checked_dtype("key", key)
        if _checked_dtype("value", value) != name:
            raise ArgumentTypeError(
                "value", Finding.dtype_of(value), f"have that of `key`, {key.dtype}"
            )
        _check_shape("key", key)
        _check_shape("value", value)
        if value.shape[:3] != key.shape[:3]:
            rule = f"have the pages, page_size and kv_heads of `key`, {key.shape[:3]}"
            raise ArgumentError("value", Finding.shape_of(value), rule)
        arrays = {"key": key, "value": value}
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        arrays |= _checked_scales(scales, name, key.shape[:3])
        _check_memory(arrays)
        if _is_part(value, key):  # held read-only, because `append` writes both
            arrays["value"] = value.view()
            arrays["value"].flags.writeable = False
        # Views keep their shape when the caller changes that of an array in place.
        kernel_dtype = CACHE_FORMATS[name].kernel_dtype
        views: list[Array] = [np.asarray(arrays[x]).view(kernel_dtype) for x in ("key", "value")]
        views += [NO_SCALE if x is None else np.asarray(x)[..., None] for x in scales.values()]
        sizes = dict(zip(("pages", "page_size", "kv_heads", "head_dim"), key.shape, strict=True))
        sizes["value_dim"] = value.shape[3]
        self._set(key=key, value=value, **scales, **sizes)
        self._set(_dtype_name=name, _caller_arrays=tuple(arrays.values()))
        self._set(_kernel_arrays=tuple(views))

    @overload
    @classmethod
    def zeros(
        cls,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: CacheDtype,
        value_dim: int | None = None,
        layers: None = None,
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
        dtype: CacheDtype,
        value_dim: int | None = None,
        layers: int,
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
        value_dim: int | None = None,
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
            float32, float16, bfloat16 or int8; the last with scales.
        value_dim : int, optional
            Width of a value; by default head_dim.
        layers : int, optional
            Number of caches in a list. By default one cache is returned alone.

        Returns
        -------
        cache : KVCache, or list of KVCache
            The cache, or `layers` of them, filled with zeros.

        Raises
        ------
        TypeError, ValueError
            If a size is no whole number of at least 1, or a cache has no such dtype.

        Examples
        --------
        >>> import ml_dtypes, rope_cpu
        >>> rope_cpu.KVCache.zeros(100, 16, 8, 128, dtype=ml_dtypes.bfloat16)
        KVCache(bfloat16, pages=100, page_size=16, kv_heads=8, head_dim=128, value_dim=128)
        >>> caches = rope_cpu.KVCache.zeros(100, 16, 8, 128, dtype="int8", layers=32)
        >>> len(caches), caches[0].key.shape, caches[0].key_scale.shape
        (32, (100, 16, 8, 128), (100, 16, 8))
        """
        width = head_dim if value_dim is None else value_dim
        sizes = {"pages": pages, "page_size": page_size, "kv_heads": kv_heads}
        for name, size in {**sizes, "head_dim": head_dim, "value_dim": width}.items():
            whole_number(name, size)
        shape = tuple(sizes.values())
        check_table_size("pages", pages, *shape, max(head_dim, width), most=limits.WHOLE)
        checked = to_dtype(dtype)
        if checked not in CACHE_NAMES:
            meant = did_you_mean(dtype, CACHE_FORMATS)
            raise ArgumentTypeError("dtype", dtype, f"be one of {_DTYPE_LIST}{meant}")
        count = 1 if layers is None else whole_number("layers", layers, most=limits.LAYERS)
        caches = [cls(**_zeros(shape, head_dim, width, checked)) for _ in range(count)]
        return caches[0] if layers is None else caches

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of keys and values."""
        return self.key.dtype

    def __repr__(self) -> str:
        return (
            f"KVCache({self._dtype_name}, pages={self.pages}, page_size={self.page_size}, "
            f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, value_dim={self.value_dim})"
        )

    def __copy__(self) -> KVCache:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        arrays = [getattr(self, name) for name in CACHE_ARRAYS]
        stored: list[Any] = [None if x is None else _in_memory_order(x) for x in arrays]
        if _is_part(self.value, self.key):
            start = (self.value.ctypes.data - self.key.ctypes.data) // self.key.itemsize
            stored[1] = slice(start, start + self.value_dim)
        return _restored_cache, tuple(stored)


def _in_memory_order(x: Array) -> tuple[Array, Array]:
    """Return an array with its axes in the order of memory, and their indices in `x`."""
    axes = np.argsort(-np.abs(x.strides), kind="stable")
    return np.ascontiguousarray(x.transpose(axes)), axes


def _restored_cache(key: Any, value: Any, *scales: Any) -> KVCache:
    """Return a cache of new arrays; value: a slice of the key's last axis if it is a part of it."""
    new_key = _restored(*key)
    new_value = new_key[..., value] if isinstance(value, slice) else _restored(*value)
    key_scale, value_scale = (None if x is None else _restored(*x) for x in scales)
    return KVCache(new_key, new_value, key_scale=key_scale, value_scale=value_scale)


def _restored(x: Array, axes: Array) -> Array:
    """Return a copy, on a cache line, of an array in memory order, with its axes as they were."""
    memory = _aligned_zeros(x.shape, x.dtype)
    memory[...] = x
    return memory.transpose(np.argsort(axes))


def _zeros(
    shape: tuple[int, ...], head_dim: int, value_dim: int, dtype: np.dtype[Any]
) -> dict[str, Array]:
    """Return the arrays of a new cache by name; shape: (pages, page_size, kv_heads)."""
    arrays = {
        "key": _heads_first((*shape, head_dim), dtype),
        "value": _heads_first((*shape, value_dim), dtype),
    }
    if CACHE_FORMATS[CACHE_NAMES[dtype]].has_scales:
        scale = np.dtype(np.float32)
        arrays["key_scale"] = _heads_first(shape, scale)
        arrays["value_scale"] = _heads_first(shape, scale)
    return arrays


def _heads_first(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros of the shape (pages, page_size, kv_heads, …), in memory with the heads first."""
    pages, page_size, kv_heads, *width = shape
    return _aligned_zeros((pages, kv_heads, page_size, *width), dtype).swapaxes(1, 2)


def _aligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return zeros in C order that start on a cache line."""
    # NumPy's large arrays start 16 bytes past a cache line: each vector is on one line more.
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def check_cache(cache: object) -> None:
    """Raise unless an argument is a KVCache."""
    check_type("cache", cache, KVCache)


def check_writeable(cache: KVCache, names: tuple[str, ...] = CACHE_ARRAYS) -> None:
    """Raise if one of these arrays of a cache is read-only, or was when the cache was made."""
    held = dict(zip(CACHE_ARRAYS, cache._kernel_arrays, strict=True))
    for name in names:
        given = getattr(cache, name)
        if given is None or (given.flags.writeable and held[name].flags.writeable):
            continue
        if name == "value" and _is_part(held["value"], held["key"]):
            finding = Finding("is a part of `cache.key`")
            remedy = "append to a KVCache of the two parts of the key"
            raise ArgumentError("cache.value", finding, "have memory of its own", remedy)
        remedy = "make the KVCache from a writeable array"
        raise ArgumentError(f"cache.{name}", Finding("is read-only"), "be writeable", remedy)


def _checked_dtype(name: str, x: object) -> str:
    """Return the name of a cache's dtype; raise for any other, and if `x` is no array."""
    if not isinstance(x, np.ndarray):
        raise not_an_array(name, x, " that belongs to the server")
    refuse_masked(name, x)
    if x.dtype not in CACHE_NAMES:
        rule = f"be one of {_DTYPE_LIST} (native byte order)"
        raise ArgumentTypeError(name, Finding.dtype_of(x), rule)
    return CACHE_NAMES[x.dtype]


def _check_shape(name: str, x: Array) -> None:
    if x.ndim != 4 or 0 in x.shape:
        rule = "be (pages, page_size, kv_heads, width), none 0"
        raise ArgumentError(name, Finding.shape_of(x), rule)
    if x.strides[3] != x.itemsize:
        rule = f"have a contiguous last axis, of stride {x.itemsize}"
        raise ArgumentError(name, Finding(f"has strides {x.strides}"), rule)


def _checked_scales(
    scales: dict[str, Array | None], dtype: str, shape: tuple[int, ...]
) -> dict[str, Array]:
    """Return the scales of a cache; raise unless they are given where its format has some."""
    has_scales = CACHE_FORMATS[dtype].has_scales
    checked: dict[str, Array] = {}
    for name, scale in scales.items():
        if scale is None:
            if has_scales:
                rule = f"be a float32 array of shape {shape}, as the cache is {dtype}"
                raise ArgumentError(name, None, rule)
            continue
        if not has_scales:
            rule = f"be left out, as a cache of {dtype} has no scales"
            raise ArgumentError(name, Finding("is given"), rule)
        if not isinstance(scale, np.ndarray):
            raise not_an_array(name, scale, " of float32")
        refuse_masked(name, scale)
        if scale.dtype != np.float32:
            raise ArgumentTypeError(name, Finding.dtype_of(scale), "be float32")
        if scale.shape != shape:
            rule = f"be (pages, page_size, kv_heads), {shape}"
            raise ArgumentError(name, Finding.shape_of(scale), rule)
        checked[name] = scale
    return checked


def _check_memory(arrays: dict[str, Array]) -> None:
    """Raise if two elements of the arrays share memory."""
    names = list(arrays)
    for index, name in enumerate(names):
        x = arrays[name]
        if not elements_disjoint(x):
            overlap = Finding(f"has overlapping elements (strides {x.strides})")
            raise ArgumentError(name, overlap, "be an array whose elements share no memory")
        for other in names[:index]:
            is_part = name == "value" and _is_part(x, arrays["key"])
            if share_memory(x, arrays[other]) and not is_part:
                shares = Finding(f"shares memory with `{other}`")
                raise ArgumentError(name, shares, "have memory of its own")


def _is_part(value: Array, key: Array) -> bool:
    """Return True if each value is some of the elements of the key of its slot."""
    start = value.ctypes.data - key.ctypes.data
    room = (key.shape[3] - value.shape[3]) * key.itemsize
    return value.strides == key.strides and 0 <= start <= room and room > 0
