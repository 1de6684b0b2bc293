"""Attention over the cache of a server: by rope_cpu, NumPy, torch and onnxruntime."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Array

from .attended import INT8_SCALE, Attended
from .frameworks import as_array, as_tensor
from .measure import UnavailableError
from .server_workloads import HEAD_DIM, HEADS, KV_HEADS
from .timing import Call

# Exported attention rotates. Frequencies of 0 do not change queries and keys, and take as long.
_NO_ROTATION = RotaryEmbedding.from_inv_freq(np.zeros(HEAD_DIM // 2))

# Of torch's bfloat16, which rounds queries, weights and results, each to 8 bits.
_BFLOAT16_TOLERANCE = 2.0**-6


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
        scores = rows @ step.read(key).swapaxes(-1, -2)
        by_token = scores.reshape(KV_HEADS, -1, step.new, step.length)
        if step.new > 1:
            by_token[:, :, hidden] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores, out=scores)
        total = weights.sum(axis=-1, keepdims=True)
        y = (weights @ step.read(value)) / total
        by_head = y.reshape(HEADS, step.new, HEAD_DIM)
        return np.ascontiguousarray(by_head.transpose(1, 0, 2))

    return Call(run, [(step.queries(),)], step.bytes_accessed, step.error)


def torch_attention(step: Attended) -> Call:
    """Attend by torch's scaled_dot_product_attention, in the dtype of the cache."""
    if find_spec("torch") is None:
        raise UnavailableError("torch is not installed")
    if step.cache_dtype == "int8":
        raise UnavailableError("torch has no attention over int8")
    import torch

    torch.set_num_threads(rope_cpu.get_num_threads())
    torch.set_grad_enabled(False)
    by_head = step.queries().reshape(step.sequences, step.new, HEADS, HEAD_DIM)
    key, value = (as_tensor(x) for x in step.keys_and_values())
    q = as_tensor(np.ascontiguousarray(by_head.transpose(0, 2, 1, 3))).to(key.dtype)
    position = torch.arange(step.length)
    mask = None if step.new == 1 else position <= position[-step.new :, None]
    attend: Any = torch.nn.functional.scaled_dot_product_attention

    def run(q: Any) -> Any:
        return attend(q, key, value, attn_mask=mask, enable_gqa=True)

    def error(returned: Any) -> float:
        y = as_array(returned.float(), np.float32).transpose(0, 2, 1, 3)
        result = y.reshape(step.tokens, HEADS, HEAD_DIM)
        if step.cache_dtype == "float32":
            return step.error(result)
        return step.error(result, _BFLOAT16_TOLERANCE)

    return Call(run, [(q,)], step.bytes_accessed, error)


def onnx_attention(step: Attended) -> Call:
    """Attend by an export to GroupQueryAttention, with a shared cache and bound arrays.

    It also rotates, and writes the keys and values of the new tokens to the cache.
    """
    if step.cache_dtype not in ("float32", "int8"):
        raise UnavailableError(f"GroupQueryAttention has no {step.cache_dtype} on the CPU")
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        raise UnavailableError("onnxruntime or onnx is not installed")
    from rope_cpu import export
    from rope_cpu.export.validation.session import open_session

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
        "k": step.read(key[:, :, -step.new :].transpose(0, 2, 1, 3)).copy(),
        "v": step.read(value[:, :, -step.new :].transpose(0, 2, 1, 3)).copy(),
        "past_key": key,
        "past_value": value,
        "past_lengths": np.full(step.sequences, step.length - step.new),
    }
    if is_int8:
        for name in ("k_scale", "v_scale"):
            feeds[name] = np.full((1, KV_HEADS, 1, HEAD_DIM), INT8_SCALE, np.float32)
    y = np.empty_like(feeds["q"])
    session = open_session(model, rope_cpu.get_num_threads())
    call = export.bind(session, feeds, {"attention": y})

    def error(_: Any) -> float:
        return step.error(y.reshape(step.tokens, HEADS, HEAD_DIM))

    return Call(call, [()], step.bytes_accessed, error)
