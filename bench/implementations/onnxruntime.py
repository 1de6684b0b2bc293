"""The same rotation as ONNX graphs under onnxruntime: two operators and primitive ops, by `run` and by IO binding."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import Array

from ..workload import DTYPES, Pair, Workload, widened
from .base import Binding

TITLES = {
    "onnx": "ORT RotaryEmbedding-23",
    "ort": "ORT com.microsoft",
    "primitive": "ORT primitive ops",
}
WAYS = ("run", "IO-bound")

_OPERATOR = {
    "onnx": "{x}_rot = RotaryEmbedding <interleaved = {interleaved}, num_heads = {heads}> ({x}, cos, sin, ids)",
    "ort": "{x}_rot = com.microsoft.RotaryEmbedding <interleaved = {interleaved}, num_heads = {heads}> "
    "({x}, ids, cos, sin)",
}
_PACKED = "q, k, v = Split <axis = 2> (qkv, widths)"

_PRIMITIVE_TABLES = (
    "c = Gather (cos, ids)  s = Gather (sin, ids)  cs = Unsqueeze (c, two)  sn = Unsqueeze (s, two)"
)
_HALVES = """{x}_h = Reshape ({x}, {x}_heads)
    {x}_a, {x}_b = Split <axis = 3, num_outputs = 2> ({x}_h)
    {x}_n = Neg ({x}_b)
    {x}_t = Concat <axis = 3> ({x}_n, {x}_a)"""
_ADJACENT = """{x}_h = Reshape ({x}, {x}_heads)
    {x}_p = Reshape ({x}_h, split)
    {x}_a, {x}_b = Split <axis = 4, num_outputs = 2> ({x}_p)
    {x}_n = Neg ({x}_b)
    {x}_j = Concat <axis = 4> ({x}_n, {x}_a)
    {x}_t = Reshape ({x}_j, {x}_heads)"""
_PRODUCTS = """{x}_c = Mul ({x}_h, cs)
    {x}_s = Mul ({x}_t, sn)
    {x}_4 = Add ({x}_c, {x}_s)
    {x}_rot = Reshape ({x}_4, wide)"""


def binder(target: str, way: str) -> Callable[[Workload], Binding]:
    """Return the function that binds a workload to the graph of a target, to be run in one of WAYS.

    Graphs take arrays of (batch, seq, width), so that nothing is transposed: q and k, or the whole packed buffer, whose
    views they copy faster than `run` would.
    """

    def bind(workload: Workload) -> Binding:
        from rope_cpu.export.validation.session import bind as bind_arrays
        from rope_cpu.export.validation.session import open_session

        def flat(x: Array) -> Array:
            return np.ascontiguousarray(x).reshape(*workload.shape, -1)

        ids = np.broadcast_to(workload.ids, workload.shape).astype(np.int64)
        if workload.packed:
            buffers = workload.buffers()
            q, k = workload.views(buffers[0])
            inputs = workload.bshd(q), workload.bshd(k)
            given = [{"qkv": flat(qkv), "ids": ids} for qkv in buffers]
        else:
            pairs = workload.bshd_arrays()
            inputs = pairs[0]
            given = [{"q": flat(q), "k": flat(k), "ids": ids} for q, k in pairs]
        session = open_session(_model(workload, target), rope_cpu.get_num_threads())
        if way == "run":
            return Binding(
                session.run,
                [(None, feed) for feed in given],
                inputs,
                results=lambda y: _pair(y, inputs),
            )
        results = {"q_rot": flat(inputs[0]), "k_rot": flat(inputs[1])}
        outs = [{name: np.empty_like(x) for name, x in results.items()} for _ in given]
        sets = [(bind_arrays(session, feed, out),) for feed, out in zip(given, outs, strict=True)]
        return Binding(
            operator.call, sets, inputs, results=lambda _: _pair(list(outs[0].values()), inputs)
        )

    return bind


def _pair(outputs: list[Array], like: Pair) -> Pair:
    q, k = (y.reshape(x.shape) for x, y in zip(like, outputs, strict=True))
    return q, k


def _model(workload: Workload, target: str) -> Any:
    """Return the graph (qkv or q, k; ids) → (q_rot, k_rot), tables of cos and sin for all positions as initializers."""
    from onnx import numpy_helper, parser

    rope, dtype, heads = (
        workload.rope,
        DTYPES[workload.dtype],
        {"q": workload.heads, "k": workload.kv_heads},
    )
    element = {"float32": "float", "float16": "float16"}[workload.dtype]
    width, lines = rope.head_dim, [_PACKED] if workload.packed else []
    if target == "primitive":
        rotated = _ADJACENT if rope.interleaved else _HALVES
        lines += [
            _PRIMITIVE_TABLES,
            *(part.format(x=x) for x in "qk" for part in (rotated, _PRODUCTS)),
        ]
    else:
        lines += [
            _OPERATOR[target].format(x=x, interleaved=int(rope.interleaved), heads=heads[x])
            for x in "qk"
        ]
    types = {x: f"{element}[B, S, {heads[x] * width}]" for x in "qk"}
    whole = f"{element}[B, S, {(workload.heads + 2 * workload.kv_heads) * width}] qkv"
    given, body = (
        whole if workload.packed else f"{types['q']} q, {types['k']} k",
        "\n    ".join(lines),
    )
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"rope ({given}, int64[B, S] ids) => ({types['q']} q_rot, {types['k']} k_rot) {{\n    {body}\n}}"
    )
    cos, sin = (
        table.astype(dtype) for table in rope.cos_sin(np.arange(int(workload.ids.max()) + 1))
    )
    constants: dict[str, Any] = {"cos": cos, "sin": sin}
    if workload.packed:
        constants["widths"] = (
            np.array([workload.heads, workload.kv_heads, workload.kv_heads]) * width
        )
    if target == "primitive":
        constants |= {name: widened(constants[name], rope.interleaved) for name in ("cos", "sin")}
        constants |= {"two": np.array([2]), "wide": np.array([0, 0, -1])}
        constants |= {f"{x}_heads": np.array([0, 0, heads[x], width]) for x in "qk"}
        if rope.interleaved:
            constants["split"] = np.array([0, 0, 0, -1, 2])
    model.graph.initializer.extend(
        numpy_helper.from_array(value, name) for name, value in constants.items()
    )
    return model
