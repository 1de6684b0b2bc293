"""ONNX graphs under onnxruntime: two operators and primitive ops, by `run` and by IO binding.

The graphs take arrays (batch, seq, width), so that nothing is transposed: q and k, or the packed
QKV buffer, which they split faster than `run` would copy its views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import DTYPES, Array

from ..measurement.timing import Call
from ..workload import Pair, Workload, repeated_for_pairs
from .rotation_call import require, rotation_call

if TYPE_CHECKING:
    import onnx

# Modules that the implementations import.
MODULES = ("onnx", "onnxruntime")

# Target → the name of its implementation.
TITLES = {
    "onnx": "ORT RotaryEmbedding-23",
    "ort": "ORT com.microsoft",
    "primitive": "ORT primitive ops",
}

_OPSET = 23
_IR_VERSION = 10
_MICROSOFT = "com.microsoft"


def implementations() -> dict[str, Callable[[Workload], Call]]:
    """Return the implementations by name: each target by `run`, then with IO binding."""
    named = {}
    for target, title in TITLES.items():
        named[f"{title} run"] = run_call(target)
        named[f"{title} IO-bound"] = bound_call(target)
    return named


def run_call(target: str) -> Callable[[Workload], Call]:
    """Return the implementation that calls `run`, which copies inputs and allocates outputs."""

    def prepare(workload: Workload) -> Call:
        feeds, inputs, session = _session(workload, target)

        def results(returned: Any) -> Pair:
            return _shaped(returned, inputs)

        argument_sets = [(None, feed) for feed in feeds]
        return rotation_call(
            workload, session.run, argument_sets, inputs, arithmetic="own", results=results
        )

    return prepare


def bound_call(target: str) -> Callable[[Workload], Call]:
    """Return the implementation with inputs and outputs bound once (IO binding)."""

    def prepare(workload: Workload) -> Call:
        from rope_cpu.export import bind

        feeds, inputs, session = _session(workload, target)
        q, k = inputs
        outputs = [
            {"q_rot": np.empty_like(_flat(q)), "k_rot": np.empty_like(_flat(k))} for _ in feeds
        ]
        calls = [bind(session, feed, out) for feed, out in zip(feeds, outputs, strict=True)]

        def results(_: Any) -> Pair:
            return _shaped(list(outputs[0].values()), inputs)

        argument_sets = [(call,) for call in calls]
        return rotation_call(
            workload, operator.call, argument_sets, inputs, arithmetic="own", results=results
        )

    return prepare


def _session(workload: Workload, target: str) -> tuple[list[dict[str, Array]], Pair, Any]:
    """Return the inputs of each call, q and k of the first one, and the session of the graph."""
    require(workload, modules=MODULES, dtypes=("float32", "float16"), one_axis=True)
    from rope_cpu.export.validation.session import open_session

    ids = np.broadcast_to(workload.ids, workload.shape).astype(np.int64)
    if workload.packed:
        buffers = workload.buffers()
        q, k = workload.views(buffers[0])
        inputs = (workload.bshd(q), workload.bshd(k))
        feeds = [{"qkv": _flat(qkv), "ids": ids} for qkv in buffers]
    else:
        pairs = workload.bshd_arrays()
        inputs = pairs[0]
        feeds = [{"q": _flat(q), "k": _flat(k), "ids": ids} for q, k in pairs]
    session = open_session(graph_model(workload, target), rope_cpu.get_num_threads())
    return feeds, inputs, session


def _flat(x: Array) -> Array:
    """Return (batch, seq, heads, head_dim) as contiguous (batch, seq, width)."""
    batch, tokens, _, _ = x.shape
    return np.ascontiguousarray(x).reshape(batch, tokens, -1)


def _shaped(outputs: list[Array], inputs: Pair) -> Pair:
    """Return flat outputs in the shapes of the inputs."""
    q, k = (output.reshape(x.shape) for x, output in zip(inputs, outputs, strict=True))
    return q, k


def graph_model(workload: Workload, target: str) -> onnx.ModelProto:
    """Return the graph (qkv or q, k; ids) → (q_rot, k_rot).

    The initializers hold cos and sin of all positions, from 0 to the largest one.
    """
    from onnx import TensorProto, helper, numpy_helper

    heads = {"q": workload.heads, "k": workload.kv_heads}
    element_type = helper.np_dtype_to_tensor_dtype(DTYPES[workload.dtype])

    def value(name: str, width: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, element_type, ["B", "S", width])

    head_dim = workload.rope.head_dim
    constants = _tables(workload)
    nodes = []
    if workload.packed:
        counts = np.array([workload.heads, workload.kv_heads, workload.kv_heads])
        constants["widths"] = counts * head_dim
        nodes.append(helper.make_node("Split", ["qkv", "widths"], ["q", "k", "v"], axis=2))
        inputs = [value("qkv", int(counts.sum()) * head_dim)]
    else:
        inputs = [value(x, count * head_dim) for x, count in heads.items()]
    inputs.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["B", "S"]))
    if target == "primitive":
        nodes += _primitive_nodes(workload.rope.interleaved)
        constants |= _primitive_constants(workload, heads)
    else:
        nodes += [_operator_node(target, x, count, workload) for x, count in heads.items()]
    graph = helper.make_graph(
        nodes,
        "rope",
        inputs,
        outputs=[value(f"{x}_rot", count * head_dim) for x, count in heads.items()],
        initializer=[numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)


def _tables(workload: Workload) -> dict[str, Array]:
    dtype = DTYPES[workload.dtype]
    cos, sin = workload.rope.cos_sin(np.arange(int(workload.ids.max()) + 1))
    return {"cos": cos.astype(dtype), "sin": sin.astype(dtype)}


def _operator_node(target: str, x: str, heads: int, workload: Workload) -> onnx.NodeProto:
    """Return the RotaryEmbedding of ONNX or of onnxruntime, which differ in the order of inputs."""
    from onnx import helper

    inputs = [x, "ids", "cos", "sin"] if target == "ort" else [x, "cos", "sin", "ids"]
    return helper.make_node(
        "RotaryEmbedding",
        inputs,
        [f"{x}_rot"],
        domain=_MICROSOFT if target == "ort" else "",
        interleaved=int(workload.rope.interleaved),
        num_heads=heads,
    )


def _primitive_nodes(interleaved: bool) -> list[onnx.NodeProto]:
    """Return x·cos + rotate_half(x)·sin for q and k; {x}_t is rotate_half(x)."""
    from onnx import helper

    node = helper.make_node
    nodes = [
        node("Gather", ["cos", "ids"], ["cos_rows"]),
        node("Gather", ["sin", "ids"], ["sin_rows"]),
        node("Unsqueeze", ["cos_rows", "head_axis"], ["cos_of_tokens"]),
        node("Unsqueeze", ["sin_rows", "head_axis"], ["sin_of_tokens"]),
    ]
    for x in "qk":
        nodes.append(node("Reshape", [x, f"{x}_heads"], [f"{x}_h"]))
        if interleaved:
            nodes += [
                node("Reshape", [f"{x}_h", "pairs"], [f"{x}_p"]),
                node("Split", [f"{x}_p"], [f"{x}_a", f"{x}_b"], axis=4, num_outputs=2),
                node("Neg", [f"{x}_b"], [f"{x}_n"]),
                node("Concat", [f"{x}_n", f"{x}_a"], [f"{x}_j"], axis=4),
                node("Reshape", [f"{x}_j", f"{x}_heads"], [f"{x}_t"]),
            ]
        else:
            nodes += [
                node("Split", [f"{x}_h"], [f"{x}_a", f"{x}_b"], axis=3, num_outputs=2),
                node("Neg", [f"{x}_b"], [f"{x}_n"]),
                node("Concat", [f"{x}_n", f"{x}_a"], [f"{x}_t"], axis=3),
            ]
        nodes += [
            node("Mul", [f"{x}_h", "cos_of_tokens"], [f"{x}_c"]),
            node("Mul", [f"{x}_t", "sin_of_tokens"], [f"{x}_s"]),
            node("Add", [f"{x}_c", f"{x}_s"], [f"{x}_sum"]),
            node("Reshape", [f"{x}_sum", "flat"], [f"{x}_rot"]),
        ]
    return nodes


def _primitive_constants(workload: Workload, heads: Mapping[str, int]) -> dict[str, Array]:
    """Return the initializers of `_primitive_nodes`; the tables have head_dim width."""
    interleaved = workload.rope.interleaved
    constants = {
        name: repeated_for_pairs(table, interleaved) for name, table in _tables(workload).items()
    }
    constants["head_axis"] = np.array([2])
    constants["flat"] = np.array([0, 0, -1])
    for x, count in heads.items():
        constants[f"{x}_heads"] = np.array([0, 0, count, workload.rope.head_dim])
    if interleaved:
        constants["pairs"] = np.array([0, 0, 0, -1, 2])
    return constants
