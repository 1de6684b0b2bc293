"""Attention over the cache of a server: by rope_cpu, NumPy and onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

import rope_cpu
from rope_cpu import Batch, KVCache, RotaryEmbedding
from rope_cpu.accuracy.attention import attention as reference
from rope_cpu.accuracy.attention import exactly
from rope_cpu.array_types import CACHE_KINDS, DTYPES, GROUP, Array, CacheKind

from .peers import onnx_session
from .rotations import UnavailableError, require_modules
from .serving import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    cached_pair_bytes,
    empty_cache,
    from_4_bits,
    transformed,
)
from .timing import Call
from .workloads import evenly

# Exported attention rotates. Frequencies of 0 do not change queries and keys, and take as long.
_NO_ROTATION = RotaryEmbedding.from_inv_freq(np.zeros(HEAD_DIM // 2))

# Scale of the vectors of int8 caches. onnxruntime has one for the whole cache, so all have this.
INT8_SCALE = 1 / 32
_INT4_SCALE = 1 / 2

_CHECKED_TOKENS = 3


@dataclass(frozen=True)
class Attended:
    """Sequences of the same length, and their last tokens, whose queries are given.

    new: of the tokens of each sequence. length: tokens of each sequence, new ones included.
    cache_dtype: a key of `CACHE_KINDS`; queries are float32.
    """

    sequences: int
    new: int
    length: int
    cache_dtype: str = "float32"
    copies = 1

    @property
    def kind(self) -> CacheKind:
        """The kind of the cache."""
        return CACHE_KINDS[self.cache_dtype]

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
        """Return what a cache holds, heads first: (sequences, kv_heads, length, head_dim) each."""
        random = np.random.default_rng(2)
        shape = (self.sequences, KV_HEADS, self.length, HEAD_DIM)
        dtypes = (self.kind.key, self.kind.value)
        key, value = (_stored(random.standard_normal(shape, np.float32), name) for name in dtypes)
        return key, value

    def cache(self) -> KVCache:
        """Return the cache."""
        key, value = (x.swapaxes(1, 2) for x in self.keys_and_values())
        cache = empty_cache(key.shape, self.kind)
        cache.key[...] = key
        cache.value[...] = value
        if cache.key_scale is not None and cache.value_scale is not None:
            cache.key_scale[...] = INT8_SCALE
            cache.value_scale[...] = INT8_SCALE if self.kind.value == "int8" else _INT4_SCALE
        return cache

    @property
    def bytes_accessed(self) -> int:
        """Bytes of the keys and values, each read once."""
        return self.sequences * self.length * KV_HEADS * cached_pair_bytes(self.kind)

    def error(self, result: Array) -> float:
        """Return the largest error / tolerance of vectors of all tokens: above 1 is wrong."""
        key, value = (_read(x) for x in self.keys_and_values())
        queries = self.queries()
        results = result.reshape(queries.shape)
        if self.kind.hadamard:
            queries = transformed(queries)
        ratios = []
        for token in evenly(len(queries), _CHECKED_TOKENS):
            sequence = token // self.new
            last = self.length - self.new + token % self.new
            k, v = (exactly(x[sequence, None, :, : last + 1]) for x in (key, value))
            q = exactly(queries[None, token, :, None])
            exact = reference(q, k, v, scale=HEAD_DIM**-0.5, mask=np.zeros(1)).result
            ratios.append(exact.compare(results[None, token, :, None])[1])
        return max(ratios)


def _stored(x: Array, dtype: str) -> Array:
    """Return keys or values as a cache holds them."""
    if dtype == "int4":
        numbers = np.clip(np.rint(x / _INT4_SCALE) + 8, 0, 15).astype(np.uint8)
        groups = numbers.reshape(*x.shape[:-1], -1, 2, GROUP // 2)
        packed: Array = groups[..., 0, :] | groups[..., 1, :] << 4
        return packed.reshape(*x.shape[:-1], -1)
    if dtype == "int8":
        return np.clip(np.rint(x / np.float32(INT8_SCALE)), -127, 127).astype(np.int8)
    return x.astype(DTYPES[dtype], copy=False)


def _read(x: Array) -> Array:
    """Return stored keys or values as float32."""
    if x.dtype == np.uint8:
        scale = np.full((*x.shape[:-1], HEAD_DIM // GROUP), _INT4_SCALE)
        return from_4_bits(x, scale).astype(np.float32)
    read: Array = x.astype(np.float32)
    return read * np.float32(INT8_SCALE) if x.dtype == np.int8 else read


def attention(step: Attended) -> Call:
    """Attend by one call of `rope_cpu.attention`."""
    q = step.queries()
    cache = step.cache()
    batch = step.batch
    out = np.empty_like(q)

    def run(q: Array) -> Array:
        return rope_cpu.attention(q, cache, batch, out=out)

    return Call(run, [(q,)], step.bytes_accessed, step.error)


def numpy_attention(step: Attended) -> Call:
    """Attend by matrix products of NumPy, sequence by sequence; other dtypes are cast first."""
    if step.kind.hadamard:
        raise UnavailableError(f"{step.cache_dtype} is not read in NumPy")
    key, value = step.keys_and_values()
    scale = np.float32(HEAD_DIM**-0.5)
    position = np.arange(step.length)
    hidden = position > position[-step.new :, None]  # of the keys, from each new token

    def run(q: Array) -> Array:
        by_sequence = q.reshape(step.sequences, step.new, KV_HEADS, -1, HEAD_DIM)
        results = [attend(*arguments) for arguments in zip(by_sequence, key, value, strict=True)]
        return np.concatenate(results)

    def attend(q: Array, key: Array, value: Array) -> Array:
        rows = q.transpose(1, 2, 0, 3).reshape(KV_HEADS, -1, HEAD_DIM) * scale
        scores = rows @ _read(key).swapaxes(-1, -2)
        by_token = scores.reshape(KV_HEADS, -1, step.new, step.length)
        if step.new > 1:
            by_token[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=-1, keepdims=True)
        y = (weights @ _read(value)) / total
        by_head = y.reshape(HEADS, step.new, HEAD_DIM)
        return np.ascontiguousarray(by_head.swapaxes(0, 1))

    return Call(run, [(step.queries(),)], step.bytes_accessed, step.error)


def onnx_attention(step: Attended) -> Call:
    """Attend by an export to GroupQueryAttention, with a shared cache and bound arrays.

    It also rotates, and writes the keys and values of the new tokens to the cache.
    """
    if step.cache_dtype not in ("float32", "int8"):
        raise UnavailableError(f"GroupQueryAttention has no {step.cache_dtype} on the CPU")
    require_modules("onnx", "onnxruntime")
    from rope_cpu import export

    is_int8 = step.cache_dtype == "int8"
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
        "k": _read(key[:, :, -step.new :].swapaxes(1, 2)).copy(),
        "v": _read(value[:, :, -step.new :].swapaxes(1, 2)).copy(),
        "past_key": key,
        "past_value": value,
        "past_lengths": np.full(step.sequences, step.length - step.new),
    }
    if is_int8:
        for name in ("k_scale", "v_scale"):
            feeds[name] = np.full((1, KV_HEADS, 1, HEAD_DIM), INT8_SCALE, np.float32)
    y = np.empty_like(feeds["q"])
    call = export.bind(onnx_session(model), feeds, {"attention": y})
    return Call(call, [()], step.bytes_accessed, lambda _: step.error(y))
