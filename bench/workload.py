"""One rotation to time: its arrays, laid out as in use, and the check of its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import COMPUTE_DTYPES, DTYPES, Array
from rope_cpu.launch.rotate import last_level_cache

Pair = tuple[Array, Array]

# NumPy's arrays start at any multiple of so many bytes, those of torch on a cache line.
_NUMPY_ALIGNMENT = 16
_CACHE_LINE = 64

# Tokens whose results are compared with the reference.
_CHECKED_TOKENS = 64

# Cold copies together take so many times the last-level cache, but there are at most so many.
_BEYOND_CACHE = 3
_MOST_COLD_COPIES = 4096
# Copies of warm arrays, so that a lucky or unlucky allocation does not decide.
WARM_COPIES = 5
# Random elements that arrays are filled with, repeatedly.
_RANDOM_ELEMENTS = 2**18


@dataclass(frozen=True)
class Workload:
    """Queries and keys at given position ids, as views of one packed QKV buffer or as own arrays.

    ids: (tokens,) of one sequence or (batch, tokens); for several axes with a trailing axis of
        coordinates.
    layout: "bshd", "bhsd" or "thd" (batch 1). packed: whether q and k are views of one buffer.
    in_place: results overwrite q and k; otherwise they go to preallocated contiguous arrays.
    copies: number of allocations of all these arrays.
    aligned, aligned_out: q and k, and the arrays of results, start on a cache line; otherwise those
        of copy n start 16·(n + 1) bytes past one.
    """

    rope: RotaryEmbedding
    ids: Array
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "float32"
    layout: str = "bshd"
    packed: bool = True
    in_place: bool = True
    copies: int = 1
    aligned: bool = False
    aligned_out: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        """Return (batch, tokens)."""
        rows = self.ids.shape[:-1] if self.rope.axes > 1 else self.ids.shape
        batch, tokens = (1, *rows)[-2:]
        return batch, tokens

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype to compute in: float64 for float64, float32 for all others."""
        return np.dtype(COMPUTE_DTYPES[DTYPES[self.dtype]])

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(DTYPES[self.dtype].itemsize)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed QKV buffer."""
        batch, tokens = self.shape
        elements = (self.heads + 2 * self.kv_heads) * self.rope.head_dim
        return batch * tokens * elements * self.itemsize

    @property
    def bytes_accessed(self) -> int:
        """Bytes that a rotation must read and write: q and k once each, cos and sin.

        In place these are the rotated elements of q and k only.
        """
        batch, tokens = self.shape
        width = self.rope.rotary_dim if self.in_place else self.rope.head_dim
        vectors = 2 * (self.heads + self.kv_heads) * width * self.itemsize
        tables = self.rope.rotary_dim * self.compute_dtype.itemsize
        return batch * tokens * (vectors + tables)

    def cos_sin(self) -> Pair:
        """Return cos and sin, (batch or 1, tokens, pairs), in the compute dtype."""
        cos, sin = self.rope.cos_sin(self.ids, self.compute_dtype)
        if cos.ndim == 3:
            return cos, sin
        return cos[None], sin[None]

    def wide_cos_sin(self) -> Pair:
        """Return cos and sin of head_dim width: the value of a pair at each of its elements."""
        cos, sin = self.cos_sin()
        interleaved = self.rope.interleaved
        return repeated_for_pairs(cos, interleaved), repeated_for_pairs(sin, interleaved)

    def buffers(self) -> list[Array]:
        """Return the packed buffers, (batch, tokens, heads + 2·kv_heads, head_dim) each."""
        shape = (*self.shape, self.heads + 2 * self.kv_heads, self.rope.head_dim)
        return [self._filled(shape, copy, self.aligned) for copy in range(self.copies)]

    def views(self, qkv: Array) -> Pair:
        """Return q and k of a packed buffer, in the layout of this workload."""
        q, k, _ = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
        if self.layout == "thd":
            return q[0], k[0]
        if self.layout == "bhsd":
            return q.swapaxes(1, 2), k.swapaxes(1, 2)
        return q, k

    def arrays(self) -> list[Pair]:
        """Return q and k for each copy, filled with the same normal numbers."""
        if self.packed:
            return [self.views(qkv) for qkv in self.buffers()]
        return self._contiguous_pairs(self.aligned)

    def outputs(self) -> list[Pair]:
        """Return contiguous arrays for the results of each copy."""
        return self._contiguous_pairs(self.aligned_out)

    def bshd_arrays(self) -> list[Pair]:
        """Return `arrays` as views with axes (batch, seq, heads, head_dim)."""
        return [(self.bshd(q), self.bshd(k)) for q, k in self.arrays()]

    def argument_sets(self) -> list[tuple[Array, Array, Pair]]:
        """Return q, k and the pair of output arrays, for each copy."""
        pairs = self.arrays()
        outputs = pairs if self.in_place else self.outputs()
        return [(q, k, out) for (q, k), out in zip(pairs, outputs, strict=True)]

    def bshd(self, x: Array) -> Array:
        """Return a view of an array of this layout with axes (batch, seq, heads, head_dim)."""
        if self.layout == "thd":
            return x[None]
        if self.layout == "bhsd":
            return x.swapaxes(1, 2)
        return x

    @cached_property
    def checked_tokens(self) -> Array:
        """The tokens whose results are checked: first, last and evenly between."""
        _, tokens = self.shape
        return np.unique(np.linspace(0, tokens - 1, _CHECKED_TOKENS).astype(int))

    def error(self, x: Array, result: Array, arithmetic: str) -> float:
        """Return the largest error / tolerance of `result`: above 1 it is wrong.

        x, result: (batch, checked tokens, heads, head_dim).
        arithmetic: "float32" if all steps but the last are at least that precise; "own" if each
            step (cos and sin, two products, a sum) rounds to the dtype.
        """
        spec = self.rope.spec
        _, tokens = self.shape
        ids = self.ids.reshape(-1, tokens, self.rope.axes)[:, self.checked_tokens]
        exact, bound = reference.rotation(spec, x, ids, dtype=self.dtype)
        if arithmetic == "own":
            first, second = spec.pair_elements()
            size = np.abs(x.astype(np.float64))
            largest = self.rope.attention_factor * (size[..., first] + size[..., second])
            magnitude = np.zeros(x.shape)
            magnitude[..., first] = largest
            magnitude[..., second] = largest
            bound = bound + 4 * half_ulp(magnitude, self.dtype)
        _, fraction = compare(exact.error(result), bound)
        return fraction

    def _contiguous_pairs(self, aligned: bool) -> list[Pair]:
        return [
            (
                self._filled(self._layout_shape(self.heads), copy, aligned),
                self._filled(self._layout_shape(self.kv_heads), copy, aligned),
            )
            for copy in range(self.copies)
        ]

    def _layout_shape(self, heads: int) -> tuple[int, ...]:
        batch, tokens = self.shape
        sizes = {"b": batch, "s": tokens, "t": tokens, "h": heads, "d": self.rope.head_dim}
        return tuple(sizes[axis] for axis in self.layout)

    def _filled(self, shape: tuple[int, ...], copy: int, aligned: bool) -> Array:
        start = 0 if aligned else _NUMPY_ALIGNMENT * (copy + 1) % _CACHE_LINE
        return normal(shape, self.dtype, start)


def with_copies(workload: Workload, cold: bool = False) -> Workload:
    """Return a workload with enough copies to exceed the caches, or a few if it is warm.

    Warm arrays that exceed the caches have one copy: their address makes no difference.
    """
    cache = last_level_cache()
    size = workload.packed_bytes
    if cold:
        copies = max(2, min(_MOST_COLD_COPIES, _BEYOND_CACHE * cache // size))
    else:
        copies = WARM_COPIES if size < cache else 1
    return replace(workload, copies=copies)


def normal(shape: tuple[int, ...], dtype: str, start: int) -> Array:
    """Return an array of normal numbers that starts `start` bytes past a cache line."""
    size = int(np.prod(shape))
    x = allocate(size * DTYPES[dtype].itemsize, start).view(DTYPES[dtype])
    random = np.random.default_rng(7)
    block = random.standard_normal(min(size, _RANDOM_ELEMENTS)).astype(DTYPES[dtype])
    for first in range(0, size, block.size):
        part = x[first : first + block.size]
        part[:] = block[: part.size]
    filled: Array = x.reshape(shape)
    return filled


def repeated_for_pairs(table: Array, interleaved: bool) -> Array:
    """Return a table (…, pairs) as (…, head_dim): the value of a pair at each of its elements."""
    if interleaved:
        return np.repeat(table, 2, -1)
    return np.concatenate([table, table], -1)


def text_ids(rope: RotaryEmbedding, ids: Array) -> Array:
    """Return position ids of text for `rope`: for several axes the same coordinate on each."""
    if rope.axes == 1:
        return ids
    return np.repeat(ids[..., None], rope.axes, axis=-1)


def allocate(size: int, start: int = 0) -> NDArray[np.uint8]:
    """Return `size` touched bytes that begin `start` bytes past the begin of a cache line."""
    raw = np.ones(size + 2 * _CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % _CACHE_LINE + start
    return raw[first : first + size]
