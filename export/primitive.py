"""Target "primitive": elementary ops inside one model-local function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx

from rope_cpu.export import angles as angle_ops
from rope_cpu.export.graph import DOMAIN, Graph
from rope_cpu.export.layouts import LAYOUTS
from rope_cpu.export.rotate import Rotator, block_names, pairing, parts_of

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

FUNCTION = "RotaryEmbedding"


class PrimitiveRotator(Rotator):
    """Calls rope_cpu.RotaryEmbedding(x, cos, sin), with cos and sin that broadcast against the pairs of x."""

    def prepare(self) -> None:
        """Line cos and sin up with the axes of the tensors."""
        found = angle_ops.of_tokens(self.graph, self.angles)
        self._tables = [self._lined_up(found.cos, "cos_by_head"), self._lined_up(found.sin, "sin_by_head")]

    def _lined_up(self, value: str, name: str) -> str:
        order, axis = LAYOUTS[self.layout].tables
        if self.angles.heads > 1:
            order = LAYOUTS[self.layout].by_head
        if order:
            value = self.graph.node("Transpose", [value], f"{name}/in_order", perm=order)
        if self.angles.heads == 1:
            value = self.graph.node("Unsqueeze", [value, self.graph.ints(axis)], name)
        return value

    def by_head(self, x: str, heads: int | None) -> str:
        """Call the function; with frequencies by head, head h of the tensor takes those of head h // n."""
        tables = self._tables
        if self.angles.heads > 1:
            axis = LAYOUTS[self.layout].tables[1]
            index = np.arange(heads or 0) // ((heads or 0) // self.angles.heads)
            of_heads = self.graph.table(f"frequencies_of_{heads}_heads", index)
            named = zip(tables, ("cos", "sin"), strict=True)
            tables = [self.graph.node("Gather", [t, of_heads], n, axis=axis) for t, n in named]
        return self.graph.node(FUNCTION, [x, *tables], "rotate", domain=DOMAIN)

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        """Return the rotation as a function."""
        return [rotation_function(self.rope, opset)]


def rotation_function(rope: RotaryEmbedding, opset: int) -> onnx.FunctionProto:
    """Return rope_cpu.RotaryEmbedding(x, cos, sin) → y for the pairing of this rotary: four axes, any float type."""
    body, names = Graph(), block_names(rope)
    parts, widths = parts_of(rope)
    pairs = [width // 2 for width in rope.blocks]
    pieces = body.split("Split", ["x", body.ints(*widths)], "x", parts, axis=-1) if len(parts) > 1 else ["x"]
    cos, sin = (
        body.split("Split", [table, body.ints(*pairs)], table, names, axis=-1) if len(names) > 1 else [table]
        for table in ("cos", "sin")
    )
    turn = _interleaved if rope.interleaved else _half_split
    turned = []
    for index, name in enumerate(names):
        with body.scope(name):
            turned.append(turn(body, pieces[index], cos[index], sin[index], pairs[index]))
    joined = turned[0]
    if len(parts) > 1:
        joined = body.node("Concat", [*turned, *pieces[len(names) :]], "joined", axis=-1)
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
    a, b = body.split("Split", [x, body.ints(pairs, pairs)], "halves", ["a", "b"], axis=-1)
    return body.node("Concat", _turn(body, a, b, cos, sin), "turned", axis=-1)


def _interleaved(body: Graph, x: str, cos: str, sin: str, pairs: int) -> str:
    last, end, step = body.ints(-1), body.ints(2 * pairs), body.ints(2)
    a, b = (body.node("Slice", [x, body.ints(k), end, last, step], name) for k, name in enumerate(("a", "b")))
    turned = zip(_turn(body, a, b, cos, sin), ("a_column", "b_column"), strict=True)
    columns = [body.node("Unsqueeze", [value, last], name) for value, name in turned]
    both = body.node("Concat", columns, "by_pair", axis=-1)
    return body.node("Reshape", [both, body.ints(0, 0, 0, 2 * pairs)], "turned")


def _turn(body: Graph, a: str, b: str, cos: str, sin: str) -> list[str]:
    a_cos, b_sin = body.node("Mul", [a, cos], "a_cos"), body.node("Mul", [b, sin], "b_sin")
    b_cos, a_sin = body.node("Mul", [b, cos], "b_cos"), body.node("Mul", [a, sin], "a_sin")
    return [body.node("Sub", [a_cos, b_sin], "a_turned"), body.node("Add", [b_cos, a_sin], "b_turned")]
