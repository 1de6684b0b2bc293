"""Attention over the cache of a server: by rope_cpu, NumPy and onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import rope_cpu
from rope_cpu import Batch, KVCache, RotaryEmbedding
from rope_cpu.accuracy.attention import attention as reference
from rope_cpu.accuracy.attention import exactly
from rope_cpu.array_types import CACHE_KINDS, DTYPES, Array, CacheKind

from .rotations import UnavailableError, onnx_session
from .serving import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    cache_bytes,
    cached,
    empty_cache,
    transformed,
)
from .timing import Call
from .workloads import evenly

# Exported attention rotates. Frequencies of 0 do not change queries and keys, and take as long.
_NO_ROTATION = RotaryEmbedding.from_inv_freq(np.zeros(HEAD_DIM // 2))

# Scales of the numbers of caches. onnxruntime has one for the whole cache, so all have the same.
_SCALES = {"int8": 1 / 64, "int4": 1 / 4}

_CHECKED_TOKENS = 3


@dataclass(frozen=True)
class Attended:
    """Sequences of the same length, and their last tokens, whose queries are given.

    new: of the tokens of each sequence. length: tokens of each sequence, new ones included.
    kind: of the cache; queries are float32.
    """

    sequences: int
    new: int
    length: int
    kind: CacheKind = CACHE_KINDS["float32"]

    @cached_property
    def batch(self) -> Batch:
        """The sequences, each on a page of its own."""
        return Batch(
            seq_lens=[self.length] * self.sequences,
            query_lens=[self.new] * self.sequences,
            page_table=np.arange(self.sequences)[:, None],
            page_size=self.length,
        )

    def queries(self) -> Array:
        """Return rotated queries, (tokens, heads, head_dim)."""
        random = np.random.default_rng(1)
        return random.standard_normal((self.sequences * self.new, HEADS, HEAD_DIM), np.float32)

    def keys_and_values(self) -> tuple[Array, Array]:
        """Return what a cache holds, heads first: (sequences, kv_heads, length, …) each."""
        random = np.random.default_rng(2)
        shape = (self.sequences, KV_HEADS, self.length, HEAD_DIM)

        def stored(dtype: str) -> Array:
            if dtype == "int8":
                return random.integers(-127, 128, shape, np.int8)
            if dtype == "int4":
                return random.integers(0, 256, (*shape[:-1], HEAD_DIM // 2), np.uint8)
            return random.standard_normal(shape, np.float32).astype(DTYPES[dtype], copy=False)

        return stored(self.kind.key), stored(self.kind.value)

    def cache(self) -> KVCache:
        """Return the cache."""
        key, value = self.keys_and_values()
        cache = empty_cache(self.sequences, self.length, self.kind)
        cache.key[...] = key.swapaxes(1, 2)
        cache.value[...] = value.swapaxes(1, 2)
        if cache.key_scale is not None and cache.value_scale is not None:
            cache.key_scale[...] = _SCALES[self.kind.key]
            cache.value_scale[...] = _SCALES[self.kind.value]
        return cache

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys and values, each read once."""
        return cache_bytes(empty_cache(self.sequences, self.length, self.kind))

    def error(self, result: Array) -> float:
        """Return the largest error / tolerance of vectors of all tokens: above 1 is wrong."""
        cache = self.cache()
        queries = self.queries()
        results = result.reshape(queries.shape)
        if self.kind.hadamard:
            queries = transformed(queries)
        ratios = []
        for token in evenly(len(queries), _CHECKED_TOKENS):
            sequence = token // self.new
            seen = self.length - self.new + token % self.new + 1
            index = (slice(sequence, sequence + 1), slice(seen))
            k, v = (exactly(x).by_head() for x in cached(cache, index))
            q = exactly(queries[None, token, :, None])
            exact = reference(q, k, v, scale=HEAD_DIM**-0.5, mask=np.zeros(1)).result
            ratios.append(exact.compare(results[None, token, :, None])[1])
        return max(ratios)


def attention(step: Attended) -> Call:
    """Attend by one call of `rope_cpu.attention`."""
    q = step.queries()
    cache = step.cache()
    batch = step.batch
    out = np.empty_like(q)

    def run(q: Array) -> Array:
        return rope_cpu.attention(q, cache, batch, out=out)

    return Call(run, (q,), lambda y: y)


def numpy_attention(step: Attended) -> Call:
    """Attend by matrix products of NumPy, of all sequences; bfloat16 is cast first."""
    if step.kind.key not in DTYPES:
        raise UnavailableError(f"{step.kind} is not read in NumPy")
    key, value = step.keys_and_values()
    scale = np.float32(HEAD_DIM**-0.5)
    position = np.arange(step.length)
    hidden = position > position[-step.new :, None]  # of the keys, from each new token

    def run(q: Array) -> Array:
        by_token = q.reshape(step.sequences, step.new, KV_HEADS, -1, HEAD_DIM)
        by_head = by_token.transpose(0, 2, 3, 1, 4)
        rows = by_head.reshape(step.sequences, KV_HEADS, -1, HEAD_DIM) * scale
        scores = rows @ key.astype(np.float32, copy=False).swapaxes(-1, -2)
        if step.new > 1:
            scores.reshape(*by_head.shape[:-1], step.length)[..., hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=-1, keepdims=True)
        y = weights @ value.astype(np.float32, copy=False) / total
        result: Array = y.reshape(by_head.shape).transpose(0, 3, 1, 2, 4).reshape(q.shape)
        return result

    return Call(run, (step.queries(),), lambda y: y)


def onnx_attention(step: Attended) -> Call:
    """Attend by an export to GroupQueryAttention, with a shared cache and bound arrays.

    It also rotates, and writes the keys and values of the new tokens to the cache.
    """
    if str(step.kind) not in ("float32", "int8"):
        raise UnavailableError(f"GroupQueryAttention has no {step.kind} on the CPU")
    from rope_cpu import export

    scale = np.float32(_SCALES.get(step.kind.key, 1.0))
    is_int8 = step.kind.key == "int8"
    model = export.export_attention(
        _NO_ROTATION,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        target="ort",
        layout="bshd",
        cache="shared",
        cache_dtype="int8" if is_int8 else None,
        max_positions=step.length,
    )
    key, value = step.keys_and_values()
    feeds = {
        "q": step.queries().reshape(step.sequences, step.new, HEADS, HEAD_DIM),
        "k": np.multiply(key[:, :, -step.new :].swapaxes(1, 2), scale, order="C"),
        "v": np.multiply(value[:, :, -step.new :].swapaxes(1, 2), scale, order="C"),
        "past_key": key,
        "past_value": value,
        "past_lengths": np.full(step.sequences, step.length - step.new),
    }
    if is_int8:
        for name in ("k_scale", "v_scale"):
            feeds[name] = np.full((1, KV_HEADS, 1, HEAD_DIM), scale)
    y = np.empty_like(feeds["q"])
    call = export.bind(onnx_session(model), feeds, {"attention": y})
    return Call(call, (), lambda _: y)
