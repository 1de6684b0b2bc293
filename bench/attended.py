"""The step of a server whose attention is timed: new tokens, and the cache that they attend to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rope_cpu import Batch, KVCache
from rope_cpu.array_types import DTYPES, Array, Float64

from .server_workloads import HEAD_DIM, HEADS, KV_HEADS

# Scale of the vectors of int8 caches. onnxruntime has one for the whole cache, so all have this.
INT8_SCALE = 1 / 32

# The allowed error, relative to the largest value: scores are below 16 in magnitude, and a rounding
# of one changes its weight by a factor of 1 + 1e-6.
_TOLERANCE = 2e-6
_CHECKED_TOKENS = 3


@dataclass(frozen=True)
class Attended:
    """Sequences of the same length, and their last tokens, whose queries are given.

    new: of the tokens of each sequence. length: tokens of each sequence, new ones included.
    cache_dtype: of the cache; queries are float32.
    """

    sequences: int
    new: int
    length: int
    cache_dtype: str = "float32"

    @cached_property
    def batch(self) -> Batch:
        """The sequences, each on a page of its own."""
        return Batch(
            seq_lens=[self.length] * self.sequences,
            query_lens=[self.new] * self.sequences,
            page_table=np.arange(self.sequences)[:, None],
            page_size=self.length,
        )

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return self.sequences * self.new

    def queries(self) -> Array:
        """Return rotated queries, (tokens, heads, head_dim)."""
        random = np.random.default_rng(1)
        return random.standard_normal((self.tokens, HEADS, HEAD_DIM), np.float32)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Return what a cache holds, heads first: (sequences, kv_heads, length, head_dim) each."""
        random = np.random.default_rng(2)
        shape = (self.sequences, KV_HEADS, self.length, HEAD_DIM)
        key, value = (self._stored(random.standard_normal(shape, np.float32)) for _ in "kv")
        return key, value

    def _stored(self, x: Array) -> Array:
        if self.cache_dtype == "int8":
            return np.clip(np.rint(x / np.float32(INT8_SCALE)), -127, 127).astype(np.int8)
        return x.astype(DTYPES[self.cache_dtype], copy=False)

    def read(self, x: Array) -> Array:
        """Return keys or values of the cache as float32."""
        read: Array = x.astype(np.float32)
        return read * np.float32(INT8_SCALE) if self.cache_dtype == "int8" else read

    def cache(self) -> KVCache:
        """Return the cache."""
        key, value = (x.transpose(0, 2, 1, 3) for x in self.keys_and_values())
        scales: dict[str, Array] = {}
        if self.cache_dtype == "int8":
            for name in ("key_scale", "value_scale"):
                scales[name] = np.full(key.shape[:3], INT8_SCALE, np.float32)
        return KVCache(key, value, **scales)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys and values, each read once."""
        itemsize = 1 if self.cache_dtype == "int8" else DTYPES[self.cache_dtype].itemsize
        vector = HEAD_DIM * itemsize + (4 if self.cache_dtype == "int8" else 0)
        return 2 * self.sequences * self.length * KV_HEADS * vector

    def error(self, result: Array, tolerance: float = _TOLERANCE) -> float:
        """Return the largest error / tolerance of results: above 1 is wrong.

        result: (tokens, heads, head_dim). tolerance: relative to the largest value.
        """
        key, value = self.keys_and_values()
        queries = self.queries()
        errors = []
        for token in np.unique(np.linspace(0, self.tokens - 1, _CHECKED_TOKENS).astype(int)):
            sequence = token // self.new
            last = self.length - self.new + token % self.new
            seen = [self.read(x[sequence, :, : last + 1]).astype(np.float64) for x in (key, value)]
            exact = _attention(queries[token].astype(np.float64), *seen)
            errors.append(np.abs(result[token] - exact).max())
        largest = float(np.abs(self.read(value)).max())
        return float(max(errors)) / (tolerance * largest)


def _attention(q: Float64, keys: Float64, values: Float64) -> Float64:
    """Return the attention of one token in float64, (heads, head_dim)."""
    rows = q.reshape(KV_HEADS, -1, HEAD_DIM)
    scores = rows @ keys.swapaxes(-1, -2) * HEAD_DIM**-0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result: Float64 = (weights @ values).reshape(q.shape)
    return result
