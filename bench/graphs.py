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
    "onnx": "{x}_rot = RotaryEmbedding <interleaved = {interleaved}, num_heads = {heads}> ({x}, cos, sin, ids)",
    "ort": "{x}_rot = com.microsoft.RotaryEmbedding <interleaved = {interleaved}, num_heads = {heads}> "
    "({x}, ids, cos, sin)",
}
_PACKED = "q, k, v = Split <axis = 2> (qkv, widths)"

_PRIMITIVE_TABLES = "c = Gather (cos, ids)  s = Gather (sin, ids)  cs = Unsqueeze (c, two)  sn = Unsqueeze (s, two)"
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


def binder(form: str, way: str) -> Callable[[Problem], Binding]:
    """Return the function that binds a problem to this graph and this way of running it.

    Graphs take (batch, seq, width), which no array must be transposed for: q and k, or the packed buffer as a whole, as
    they copy strided views of it faster than `run` does.
    """

    def bind(problem: Problem) -> Binding:
        def flat(x: Array) -> Array:
            return np.ascontiguousarray(x).reshape(problem.batch, problem.tokens, -1)

        if problem.storage == "packed":
            buffers = problem.buffers()
            pairs, feeds = [problem.views(qkv) for qkv in buffers], [{"qkv": flat(qkv)} for qkv in buffers]
        else:
            pairs = problem.arrays()
            feeds = [{"q": flat(problem.bshd(q)), "k": flat(problem.bshd(k))} for q, k in pairs]
        ids = np.broadcast_to(problem.ids, (problem.batch, problem.tokens)).astype(np.int64)
        inputs = problem.bshd(pairs[0][0]), problem.bshd(pairs[0][1])
        given = [{**feed, "ids": ids} for feed in feeds]
        return (_run if way == "run" else _bound)(_session(problem, form), given, inputs)

    return bind


def _run(session: Any, feeds: list[dict[str, Array]], inputs: Pair) -> Binding:
    return Binding(session.run, [(None, feed) for feed in feeds], inputs, results=lambda y: _pair(y, inputs))


def _bound(session: Any, feeds: list[dict[str, Array]], inputs: Pair) -> Binding:
    """Bind inputs and outputs where they are, to stay there from call to call."""
    import onnxruntime

    def value(x: Array) -> Any:
        return onnxruntime.OrtValue.ortvalue_from_numpy(x)

    sets: list[tuple[Any, ...]] = []
    held: list[tuple[dict[str, Any], list[Any]]] = []  # onnxruntime 1.29 keeps nothing that is bound to it
    for feed in feeds:
        binding, given = session.io_binding(), {name: value(x) for name, x in feed.items()}
        for name, x in given.items():
            binding.bind_ortvalue_input(name, x)
        outs = [value(np.empty((*x.shape[:2], x.shape[2] * x.shape[3]), x.dtype)) for x in inputs]
        for name, out in zip(("q_rot", "k_rot"), outs, strict=True):
            binding.bind_ortvalue_output(name, out)
        sets.append((binding,))
        held.append((given, outs))

    def results(_: Any) -> Pair:
        return _pair([out.numpy() for out in held[0][1]], inputs)

    return Binding(session.run_with_iobinding, sets, inputs, results=results)


def _pair(outputs: list[Array], like: Pair) -> Pair:
    q, k = (y.reshape(x.shape) for x, y in zip(like, outputs, strict=True))
    return q, k


def _session(problem: Problem, form: str) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = rope_cpu.get_num_threads()
    model = _model(problem, form)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _model(problem: Problem, form: str) -> Any:
    """Return the graph (qkv or q, k; ids) → (q_rot, k_rot), tables of cos and sin for all positions as initializers."""
    from onnx import numpy_helper, parser

    rope, dtype, heads = problem.rope, DTYPES[problem.dtype], {"q": problem.heads, "k": problem.kv_heads}
    kind = {"float32": "float", "float16": "float16"}[problem.dtype]
    packed, width = problem.storage == "packed", rope.head_dim
    lines = [_PACKED] if packed else []
    if form == "primitive":
        turned = _ADJACENT if rope.interleaved else _HALVES
        lines += [_PRIMITIVE_TABLES, *(part.format(x=x) for x in "qk" for part in (turned, _PRODUCTS))]
    else:
        lines += [_OPERATOR[form].format(x=x, interleaved=int(rope.interleaved), heads=heads[x]) for x in "qk"]
    types = {x: f"{kind}[B, S, {heads[x] * width}]" for x in "qk"}
    whole = f"{kind}[B, S, {(problem.heads + 2 * problem.kv_heads) * width}] qkv"
    given, body = whole if packed else f"{types['q']} q, {types['k']} k", "\n    ".join(lines)
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>\n'
        f"rotary ({given}, int64[B, S] ids) => ({types['q']} q_rot, {types['k']} k_rot) {{\n    {body}\n}}"
    )
    cos, sin = (table.astype(dtype) for table in rope.cos_sin(np.arange(int(problem.ids.max()) + 1)))
    constants: dict[str, Any] = {"cos": cos, "sin": sin}
    if packed:
        constants["widths"] = np.array([problem.heads, problem.kv_heads, problem.kv_heads]) * width
    if form == "primitive":
        wide = [np.repeat(t, 2, -1) if rope.interleaved else np.concatenate([t, t], -1) for t in (cos, sin)]
        constants |= {"cos": wide[0], "sin": wide[1], "two": np.array([2]), "wide": np.array([0, 0, -1])}
        constants |= {f"{x}_heads": np.array([0, 0, heads[x], width]) for x in "qk"}
        if rope.interleaved:
            constants["split"] = np.array([0, 0, 0, -1, 2])
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    return model
