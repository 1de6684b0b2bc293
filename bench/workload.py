"""One rotation to time: its arrays, laid out as they are in use, and the exact result it is checked against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding, array_types
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import Array

Pair = tuple[Array, Array]

# In the order of the cases: what models run in comes first.
DTYPES = {"bfloat16": array_types.DTYPES["bfloat16"]} | array_types.DTYPES

# NumPy's arrays start at any multiple of so many bytes, torch's on a cache line.
_NUMPY_ALIGNMENT = 16

# Tokens whose results are compared with the reference.
_CHECKED = 64


@dataclass(frozen=True)
class Workload:
    """Queries and keys at `ids`, as views of one packed QKV buffer or as arrays of their own.

    ids: (tokens,) of one sequence or (batch, tokens), with several axes a trailing axis of coordinates.
    layout: "bshd", "bhsd" or "thd" (batch 1). packed: q and k are views of one buffer.
    in_place: results overwrite q and k; otherwise they go to preallocated arrays, contiguous in the same layout.
    copies: how many such arrays there are, each in another place in memory.
    aligned: arrays start on a cache line; otherwise those of copy n start n + 1 times 16 bytes past one.
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

    @property
    def shape(self) -> tuple[int, int]:
        """Return (batch, tokens)."""
        rows = self.ids.shape[:-1] if self.rope.axes > 1 else self.ids.shape
        batch, tokens = (1, *rows)[-2:]
        return batch, tokens

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype to compute in: float64 for float64, float32 for all others."""
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return int(DTYPES[self.dtype].itemsize)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed QKV buffer."""
        batch, tokens = self.shape
        return (
            batch * tokens * (self.heads + 2 * self.kv_heads) * self.rope.head_dim * self.itemsize
        )

    @property
    def bytes_accessed(self) -> int:
        """Bytes a rotation must read and write: q and k once each (in place: their rotated part), cos and sin."""
        (batch, tokens), width = (
            self.shape,
            self.rope.rotary_dim if self.in_place else self.rope.head_dim,
        )
        vectors = 2 * (self.heads + self.kv_heads) * width * self.itemsize
        tables = self.rope.rotary_dim * self.compute_dtype.itemsize
        return batch * tokens * (vectors + tables)

    def cos_sin(self) -> Pair:
        """Return cos and sin (batch or 1, tokens, pairs) in the dtype to compute in."""
        cos, sin = self.rope.cos_sin(self.ids, self.compute_dtype)
        return (cos, sin) if cos.ndim == 3 else (cos[None], sin[None])

    def wide_cos_sin(self) -> Pair:
        """Return cos and sin as wide as the head, with the value of a pair at each of its two elements."""
        cos, sin = self.cos_sin()
        return widened(cos, self.rope.interleaved), widened(sin, self.rope.interleaved)

    def buffers(self) -> list[Array]:
        """Return a packed buffer (batch, tokens, heads + 2·kv_heads, head_dim) for each copy, filled like `arrays`."""
        shape = (*self.shape, self.heads + 2 * self.kv_heads, self.rope.head_dim)
        return [self._filled(shape, copy) for copy in range(self.copies)]

    def views(self, qkv: Array) -> Pair:
        """Return the q and k of a packed buffer, in this workload's layout."""
        q, k, _ = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
        if self.layout == "thd":
            return q[0], k[0]
        return (q.swapaxes(1, 2), k.swapaxes(1, 2)) if self.layout == "bhsd" else (q, k)

    def arrays(self) -> list[Pair]:
        """Return q and k for each copy, filled with the same normal numbers."""
        return [self.views(qkv) for qkv in self.buffers()] if self.packed else self._contiguous()

    def bshd_arrays(self) -> list[Pair]:
        """Return `arrays` as views with axes (batch, seq, heads, head_dim)."""
        return [(self.bshd(q), self.bshd(k)) for q, k in self.arrays()]

    def arguments(self) -> list[tuple[Array, Array, Pair]]:
        """Return q, k and the pair of arrays that results go to, for each copy."""
        pairs = self.arrays()
        return [
            (*pair, out)
            for pair, out in zip(pairs, pairs if self.in_place else self._contiguous(), strict=True)
        ]

    def bshd(self, x: Array) -> Array:
        """Return a view of an array of this workload's layout with axes (batch, seq, heads, head_dim)."""
        return x[None] if self.layout == "thd" else x.swapaxes(1, 2) if self.layout == "bhsd" else x

    @cached_property
    def checked(self) -> Array:
        """The tokens whose results are checked: first, last and evenly between."""
        return np.unique(np.linspace(0, self.shape[1] - 1, _CHECKED).astype(int))

    def error(self, x: Array, result: Array, arithmetic: str) -> float:
        """Return the largest error / tolerance of `result`: above 1 it is wrong.

        x, result: (batch, checked, heads, head_dim). arithmetic: "float32" where every step but the last is at least
        that, "own" where each step rounds to the dtype: cos and sin, two products and a sum.
        """
        spec, ids = self.rope.spec, self.ids.reshape(-1, self.shape[1], self.rope.axes)
        exact, bound = reference.rotation(spec, x, ids[:, self.checked], dtype=self.dtype)
        if arithmetic == "own":
            (first, second), size = spec.pair_elements(), np.abs(x.astype(np.float64))
            reach = np.zeros(x.shape)
            reach[..., first] = reach[..., second] = self.rope.attention_factor * (
                size[..., first] + size[..., second]
            )
            bound = bound + 4 * half_ulp(reach, self.dtype)
        return compare(exact.error(result), bound)[1]

    def _contiguous(self) -> list[Pair]:
        return [
            (self._own(self.heads, copy), self._own(self.kv_heads, copy))
            for copy in range(self.copies)
        ]

    def _own(self, heads: int, copy: int) -> Array:
        sizes = dict(
            zip("bsthd", (*self.shape, self.shape[1], heads, self.rope.head_dim), strict=True)
        )
        return self._filled(tuple(sizes[axis] for axis in self.layout), copy)

    def _filled(self, shape: tuple[int, ...], copy: int) -> Array:
        dtype, past = DTYPES[self.dtype], 0 if self.aligned else _NUMPY_ALIGNMENT * (copy + 1) % 64
        x = allocate(int(np.prod(shape)) * dtype.itemsize, past).view(dtype)
        block = np.random.default_rng(7).standard_normal(min(x.size, 2**18)).astype(dtype)
        for start in range(0, x.size, block.size):
            part = x[start : start + block.size]
            part[:] = block[: part.size]
        filled: Array = x.reshape(shape)
        return filled


def widened(table: Array, interleaved: bool) -> Array:
    """Return cos or sin (…, pairs) as (…, head_dim), with the value of a pair at each of its two elements."""
    return np.repeat(table, 2, -1) if interleaved else np.concatenate([table, table], -1)


def text_ids(rope: RotaryEmbedding, ids: Array) -> Array:
    """Return the positions of text tokens as `rope` takes them: where it has several axes, the same on each."""
    return ids if rope.axes == 1 else np.repeat(ids[..., None], rope.axes, axis=-1)


def allocate(size: int, past: int = 0) -> NDArray[np.uint8]:
    """Return `size` bytes, all of them touched, that start `past` bytes after the start of a cache line."""
    raw = np.ones(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    return raw[start : start + size]
