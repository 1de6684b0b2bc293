"""Target "primitive": elementary ops, the rotation inside one model-local function."""

from __future__ import annotations

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding

from .. import cos_sin_nodes as angle_ops
from .. import masks
from ..graph import DOMAIN, FLOAT32, FLOAT64, HALF, Graph
from .base import Attention, Rotator, Target, block_names, pairing, parts_of

FUNCTION = "RotaryEmbedding"


class PrimitiveRotator(Rotator):
    """Calls rope_cpu.RotaryEmbedding(x, cos, sin), with cos and sin that broadcast against the pairs of x."""

    def __post_init__(self) -> None:
        """Line cos and sin up with the axes of the tensors."""
        found = angle_ops.of_tokens(self.graph, self.angles)
        self._tables = [self._lined_up(value, f"{name}_by_head") for value, name in found.both()]

    def _lined_up(self, value: str, name: str) -> str:
        order = self.order()
        if self.angles.heads > 1:
            return self.graph.transpose(value, "bshd", order, f"{name}/in_order")
        value = self.graph.transpose(value, "bsd", order.replace("h", ""), f"{name}/in_order")
        return self.graph.node("Unsqueeze", [value, self.graph.ints(order.index("h"))], name)

    def rotate_ordered(self, x: str, heads: int | None) -> str:
        """Call the function; with frequencies by head, head h of the tensor takes those of head h // n."""
        tables = self._tables
        if self.angles.heads > 1:
            axis = self.order().index("h")
            index = np.arange(heads or 0) // ((heads or 0) // self.angles.heads)
            of_heads = self.graph.initializer(f"frequencies_of_{heads}_heads", index)
            named = zip(tables, ("cos", "sin"), strict=True)
            tables = [self.graph.node("Gather", [t, of_heads], n, axis=axis) for t, n in named]
        return self.graph.node(FUNCTION, [x, *tables], "rotate", domain=DOMAIN)

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        """Return the rotation as a function."""
        return [rotation_function(self.rope, opset)]


def rotation_function(rope: RotaryEmbedding, opset: int) -> onnx.FunctionProto:
    """Return rope_cpu.RotaryEmbedding(x, cos, sin) → y for the pairing of `rope`: four axes, any float type."""
    body, names = Graph(), block_names(rope)
    parts, widths = parts_of(rope)
    pairs = [width // 2 for width in rope.blocks]
    pieces = (
        body.several("Split", ["x", body.ints(*widths)], "x", parts, axis=-1)
        if len(parts) > 1
        else ["x"]
    )
    cos, sin = (
        body.several("Split", [table, body.ints(*pairs)], table, names, axis=-1)
        if len(names) > 1
        else [table]
        for table in ("cos", "sin")
    )
    rotate = _interleaved if rope.interleaved else _half_split
    rotated = []
    for index, name in enumerate(names):
        with body.scope(name):
            rotated.append(rotate(body, pieces[index], cos[index], sin[index], pairs[index]))
    joined = rotated[0]
    if len(parts) > 1:
        joined = body.node("Concat", [*rotated, *pieces[len(names) :]], "joined", axis=-1)
    # Ids of another batch size would broadcast x; reshaped to the shape of x, they fail instead.
    body.node("Reshape", [joined, body.node("Shape", ["x"], "shape_of_x")], "y")
    return body.function(
        FUNCTION,
        ["x", "cos", "sin"],
        ["y"],
        opset,
        "Each pair (a, b) of the last axis becomes (a·cos - b·sin, b·cos + a·sin); other elements are copied. "
        f"Pairs: {pairing(rope)}.",
    )


def _half_split(body: Graph, x: str, cos: str, sin: str, pairs: int) -> str:
    a, b = body.several("Split", [x, body.ints(pairs, pairs)], "halves", ["a", "b"], axis=-1)
    return body.node("Concat", _rotate_pairs(body, a, b, cos, sin), "rotated", axis=-1)


def _interleaved(body: Graph, x: str, cos: str, sin: str, pairs: int) -> str:
    last, end, step = body.ints(-1), body.ints(2 * pairs), body.ints(2)
    a, b = (
        body.node("Slice", [x, body.ints(k), end, last, step], name)
        for k, name in enumerate(("a", "b"))
    )
    rotated = zip(_rotate_pairs(body, a, b, cos, sin), ("a_column", "b_column"), strict=True)
    columns = [body.node("Unsqueeze", [value, last], name) for value, name in rotated]
    both = body.node("Concat", columns, "by_pair", axis=-1)
    return body.node("Reshape", [both, body.ints(0, 0, 0, 2 * pairs)], "rotated")


def _rotate_pairs(body: Graph, a: str, b: str, cos: str, sin: str) -> list[str]:
    a_cos, b_sin = body.node("Mul", [a, cos], "a_cos"), body.node("Mul", [b, sin], "b_sin")
    b_cos, a_sin = body.node("Mul", [b, cos], "b_cos"), body.node("Mul", [a, sin], "a_sin")
    return [
        body.node("Sub", [a_cos, b_sin], "a_rotated"),
        body.node("Add", [b_cos, a_sin], "b_rotated"),
    ]


def attend(a: Attention, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write MatMul, Softmax, MatMul; a group of query heads shares its keys by broadcasting.

    Axes, a letter each: batch, key head, group (of query heads), sequence, total length, width.
    """
    graph, settings = a.graph, a.settings
    kv_heads, softcap = settings.num_kv_heads, settings.softcap
    group = settings.num_heads // kv_heads
    keys, values = _with_past(a, k, 0, "key"), _with_past(a, v, 1, "value")
    # A vector, not a scalar: onnxruntime folds scalar factors of MatMul into a float32 attribute, in float64 too.
    factor = np.full(a.head_dim, settings.scale / (softcap or 1.0), a.compute_dtype)
    q = graph.node("Mul", [q, graph.initializer("score_scale", factor)], "q_scaled")
    q = graph.node("Reshape", [q, graph.ints(0, 0, kv_heads, group, a.head_dim)], "q_by_group")
    q = graph.transpose(q, "bskgw", "bkgsw", "q_by_group/order")
    columns = graph.transpose(keys, "bktw", "bkwt", "keys_by_column")
    columns = graph.node("Unsqueeze", [columns, graph.ints(2)], "keys_of_group")
    grouped = graph.node("Unsqueeze", [values, graph.ints(2)], "values_of_group")
    scores = graph.node("MatMul", [q, columns], "scores")
    if softcap is not None:
        small = graph.node("Tanh", [scores], "scores/tanh")
        scores = graph.node("Mul", [small, graph.scalar(softcap, a.compute_dtype)], "scores/capped")
    result = graph.node("MatMul", [_weights(a, scores), grouped], "weighted_values")
    result = graph.transpose(result, "bkgsw", "bskgw", "weighted_values/order")
    merged = graph.ints(0, 0, settings.num_heads, settings.v_head_dim)
    return graph.node("Reshape", [result, merged], "attention_by_head"), keys, values


def _weights(a: Attention, scores: str) -> str:
    """Return the softmax of the scores (batch, kv_heads, group, seq, total); rows without any key become zero."""
    graph, dtype, settings = a.graph, a.compute_dtype, a.settings
    if a.bias is not None:
        scores = graph.node("Add", [scores, _grouped(a, a.bias)], "scores/with_mask")
    near = masks.by_distance(graph, a.lengths, settings.window) if settings.causal else None
    allowed = masks.allowed(graph, a.lengths, settings.mask, near)
    lowest = graph.scalar(float(np.finfo(dtype).min), dtype)
    if allowed is not None:
        allowed = _grouped(a, allowed) if settings.mask in ("padding", "bool") else allowed
        scores = graph.node("Where", [allowed, scores, lowest], "scores/allowed")
    if a.bias is not None:
        scores = graph.node("Max", [scores, lowest], "scores/finite")
    weights = graph.node("Softmax", [scores], "weights", axis=-1)
    if settings.mask == "none":
        return weights
    some = graph.node("Greater", [scores, lowest], "scores/is_any")
    return graph.node("Where", [some, weights, graph.scalar(0.0, dtype)], "weights/of_allowed")


def _grouped(a: Attention, mask: str) -> str:
    """Return a mask (batch or 1, heads or 1, seq, total) as (…, kv_heads, group, seq, total)."""
    graph, settings = a.graph, a.settings
    every = graph.node(
        "Expand", [mask, graph.ints(1, settings.num_heads, 1, 1)], f"{mask}/of_heads"
    )
    last = graph.transpose(every, "bhst", "bsth", f"{mask}/heads_last")
    groups = settings.num_kv_heads, settings.num_heads // settings.num_kv_heads
    split = graph.node("Reshape", [last, graph.ints(0, 0, 0, *groups)], f"{mask}/groups_last")
    return graph.transpose(split, "bstkg", "bkgst", f"{mask}/by_group")


def _with_past(a: Attention, new: str, which: int, name: str) -> str:
    new = a.graph.transpose(new, "bshd", "bhsd", f"{name}_by_head")
    if a.past is None:
        return new
    return a.graph.node("Concat", [a.past[which], new], f"{name}_with_past", axis=2)


PRIMITIVE = Target(
    name="primitive",
    op="ops of opset 13",
    opsets=(13, 24),
    dtypes=(FLOAT32, FLOAT64, *HALF),
    rotator=PrimitiveRotator,
    attend=attend,
    per_head=True,
)
