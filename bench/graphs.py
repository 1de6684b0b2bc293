"""The same rotation as ONNX graphs under onnxruntime: two operators and primitive ops, through `run` and IO binding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.bench.binding import Array, Binding, Pair
from rope_cpu.bench.problem import DTYPES, Problem

TITLES = {"onnx": "ORT RotaryEmbedding-23", "ort": "ORT com.microsoft", "primitive": "ORT primitive ops"}
WAYS = ("run", "IO-bound")

_OPERATOR = {
    "onnx": "{x}_rot = RotaryEmbedding <interleaved = {interleaved}> ({x}, cos, sin, ids)",
    "ort": "{x}_rot = com.microsoft.RotaryEmbedding <interleaved = {interleaved}> ({x}, ids, cos, sin)",
}

_PRIMITIVE_TABLES = "c = Gather (cos, ids)  s = Gather (sin, ids)  cs = Unsqueeze (c, one)  sn = Unsqueeze (s, one)"
_HALVES = """{x}_a, {x}_b = Split <axis = 3, num_outputs = 2> ({x})
    {x}_n = Neg ({x}_b)
    {x}_t = Concat <axis = 3> ({x}_n, {x}_a)"""
_ADJACENT = """{x}_p = Reshape ({x}, split)
    {x}_a, {x}_b = Split <axis = 4, num_outputs = 2> ({x}_p)
    {x}_n = Neg ({x}_b)
    {x}_j = Concat <axis = 4> ({x}_n, {x}_a)
    {x}_t = Reshape ({x}_j, joined)"""
_PRODUCTS = """{x}_c = Mul ({x}, cs)
    {x}_s = Mul ({x}_t, sn)
    {x}_rot = Add ({x}_c, {x}_s)"""


def binder(form: str, way: str) -> Callable[[Problem], Binding]:
    """Return the function that binds a problem to this graph and this way of running it."""

    def bind(problem: Problem) -> Binding:
        session = _session(problem, form)
        pairs = [(problem.bshd(q), problem.bshd(k)) for q, k in problem.arrays()]
        ids = np.broadcast_to(problem.ids, (problem.batch, problem.tokens)).astype(np.int64)
        feeds = [{"q": _bhsd(q), "k": _bhsd(k), "ids": ids} for q, k in pairs]
        return (_run if way == "run" else _bound)(session, feeds, pairs[0])

    return bind


def _run(session: Any, feeds: list[dict[str, Array]], inputs: Pair) -> Binding:
    return Binding(session.run, [(None, feed) for feed in feeds], inputs, lambda x: x, _pair)


def _bound(session: Any, feeds: list[dict[str, Array]], inputs: Pair) -> Binding:
    """Bind inputs and outputs where they are, to stay there from call to call."""
    import onnxruntime

    sets: list[tuple[Any, ...]] = []
    first: list[Any] = []
    for feed in feeds:
        binding = session.io_binding()
        for name, x in feed.items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(x))
        outs = [onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(feed[name])) for name in ("q", "k")]
        for name, out in zip(("q_rot", "k_rot"), outs, strict=True):
            binding.bind_ortvalue_output(name, out)
        sets.append((binding,))
        first = first or outs
    return Binding(
        session.run_with_iobinding, sets, inputs, lambda x: x, lambda _: _pair([out.numpy() for out in first])
    )


def _bhsd(x: Array) -> Array:
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def _pair(outputs: list[Array]) -> Pair:
    q, k = (x.transpose(0, 2, 1, 3) for x in outputs)
    return q, k


def _session(problem: Problem, form: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = rope_cpu.get_num_threads()
    model = _model(problem, form)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _model(problem: Problem, form: str) -> Any:
    """Return the graph (q, k, ids) → (q_rot, k_rot) with tables of cos and sin for all positions as initializers."""
    from onnx import numpy_helper, parser

    rope, dtype = problem.rope, DTYPES[problem.dtype]
    kind = {"float32": "float", "float16": "float16"}[problem.dtype]
    if form == "primitive":
        turned = _ADJACENT if rope.interleaved else _HALVES
        lines = [_PRIMITIVE_TABLES, *(part.format(x=x) for x in "qk" for part in (turned, _PRODUCTS))]
    else:
        lines = [_OPERATOR[form].format(x=x, interleaved=int(rope.interleaved)) for x in "qk"]
    q, k, ids = (f"[B, {problem.heads}, S, {rope.head_dim}]", f"[B, {problem.kv_heads}, S, {rope.head_dim}]", "[B, S]")
    body = "\n    ".join(lines)
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"rotary ({kind}{q} q, {kind}{k} k, int64{ids} ids) => ({kind}{q} q_rot, {kind}{k} k_rot) {{\n    {body}\n}}"
    )
    cos, sin = (table.astype(dtype) for table in rope.cos_sin(np.arange(int(problem.ids.max()) + 1)))
    constants: dict[str, Any] = {"cos": cos, "sin": sin}
    if form == "primitive":
        width = [np.repeat(t, 2, -1) if rope.interleaved else np.concatenate([t, t], -1) for t in (cos, sin)]
        constants = {"cos": width[0], "sin": width[1], "one": np.array([1])}
        if rope.interleaved:
            constants |= {"split": np.array([0, 0, 0, -1, 2]), "joined": np.array([0, 0, 0, rope.head_dim])}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return model
