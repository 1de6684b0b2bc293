"""Rotations to time: their arrays, and the check of a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import COMPUTE_DTYPES, DTYPES, Array, Float64

Pair = tuple[Array, Array]

# Large arrays of NumPy start so many bytes past a cache line, those of torch on one.
_NUMPY_ALIGNMENT = 16
_CACHE_LINE = 64

# Tokens whose results are compared with the reference.
_CHECKED_TOKENS = 64

# Random elements that arrays are filled with, repeatedly.
_RANDOM_ELEMENTS = 2**18


@dataclass(frozen=True)
class Workload:
    """Queries and keys (batch, tokens, heads, head_dim) at given position ids.

    ids: (tokens,), consecutive, of one sequence, or (batch, tokens); for several axes with a
        trailing axis of coordinates.
    packed: whether q and k are views of one packed QKV buffer, or contiguous arrays of their own.
    in_place: results overwrite q and k; otherwise they go to preallocated contiguous arrays.
    aligned, aligned_out: q and k, and the arrays of results, start on a cache line; otherwise 16
        bytes past one.
    """

    rope: RotaryEmbedding
    ids: Array
    heads: int = 32
    kv_heads: int = 8
    dtype: str = "float32"
    packed: bool = True
    in_place: bool = True
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
    def bytes_accessed(self) -> int:
        """Bytes that a rotation must read and write: q and k once each, cos and sin.

        In place these are the rotated elements of q and k only.
        """
        batch, tokens = self.shape
        width = self.rope.rotary_dim if self.in_place else self.rope.head_dim
        vectors = 2 * (self.heads + self.kv_heads) * width * DTYPES[self.dtype].itemsize
        tables = self.rope.rotary_dim * self.compute_dtype.itemsize
        return batch * tokens * (vectors + tables)

    def wide_cos_sin(self) -> list[Array]:
        """Return cos and sin, (batch or 1, tokens, head_dim), in the compute dtype.

        They have the value of a pair at each of its elements.
        """
        wide = []
        for table in self.rope.cos_sin(self.ids, self.compute_dtype):
            by_row = table.reshape(-1, self.shape[1], table.shape[-1])
            both = np.repeat(by_row, 2, -1) if self.rope.interleaved else np.tile(by_row, 2)
            wide.append(both)
        return wide

    def arrays(self) -> Pair:
        """Return q and k, filled with the same normal numbers at each call."""
        if not self.packed:
            return self._contiguous_pair(self.aligned)
        qkv = self._filled(self.heads + 2 * self.kv_heads, self.aligned)
        q, k, _ = np.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
        return q, k

    def outputs(self) -> Pair:
        """Return contiguous arrays for the results."""
        return self._contiguous_pair(self.aligned_out)

    def error(self, results: Pair) -> float:
        """Return the largest error / tolerance of rotated q and k: above 1 they are wrong.

        A call may round each step (cos and sin, two products, a sum) to the dtype.
        """
        _, tokens = self.shape
        checked = evenly(tokens, _CHECKED_TOKENS)
        ids = self.ids.reshape(-1, tokens, self.rope.axes)[:, checked]
        fractions = []
        inputs = self.arrays()  # anew, since calls overwrite theirs
        for array, rotated in zip(inputs, results, strict=True):
            x = array[:, checked]
            exact, bound = reference.rotation(self.rope.spec, x, ids, dtype=self.dtype)
            bound += 4 * half_ulp(self.rope.attention_factor * self._pair_sizes(x), self.dtype)
            result = rotated.reshape(array.shape)[:, checked]
            fractions.append(compare(exact.error(result), bound)[1])
        return max(fractions)

    def _pair_sizes(self, x: Array) -> Float64:
        """Return |x_a| + |x_b| of the pair of each element; 0 for those that are not rotated."""
        first, second = self.rope.spec.pair_elements()
        size = np.abs(x.astype(np.float64))
        sizes = np.zeros_like(size)
        for elements in (first, second):
            sizes[..., elements] = size[..., first] + size[..., second]
        return sizes

    def _contiguous_pair(self, aligned: bool) -> Pair:
        return self._filled(self.heads, aligned), self._filled(self.kv_heads, aligned)

    def _filled(self, heads: int, aligned: bool) -> Array:
        start = 0 if aligned else _NUMPY_ALIGNMENT
        return normal((*self.shape, heads, self.rope.head_dim), self.dtype, start)


def evenly(count: int, most: int) -> Array:
    """Return at most so many of `count` indices: the first, the last and evenly between."""
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def normal(shape: tuple[int, ...], dtype: str, start: int) -> Array:
    """Return an array of normal numbers that starts `start` bytes past a cache line."""
    size = int(np.prod(shape))
    x = allocate(size * DTYPES[dtype].itemsize, start).view(DTYPES[dtype])
    random = np.random.default_rng(7)
    block = random.standard_normal(min(size, _RANDOM_ELEMENTS)).astype(DTYPES[dtype])
    x[:] = np.resize(block, size)
    filled: Array = x.reshape(shape)
    return filled


def allocate(size: int, start: int = 0) -> NDArray[np.uint8]:
    """Return `size` touched bytes that begin `start` bytes past the begin of a cache line."""
    raw = np.ones(size + 2 * _CACHE_LINE, np.uint8)
    first = -raw.ctypes.data % _CACHE_LINE + start
    return raw[first : first + size]
