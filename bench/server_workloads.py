"""One step of a server to time: new tokens into a paged cache, or cached keys moved in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rope_cpu import Batch, KVCache, RMSNorm, RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import DTYPES, Array, Float64

from .workload import normal

HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
ROPE = RotaryEmbedding(HEAD_DIM, rope_theta=500000.0)

# The cache has this many slots, whose pages are in random order.
_PAGE_SIZE = 16
_MOST_SEQUENCES = 64
_PAGES_OF_SEQUENCE = 4

# Bytes past a cache line at which arrays start, as large ones of NumPy do.
_START = 16

# Tokens whose results are compared with the reference.
_CHECKED_TOKENS = 64

# Added to the mean of squares by the norms.
EPS = 1e-6
# Float32 roundings of the norm of a head vector, in whatever order its squares are added: of each
# square, each sum and the mean (half of them, since the square root follows), of eps, the root, its
# reciprocal, and two products.
_NORM_ROUNDINGS = (HEAD_DIM + 2) / 2 + 4
_UNIT = 2.0**-24


@dataclass(frozen=True)
class Step:
    """The projections of new tokens, the batch that they belong to, and the cache.

    tokens: new tokens, of up to 64 sequences. cache_dtype: of the cache; q, k and v are float32.
    normed: whether q and k are normed, with weights.
    """

    tokens: int
    cache_dtype: str = "float32"
    normed: bool = False

    @cached_property
    def batch(self) -> Batch:
        """The sequences, packed one after the other, with as many new tokens each."""
        sequences = min(self.tokens, _MOST_SEQUENCES)
        new = self.tokens // sequences
        capacity = _PAGE_SIZE * _PAGES_OF_SEQUENCE
        pages = np.random.default_rng(7).permutation(_MOST_SEQUENCES * _PAGES_OF_SEQUENCE)
        return Batch(
            seq_lens=capacity - np.arange(sequences) % 7,
            query_lens=np.full(sequences, new),
            page_table=pages.reshape(_MOST_SEQUENCES, -1)[:sequences],
            page_size=_PAGE_SIZE,
        )

    @cached_property
    def weights(self) -> tuple[Array, Array]:
        """The weights of the norms of q and of k, float32."""
        random = np.random.default_rng(8)
        q_weight, k_weight = random.uniform(0.5, 1.5, (2, HEAD_DIM)).astype(np.float32)
        return q_weight, k_weight

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """The arguments of `append` for the norms."""
        if not self.normed:
            return {}
        q_weight, k_weight = self.weights
        return {"q_norm": RMSNorm(q_weight, EPS), "k_norm": RMSNorm(k_weight, EPS)}

    def projections(self) -> tuple[Array, Array, Array]:
        """Return q, k and v, (tokens, heads, head_dim) each, as views of one packed buffer."""
        qkv = normal((self.tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), "float32", _START)
        q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        return q, k, v

    def cache(self) -> KVCache:
        """Return an empty cache."""
        return empty_cache(self.cache_dtype, _MOST_SEQUENCES * _PAGES_OF_SEQUENCE)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of q, k and v and of what is written, scales and cos and sin included."""
        vectors = self.tokens * HEAD_DIM
        itemsize = 1 if self.cache_dtype == "int8" else DTYPES[self.cache_dtype].itemsize
        scales = 8 * self.tokens * KV_HEADS if self.cache_dtype == "int8" else 0
        read = 4 * vectors * (HEADS + 2 * KV_HEADS + 1)
        return read + 4 * vectors * HEADS + itemsize * vectors * 2 * KV_HEADS + scales

    def error(self, q: Array, cache: KVCache) -> float:
        """Return the largest error / tolerance of the queries and of the cache: above 1 is wrong.

        q: the rotated queries of `projections`.
        """
        tokens = _checked(self.tokens)
        slots = self.batch.slot_mapping[tokens]
        queries, keys, values = (x[tokens] for x in self.projections())
        q_weight, k_weight = self.weights
        exact_q, q_bound = self._rotation(queries, q_weight, tokens)
        exact_k, k_bound = self._rotation(keys, k_weight, tokens)
        exact_v = values.astype(np.float64)
        k_bound += _storage_rounding(exact_k.high[0], cache.key_scale, slots, self.cache_dtype)
        v_bound = _storage_rounding(exact_v, cache.value_scale, slots, self.cache_dtype)
        stored_keys = _stored(cache.key, cache.key_scale, slots)
        stored_values = _stored(cache.value, cache.value_scale, slots)
        fractions = [
            compare(exact_q.error(q[None, tokens]), q_bound)[1],
            compare(exact_k.error(stored_keys[None]), k_bound)[1],
            compare(np.abs(stored_values - exact_v), v_bound)[1],
        ]
        return max(fractions)

    def _rotation(self, x: Array, weight: Array, tokens: Array) -> tuple[Exact, Float64]:
        """Return normed and rotated vectors, and the tolerance of their float32 results."""
        vectors = x.astype(np.float64)
        if self.normed:
            mean = np.mean(vectors**2, axis=-1, keepdims=True)
            vectors = vectors / np.sqrt(mean + EPS) * weight.astype(np.float64)
        ids = self.batch.cache_position[None, tokens]
        exact, bound = reference.rotation(ROPE.spec, vectors[None], ids, dtype="float32")
        if self.normed:
            bound += _NORM_ROUNDINGS * _UNIT * _pair_size(vectors)
        return exact, bound


@dataclass(frozen=True)
class Move:
    """Cached keys of all slots of a cache, moved by a shift. dtype: of the cache."""

    dtype: str
    tokens: int = 8192
    delta: int = -256

    def slots(self) -> Array:
        """Return every slot of the cache: its pages in random order."""
        pages = np.random.default_rng(7).permutation(self.tokens // _PAGE_SIZE)
        slots: Array = (pages[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)).ravel()
        return slots

    def cache(self) -> KVCache:
        """Return a cache of normal keys."""
        shape = (self.tokens // _PAGE_SIZE, _PAGE_SIZE, KV_HEADS, HEAD_DIM)
        return KVCache(normal(shape, self.dtype, _START), np.zeros(shape, DTYPES[self.dtype]))

    def contiguous_keys(self) -> Array:
        """Return as many normal keys in one array, (tokens, kv_heads, head_dim)."""
        return normal((self.tokens, KV_HEADS, HEAD_DIM), self.dtype, _START)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys, read and written."""
        return 2 * self.tokens * KV_HEADS * HEAD_DIM * DTYPES[self.dtype].itemsize

    def error(self, before: Array, after: Array) -> float:
        """Return the largest error / tolerance of moved keys (tokens, kv_heads, head_dim)."""
        tokens = _checked(len(before))
        vectors = before[tokens]
        ids = np.full((1, len(tokens)), self.delta)
        exact, bound = reference.rotation(ROPE.spec, vectors[None], ids)
        return compare(exact.error(after[None, tokens]), bound)[1]


def empty_cache(dtype: str, pages: int) -> KVCache:
    """Return a cache of zeros, with scales if it is int8."""
    shape = (pages, _PAGE_SIZE, KV_HEADS, HEAD_DIM)
    scales: dict[str, Array] = {}
    if dtype == "int8":
        for name in ("key_scale", "value_scale"):
            scales[name] = np.zeros(shape[:3], np.float32)
    element = np.dtype(np.int8) if dtype == "int8" else DTYPES[dtype]
    return KVCache(np.zeros(shape, element), np.zeros(shape, element), **scales)


def by_slot(x: Array) -> Array:
    """Return a view of a contiguous cache array (pages, page_size, …) as (slots, …)."""
    return x.reshape(-1, *x.shape[2:])


def _stored(x: Array, scale: Array | None, slots: Array) -> Float64:
    """Return the cached vectors of slots."""
    stored: Float64 = by_slot(x)[slots].astype(np.float64)
    return stored if scale is None else stored * by_slot(scale)[slots, :, None]


def _storage_rounding(exact: Float64, scale: Array | None, slots: Array, dtype: str) -> Float64:
    """Return the error of the conversion of float32 to the dtype of a cache."""
    if scale is not None:
        # Half a step, and the roundings of the scale, of its reciprocal and of a product.
        step: Float64 = by_slot(scale)[slots, :, None].astype(np.float64)
        return step * (0.5 + 127 * 3 * _UNIT)
    return np.zeros_like(exact) if dtype == "float32" else half_ulp(exact, dtype)


def _pair_size(x: Float64) -> Float64:
    """Return |x_a| + |x_b| of the pair of each element."""
    first, second = ROPE.spec.pair_elements()
    size = np.abs(x)
    pair: Float64 = np.empty_like(size)
    for elements in (first, second):
        pair[..., elements] = size[..., first] + size[..., second]
    return pair


def _checked(tokens: int) -> Array:
    """Return the tokens whose results are compared with the reference."""
    return np.unique(np.linspace(0, tokens - 1, _CHECKED_TOKENS).astype(int))
