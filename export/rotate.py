"""The rotation of one tensor inside a graph: what all targets share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from rope_cpu.export.angles import Angles
from rope_cpu.export.graph import Graph

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding


@dataclass
class Rotator:
    """Writes the rotation of tensors into a graph; all of them share the angles.

    angles: of the tokens; batch, sequence: their sizes, int64 vectors of length 1; core: the dtype computed in.
    """

    graph: Graph
    rope: RotaryEmbedding
    angles: Angles
    layout: str
    batch: str
    sequence: str
    core: np.dtype[Any]

    def prepare(self) -> None:
        """Add the nodes that the tensors share."""

    def rotate(self, x: str, heads: int | None) -> str:
        """Rotate `x`, of self.layout and the core's dtype; heads: their number where it is known."""
        graph, width = self.graph, self.rope.head_dim
        if self.layout == "thd":
            y = self.by_head(graph.node("Unsqueeze", [x, graph.ints(2)], "as_bhsd"), heads)
            return graph.node("Squeeze", [y, graph.ints(2)], "as_thd")
        if self.layout == "bsd":
            many = heads or 0
            y = self.by_head(graph.node("Reshape", [x, graph.ints(0, 0, many, width)], "split_heads"), heads)
            return graph.node("Reshape", [y, graph.ints(0, 0, many * width)], "merge_heads")
        return self.by_head(x, heads)

    def by_head(self, x: str, heads: int | None) -> str:
        """Rotate `x` with four axes."""
        raise NotImplementedError

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        """Return the model-local functions that the nodes call."""
        return []


def pairing(rope: RotaryEmbedding) -> str:
    """Say in words which elements form a pair."""
    kind = "(2i, 2i+1), interleaved" if rope.interleaved else "(i, i+n), half-split"
    where = f" within each of the blocks {list(rope.blocks)}" if len(rope.blocks) > 1 else ""
    return f"{kind}{where}, over the first {rope.rotary_dim} of {rope.head_dim} elements"


def block_names(rope: RotaryEmbedding) -> list[str]:
    """Return a name for each block that pairs are formed in."""
    return [f"block_{index}" for index in range(len(rope.blocks))]


def parts_of(rope: RotaryEmbedding) -> tuple[list[str], list[int]]:
    """Return the names and widths of the parts of a head vector: its blocks, and the rest where there is one."""
    rest = rope.head_dim - rope.rotary_dim
    return block_names(rope) + ["rest"] * (rest > 0), [*rope.blocks, rest][: len(rope.blocks) + (rest > 0)]
