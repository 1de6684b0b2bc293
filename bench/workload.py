"""One rotation to time: its arrays, laid out as they are in use, and what must come out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding, reference
from rope_cpu.tolerance import compare, half_ulp
from rope_cpu.validation import arrays as check

Array = NDArray[Any]

# In the order of the cases: what models run in comes first.
DTYPES = {"bfloat16": check.DTYPES["bfloat16"]} | check.DTYPES

# NumPy's arrays start at any multiple of so many bytes, torch's on a cache line.
_NUMPYS_START = 16

# Tokens whose results are compared with the reference.
_CHECKED = 64

# Axes that bring a layout to (batch, seq, heads, head_dim), and back.
_TO_BSHD = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}


@dataclass(frozen=True)
class Workload:
    """Queries and keys of (batch, tokens) at `ids`, as views of one packed QKV buffer or as arrays of their own.

    ids: (tokens,) or (batch, tokens), with several axes a trailing axis of coordinates.
    layout: "bshd", "bhsd" or "thd" (batch 1). storage: "packed" or "contiguous".
    in_place: results overwrite q and k; otherwise they go to given arrays, contiguous in the same layout.
    copies: how many such arrays there are, in places of their own in memory.
    aligned: arrays start on a cache line; otherwise those of copy n start n + 1 times 16 bytes past one.
    """

    rope: RotaryEmbedding
    ids: Array
    batch: int
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "float32"
    layout: str = "bshd"
    storage: str = "packed"
    in_place: bool = True
    copies: int = 1
    aligned: bool = False

    def but(self, **changes: Any) -> Workload:
        """Return the same workload with some fields changed."""
        return replace(self, **changes)

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed QKV buffer."""
        rows = self.batch * self.tokens * (self.heads + 2 * self.kv_heads)
        return int(rows * self.rope.head_dim * DTYPES[self.dtype].itemsize)

    @property
    def bytes_accessed(self) -> int:
        """Bytes a rotation must read and write: q and k once each (in place: their rotated part), cos and sin."""
        width = self.rope.rotary_dim if self.in_place else self.rope.head_dim
        vectors = self.batch * self.tokens * (self.heads + self.kv_heads)
        real = 8 if self.dtype == "float64" else 4
        ids = int(np.prod(self.ids.shape[: self.ids.ndim - (self.rope.axes > 1)]))
        return int(2 * vectors * width * DTYPES[self.dtype].itemsize + ids * self.rope.rotary_dim * real)

    def buffers(self) -> list[Array]:
        """Return a packed buffer (batch, tokens, heads + 2·kv_heads, head_dim) for each copy, filled like `arrays`."""
        heads = self.heads + 2 * self.kv_heads
        return [self._filled((self.batch, self.tokens, heads, self.rope.head_dim), n) for n in range(self.copies)]

    def views(self, qkv: Array) -> tuple[Array, Array]:
        """Return the q and k of a packed buffer, in this workload's layout."""
        h, k = self.heads, self.kv_heads
        return self._arranged(qkv[:, :, :h]), self._arranged(qkv[:, :, h : h + k])

    def arrays(self) -> list[tuple[Array, Array]]:
        """Return q and k for each copy, filled with the same normal numbers."""
        return [self.views(qkv) for qkv in self.buffers()] if self.storage == "packed" else self.outs()

    def outs(self) -> list[tuple[Array, Array]]:
        """Return arrays that results can be written to, for each copy."""
        return [(self._own(self.heads, copy), self._own(self.kv_heads, copy)) for copy in range(self.copies)]

    def bshd(self, x: Array) -> Array:
        """Return a view of an array of this workload's layout with axes (batch, seq, heads, head_dim)."""
        return x[None] if self.layout == "thd" else x.transpose(_TO_BSHD[self.layout])

    @cached_property
    def checked(self) -> Array:
        """The tokens whose results are checked: first, last and evenly between."""
        return np.unique(np.linspace(0, self.tokens - 1, _CHECKED).astype(int))

    def error(self, x: Array, result: Array, arithmetic: str) -> float:
        """Return the largest error of `result` as a fraction of the tolerance: above 1 it is wrong.

        x, result: (batch, checked, heads, head_dim). arithmetic: "float32" where every step but the last is at least
        that, "own" where each step rounds to the dtype: cos and sin, two products and a sum.
        """
        spec, ids = self.rope.spec, self.ids if self.ids.ndim - (self.rope.axes > 1) > 1 else self.ids[None]
        exact, bound = reference.rotation(spec, x, ids[:, self.checked], dtype=self.dtype)
        if arithmetic == "own":
            (first, second), size = spec.pair_elements(), np.abs(x.astype(np.float64))
            reach = np.zeros(x.shape)
            reach[..., first] = reach[..., second] = self.rope.attention_factor * (size[..., first] + size[..., second])
            bound = bound + 4 * half_ulp(reach, self.dtype)
        return compare(exact.error(result), bound)[1]

    def _arranged(self, x: Array) -> Array:
        return x[0] if self.layout == "thd" else x.transpose(_TO_BSHD[self.layout])

    def _own(self, heads: int, copy: int) -> Array:
        shape = np.array((self.batch, self.tokens, heads, self.rope.head_dim))
        return self._filled(tuple(shape[1:] if self.layout == "thd" else shape[list(_TO_BSHD[self.layout])]), copy)

    def _filled(self, shape: tuple[int, ...], copy: int) -> Array:
        dtype, past = DTYPES[self.dtype], 0 if self.aligned else _NUMPYS_START * (copy + 1) % 64
        x = memory(int(np.prod(shape)) * dtype.itemsize, past).view(dtype)
        block = np.random.default_rng(7).standard_normal(min(x.size, 2**18)).astype(dtype)
        for start in range(0, x.size, block.size):
            part = x[start : start + block.size]
            part[:] = block[: part.size]
        filled: Array = x.reshape(shape)
        return filled


def memory(size: int, past: int = 0) -> NDArray[np.uint8]:
    """Return `size` bytes, all of them touched, that start `past` bytes after the start of a cache line."""
    raw = np.ones(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + past
    return raw[start : start + size]
