"""Attention over the cache of a server: by rope_cpu, NumPy, torch and onnxruntime."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import Array

from ..measurement.case import UnavailableError
from ..measurement.timing import Call
from .attended import INT8_SCALE, Attended
from .cache_workload import HEAD_DIM, HEADS, KV_HEADS
from .frameworks import as_array, as_tensor

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
    """Attend by onnxruntime's GroupQueryAttention, over a shared cache and bound arrays.

    It writes the keys and values of the new tokens to the cache as well.
    """
    if step.cache_dtype not in ("float32", "int8"):
        raise UnavailableError(f"GroupQueryAttention has no {step.cache_dtype} on the CPU")
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        raise UnavailableError("onnxruntime or onnx is not installed")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = rope_cpu.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        _group_query_model(step), options, providers=["CPUExecutionProvider"]
    )
    to_value = onnxruntime.OrtValue.ortvalue_from_numpy
    key, value = step.keys_and_values()
    new_vectors = [
        step.read(x[:, :, -step.new :]).transpose(0, 2, 1, 3).reshape(step.sequences, step.new, -1)
        for x in (key, value)
    ]
    shape = (step.sequences, step.new, HEADS * HEAD_DIM)
    feeds = {
        "q": step.queries().reshape(shape),
        "k": np.ascontiguousarray(new_vectors[0]),
        "v": np.ascontiguousarray(new_vectors[1]),
        "lengths": np.full(step.sequences, step.length - 1, np.int32),
        "longest": np.array(step.length, np.int32),
    }
    if step.cache_dtype == "int8":
        feeds["k_scale"] = feeds["v_scale"] = np.array([INT8_SCALE], np.float32)
    binding = session.io_binding()
    past = {"key": to_value(key), "value": to_value(value)}
    y = to_value(np.empty(shape, np.float32))
    for name, x in feeds.items():
        binding.bind_ortvalue_input(name, to_value(x))
    for name, cached in past.items():
        binding.bind_ortvalue_input(f"past_{name}", cached)
        binding.bind_ortvalue_output(f"present_{name}", cached)
    binding.bind_ortvalue_output("y", y)

    def error(returned: Any) -> float:
        return step.error(y.numpy().reshape(step.tokens, HEADS, HEAD_DIM))

    return Call(session.run_with_iobinding, [(binding,)], step.bytes_accessed, error)


def _group_query_model(step: Attended) -> bytes:
    """Return a model of one GroupQueryAttention whose past and present have the same shape."""
    from onnx import TensorProto, helper

    is_int8 = step.cache_dtype == "int8"
    floats = TensorProto.FLOAT
    cached = TensorProto.INT8 if is_int8 else floats
    new = (step.sequences, step.new)
    cache_shape = (step.sequences, KV_HEADS, step.length, HEAD_DIM)
    inputs = {
        "q": (floats, (*new, HEADS * HEAD_DIM)),
        "k": (floats, (*new, KV_HEADS * HEAD_DIM)),
        "v": (floats, (*new, KV_HEADS * HEAD_DIM)),
        "past_key": (cached, cache_shape),
        "past_value": (cached, cache_shape),
        "lengths": (TensorProto.INT32, (step.sequences,)),
        "longest": (TensorProto.INT32, ()),
    }
    names = list(inputs)
    attributes: dict[str, Any] = {}
    if is_int8:
        scales = {"k_scale": (floats, (1,)), "v_scale": (floats, (1,))}
        inputs |= scales
        names += [*[""] * 5, *scales]
        attributes = {
            "k_quant_type": "PER_TENSOR",
            "v_quant_type": "PER_TENSOR",
            "kv_cache_bit_width": 8,
        }
    outputs = {"y": inputs["q"]}
    outputs |= {f"present_{name}": (cached, cache_shape) for name in ("key", "value")}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        list(outputs),
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *value) for name, value in inputs.items()],
        [helper.make_tensor_value_info(name, *value) for name, value in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(model.SerializeToString())
