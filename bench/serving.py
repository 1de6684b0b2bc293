"""Steps of a server: new tokens into a paged cache, and cached keys moved in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu import Batch, KVCache, RMSNorm, RotaryEmbedding, RotaryPlan
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare
from rope_cpu.array_types import CACHE_KINDS, Array, CacheKind, Float64

from .rotations import UnavailableError
from .timing import Call
from .workloads import evenly, normal

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

# The largest errors of results, as shares of the largest element of their head vector: the 72
# roundings of a norm and a rotation in float32; half a unit in the last place; half a step of 127,
# and a step of 8, since the steps end at 7, each with some roundings of their scale.
_TOLERANCES = {"float32": 72 * 2.0**-24, "bfloat16": 2.0**-8, "int8": 0.51 / 127, "int4": 1.02 / 8}


@dataclass(frozen=True)
class Appended:
    """The projections of new tokens, the batch that they belong to, and the cache.

    tokens: new tokens, of up to 64 sequences. kind: of the cache; q, k and v are float32.
    normed: whether q and k are normed, with weights.
    """

    tokens: int
    kind: CacheKind = CACHE_KINDS["float32"]
    normed: bool = False

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
        """Return an empty cache."""
        return empty_cache(_MOST_SEQUENCES * _PAGES_OF_SEQUENCE, _PAGE_SIZE, self.kind)

    @property
    def bytes_accessed(self) -> int:
        """Bytes of q, k and v and of the results, scales and cos and sin included."""
        float32_elements = self.tokens * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS + 1)
        return 4 * float32_elements + cache_bytes(empty_cache(1, self.tokens, self.kind))

    def call(self, function: Callable[..., Array], *outs: Array) -> Call:
        """Return the call of a function of q, k, v, a cache and arrays for rotated vectors."""
        cache = self.cache()
        return Call(function, (*self.projections(), cache, *outs), lambda q: (q, cache))

    def error(self, results: tuple[Array, KVCache]) -> float:
        """Return the largest error / tolerance of the queries and of the cache: above 1 is wrong.

        results: the rotated queries of `projections`, and the cache.
        """
        q_rot, cache = results
        tokens = evenly(self.tokens, _CHECKED_TOKENS)
        places = np.divmod(self.batch.slot_mapping[tokens], _PAGE_SIZE)
        stored_k, stored_v = cached(cache, places)
        q, k, v = (x[tokens] for x in self.projections())
        q_weight, k_weight = self.weights
        exact_k = self._rotated(k, k_weight, tokens)
        if self.kind.hadamard:
            exact_k = transformed(exact_k)
        fractions = [
            _fraction(q_rot[tokens], self._rotated(q, q_weight, tokens), "float32"),
            _fraction(stored_k, exact_k, self.kind.key),
            _fraction(stored_v, v, self.kind.value),
        ]
        return max(fractions)

    def _rotated(self, x: Array, weight: Array, tokens: Array) -> Float64:
        """Return exact normed and rotated vectors."""
        vectors = x.astype(np.float64)
        if self.normed:
            vectors = _normed(vectors, weight)
        ids = self.batch.cache_position[None, tokens]
        exact, _ = reference.rotation(ROPE.spec, vectors[None], ids)
        rotated: Float64 = exact.high[0]
        return rotated


@dataclass(frozen=True)
class Move:
    """Cached keys of all slots of a cache, moved by a shift. dtype: of the cache."""

    dtype: str
    tokens: int = 8192
    delta: int = -256

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys, read and written."""
        return 2 * self.keys().nbytes

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

    def error(self, moved: Array) -> float:
        """Return the largest error / tolerance of moved `keys`: above 1 is wrong."""
        tokens = evenly(self.tokens, _CHECKED_TOKENS)
        ids = np.full((1, len(tokens)), self.delta)
        exact, bound = reference.rotation(ROPE.spec, self.keys()[None, tokens], ids)
        return compare(exact.error(moved[None, tokens]), bound)[1]


def empty_cache(pages: int, page_size: int, kind: CacheKind) -> KVCache:
    """Return a cache of `KVCache.zeros`."""
    cache: KVCache = KVCache.zeros(
        pages,
        page_size,
        KV_HEADS,
        HEAD_DIM,
        dtype=np.dtype(kind.key),
        value_dtype=np.dtype(kind.value),
        hadamard=kind.hadamard,
    )
    return cache


def cache_bytes(cache: KVCache) -> int:
    """Return the bytes of keys and values, with the scales that they may have."""
    arrays = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    return sum(x.nbytes for x in arrays if x is not None)


def transformed(x: Array) -> Float64:
    """Return head vectors times the Hadamard matrix in natural order."""
    matrix = np.ones((1, 1))
    while len(matrix) < HEAD_DIM:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    result: Float64 = x @ matrix / HEAD_DIM**0.5
    return result


def cached(cache: KVCache, index: Any) -> tuple[Float64, Float64]:
    """Return keys and values of a cache; index: of pages, and of tokens on them."""
    arrays = (cache.key, cache.key_scale), (cache.value, cache.value_scale)
    key, value = (_read(x[index], None if scale is None else scale[index]) for x, scale in arrays)
    return key, value


def _read(x: Array, scale: Array | None) -> Float64:
    """Return stored head vectors; scale: one of each vector, or of each of its groups."""
    if scale is None:
        return x.astype(np.float64)
    numbers = x.reshape(*scale.shape, -1)
    if x.dtype == np.uint8:  # in 4 bits, first those of the first half of a group
        numbers = np.concatenate([numbers & 15, numbers >> 4], axis=-1) - 8.0
    elements = numbers * scale[..., None].astype(np.float64)
    return elements.reshape(*x.shape[:-1], HEAD_DIM)


def _fraction(result: Array, exact: Array, dtype: str) -> float:
    """Return the largest error / tolerance of head vectors that were rounded to a dtype."""
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    return compare(np.abs(result - exact), _TOLERANCES[dtype] * largest)[1]


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
    return Call(step.plan, (q, k, outs))


def plan_and_numpy(step: Appended) -> Call:
    """Norm in NumPy, rotate by a plan, and write to the slots in NumPy."""
    if step.kind.hadamard:
        raise UnavailableError(f"{step.kind} is not written in NumPy")
    plan = step.plan
    places = np.divmod(step.batch.slot_mapping, _PAGE_SIZE)
    q_weight, k_weight = step.weights

    def run(q: Array, k: Array, v: Array, cache: KVCache, q_rot: Array, k_rot: Array) -> Array:
        if step.normed:
            q = _normed(q, q_weight)
            k = _normed(k, k_weight)
        plan(q, k, out=(q_rot, k_rot))
        _write(cache.key, cache.key_scale, places, k_rot)
        _write(cache.value, cache.value_scale, places, v)
        return q_rot

    q, k, _ = step.projections()
    return step.call(run, np.empty_like(q), np.empty_like(k))


def _normed(x: Array, weight: Array) -> Array:
    mean = np.mean(x * x, axis=-1, keepdims=True)
    normed: Array = x / np.sqrt(mean + EPS) * weight
    return normed


def _write(cached: Array, scale: Array | None, places: Any, x: Array) -> None:
    """Write vectors to a cache, rounded to its dtype; places: pages, and tokens on them."""
    if scale is not None:
        largest = np.abs(x).max(axis=-1)
        scale[places] = largest / _INT8_MOST
        x = np.rint(x * (_INT8_MOST / largest)[..., None])
    cached[places] = x


def rotate_cached(move: Move) -> Call:
    """Rotate the keys of a cache in place."""
    keys = move.keys()
    paged = keys.reshape(-1, _PAGE_SIZE, KV_HEADS, HEAD_DIM)
    cache = KVCache(paged, np.zeros_like(paged))
    return Call(move.plan.rotate_cached, (cache, move.slots()), lambda _: keys)


def rotate_contiguous(move: Move) -> Call:
    """Rotate as many contiguous keys in place."""
    keys = move.keys()
    return Call(move.plan.rotate, (keys, keys), lambda moved: moved)
