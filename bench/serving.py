"""Steps of a server: new tokens into a paged cache, and cached keys moved in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu import Batch, KVCache, RMSNorm, RotaryEmbedding, RotaryPlan
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import CACHE_FORMATS, Array, Float64

from .timing import Call
from .workloads import evenly, normal, pair_sizes

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

_INT8_MOST = np.float32(127)

# Added to the mean of squares by the norms.
EPS = 1e-6
# Float32 roundings of the norm of a head vector, in whatever order its squares are added: of each
# square, each sum and the mean (half of them, since the square root follows), of eps, the root, its
# reciprocal, the two products.
_NORM_ROUNDINGS = (HEAD_DIM + 2) / 2 + 5
_UNIT = 2.0**-24


@dataclass(frozen=True)
class Appended:
    """The projections of new tokens, the batch that they belong to, and the cache.

    tokens: new tokens, of up to 64 sequences. cache_dtype: of the cache; q, k and v are float32.
    normed: whether q and k are normed, with weights. copies: allocations of all arrays.
    """

    tokens: int
    cache_dtype: str = "float32"
    normed: bool = False
    copies = 1

    @cached_property
    def batch(self) -> Batch:
        """The sequences, packed one after the other, with as many new tokens each."""
        sequences = min(self.tokens, _MOST_SEQUENCES)
        capacity = _PAGE_SIZE * _PAGES_OF_SEQUENCE
        pages = np.random.default_rng(7).permutation(_MOST_SEQUENCES * _PAGES_OF_SEQUENCE)
        return Batch(
            seq_lens=capacity - np.arange(sequences) % 7,
            query_lens=np.full(sequences, self.tokens // sequences),
            page_table=pages.reshape(_MOST_SEQUENCES, -1)[:sequences],
            page_size=_PAGE_SIZE,
        )

    @cached_property
    def plan(self) -> RotaryPlan:
        """The plan of all new tokens."""
        return ROPE.plan(self.batch.cache_position, layout="thd")

    @cached_property
    def weights(self) -> tuple[Array, Array]:
        """The weights of the norms of q and of k, float32."""
        random = np.random.default_rng(8)
        q_weight, k_weight = random.uniform(0.5, 1.5, (2, HEAD_DIM)).astype(np.float32)
        return q_weight, k_weight

    def projections(self) -> tuple[Array, Array, Array]:
        """Return q, k and v, (tokens, heads, head_dim) each, as views of one packed buffer."""
        qkv = normal((self.tokens, HEADS + 2 * KV_HEADS, HEAD_DIM), "float32", _START)
        q, k, v = np.split(qkv, [HEADS, HEADS + KV_HEADS], axis=1)
        return q, k, v

    def cache(self) -> KVCache:
        """Return an empty cache of contiguous arrays, with scales if it is int8."""
        shape = (_MOST_SEQUENCES * _PAGES_OF_SEQUENCE, _PAGE_SIZE, KV_HEADS, HEAD_DIM)
        row = CACHE_FORMATS[self.cache_dtype]
        key, value = np.zeros((2, *shape), row.dtype)
        if row.scale_dtype is None:
            return KVCache(key, value)
        key_scale, value_scale = np.zeros((2, *shape[:3]), np.float32)
        return KVCache(key, value, key_scale=key_scale, value_scale=value_scale)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of q, k and v and of the results, scales and cos and sin included."""
        vectors = self.tokens * HEAD_DIM
        read = 4 * vectors * (HEADS + 2 * KV_HEADS + 1)
        queries = 4 * vectors * HEADS
        return read + queries + 2 * self.tokens * KV_HEADS * cached_vector_bytes(self.cache_dtype)

    def call(self, function: Callable[..., Array], *outs: Array) -> Call:
        """Return the call of a function of q, k, v, a cache and arrays for rotated vectors."""
        cache = self.cache()

        def error(q: Array) -> float:
            return self.error(q, cache)

        arguments = (*self.projections(), cache, *outs)
        return Call(function, [arguments], self.bytes_accessed, error)

    def error(self, q: Array, cache: KVCache) -> float:
        """Return the largest error / tolerance of the queries and of the cache: above 1 is wrong.

        q: the rotated queries of `projections`.
        """
        tokens = evenly(self.tokens, _CHECKED_TOKENS)
        slots = self.batch.slot_mapping[tokens]
        queries, keys, values = (x[tokens] for x in self.projections())
        q_weight, k_weight = self.weights
        exact_q, q_bound = self._rotation(queries, q_weight, tokens)
        exact_k, k_bound = self._rotation(keys, k_weight, tokens)
        k_bound += self._storage_rounding(exact_k.high[0], cache.key_scale, slots)
        v_bound = self._storage_rounding(values, cache.value_scale, slots)
        k_stored = _stored(cache.key, cache.key_scale, slots)
        v_stored = _stored(cache.value, cache.value_scale, slots)
        fractions = [
            compare(exact_q.error(q[None, tokens]), q_bound)[1],
            compare(exact_k.error(k_stored[None]), k_bound)[1],
            compare(np.abs(v_stored - values), v_bound)[1],
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
            bound += _NORM_ROUNDINGS * _UNIT * pair_sizes(ROPE, vectors)
        return exact, bound

    def _storage_rounding(self, exact: Array, scale: Array | None, slots: Array) -> Float64:
        """Return the error of the conversion of float32 to the dtype of the cache."""
        if scale is not None:
            # Half a step, and the roundings of the scale, of its reciprocal and of a product.
            step: Float64 = by_slot(scale)[slots, :, None].astype(np.float64)
            return step * (0.5 + 127 * 3 * _UNIT)
        if self.cache_dtype == "float32":
            return np.zeros(exact.shape)
        return half_ulp(exact, self.cache_dtype)


@dataclass(frozen=True)
class Move:
    """Cached keys of all slots of a cache, moved by a shift. dtype: of the cache."""

    dtype: str
    tokens: int = 8192
    delta: int = -256
    copies = 1

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys, read and written."""
        return 2 * self.tokens * KV_HEADS * cached_vector_bytes(self.dtype)

    @cached_property
    def plan(self) -> RotaryPlan:
        """The plan of the shift."""
        return ROPE.shift_plan(self.delta, layout="thd")

    def slots(self) -> Array:
        """Return every slot of the cache: its pages in random order."""
        pages = np.random.default_rng(7).permutation(self.tokens // _PAGE_SIZE)
        slots: Array = (pages[:, None] * _PAGE_SIZE + np.arange(_PAGE_SIZE)).ravel()
        return slots

    def keys(self) -> Array:
        """Return normal keys, (tokens, kv_heads, head_dim)."""
        return normal((self.tokens, KV_HEADS, HEAD_DIM), self.dtype, _START)

    def call(self, function: Callable[..., object], keys: Array, *arguments: Any) -> Call:
        """Return the call of a function of some arguments that moves `keys` in place."""
        tokens = evenly(self.tokens, _CHECKED_TOKENS)
        ids = np.full((1, len(tokens)), self.delta)
        exact, bound = reference.rotation(ROPE.spec, keys[None, tokens], ids)

        def error(_: object) -> float:
            return compare(exact.error(keys[None, tokens]), bound)[1]

        return Call(function, [arguments], self.bytes_accessed, error)


def cached_vector_bytes(cache_dtype: str) -> int:
    """Return the bytes of a cached head vector, with the scale that it may have."""
    row = CACHE_FORMATS[cache_dtype]
    scale_bytes = 0 if row.scale_dtype is None else row.scale_dtype.itemsize
    return HEAD_DIM * row.dtype.itemsize + scale_bytes


def by_slot(x: Array) -> Array:
    """Return a view of a contiguous cache array (pages, page_size, …) as (slots, …)."""
    return x.reshape(-1, *x.shape[2:])


def _stored(x: Array, scale: Array | None, slots: Array) -> Float64:
    """Return the cached vectors of slots."""
    stored: Float64 = by_slot(x)[slots].astype(np.float64)
    return stored if scale is None else stored * by_slot(scale)[slots, :, None]


def append(step: Appended) -> Call:
    """Norm, rotate and write by one call of `append`."""
    norms = {}
    if step.normed:
        q_weight, k_weight = step.weights
        norms = {"q_norm": RMSNorm(q_weight, EPS), "k_norm": RMSNorm(k_weight, EPS)}
    plan = step.plan
    batch = step.batch

    def run(q: Array, k: Array, v: Array, cache: KVCache, out: Array) -> Array:
        return plan.append(q, k, v, cache, batch, out=out, **norms)

    q, _, _ = step.projections()
    return step.call(run, np.empty_like(q))


def plan_alone(step: Appended) -> Call:
    """Rotate q and k and write nothing: the least that a step of this library can take."""
    q, k, _ = step.projections()
    outs = (np.empty_like(q), np.empty_like(k))
    return Call(step.plan, [(q, k, outs)])


def plan_and_numpy(step: Appended) -> Call:
    """Norm in NumPy, rotate by a plan, and write to the slots in NumPy."""
    plan = step.plan
    slots = step.batch.slot_mapping
    q_weight, k_weight = step.weights

    def run(q: Array, k: Array, v: Array, cache: KVCache, q_rot: Array, k_rot: Array) -> Array:
        if step.normed:
            q = _normed(q, q_weight)
            k = _normed(k, k_weight)
        plan(q, k, out=(q_rot, k_rot))
        _write(cache.key, cache.key_scale, slots, k_rot)
        _write(cache.value, cache.value_scale, slots, v)
        return q_rot

    q, k, _ = step.projections()
    return step.call(run, np.empty_like(q), np.empty_like(k))


def _normed(x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean + np.float32(EPS)) * weight
    return normed


def _write(cached: Array, scale: Array | None, slots: Array, x: Array) -> None:
    """Write vectors to slots of a cache, rounded to its dtype."""
    if scale is not None:
        largest = np.abs(x).max(axis=-1)
        by_slot(scale)[slots] = largest / _INT8_MOST
        x = np.rint(x * (_INT8_MOST / largest)[..., None])
    by_slot(cached)[slots] = x


def rotate_cached(move: Move) -> Call:
    """Rotate the keys of a cache in place."""
    keys = move.keys()
    paged = keys.reshape(-1, _PAGE_SIZE, KV_HEADS, HEAD_DIM)
    cache = KVCache(paged, np.zeros_like(paged))
    return move.call(move.plan.rotate_cached, keys, cache, move.slots())


def rotate_contiguous(move: Move) -> Call:
    """Rotate as many contiguous keys in place."""
    keys = move.keys()
    return move.call(move.plan.rotate, keys, keys, keys)
