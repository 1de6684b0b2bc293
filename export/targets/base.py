"""What all targets share: what a target is, the rotation of one tensor, and what attention is computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding

from ..angles import Angles
from ..graph import Graph
from ..masks import Lengths


@dataclass(frozen=True)
class Target:
    """One way to write a rotation, and attention, in ONNX.

    op: the operator that rotates. opsets: the first and the last opset it is written in; default_opset: what is written
    unless asked otherwise. dtypes: of queries and keys. rotator: writes rotations. per_head: heads may have their own
    frequencies.
    attend: writes attention; from queries, keys and values in attention_layout to the result in the same layout, and
    present keys and values (batch, kv_heads, total, width). attention_rotates: q and k come to it unrotated.
    takes_chunks: it takes several new tokens on a past for more than one sequence. cannot_attend: from the rotary
    embedding and settings of attention to what this target would do wrong, by reason.
    """

    name: str
    op: str
    opsets: tuple[int, int]
    default_opset: int
    dtypes: tuple[np.dtype[Any], ...]
    rotator: type[Rotator]
    attend: Callable[[Attending, str, str, str], tuple[str, str, str]]
    attention_layout: str
    per_head: bool = False
    attention_rotates: bool = False
    takes_chunks: bool = True
    cannot_attend: Callable[..., dict[str, bool]] = lambda rope, **settings: {}


@dataclass
class Rotator:
    """Writes the rotation of tensors into a graph; all of them share the angles.

    angles: of the tokens. layout: of the tensors. batch, sequence: their sizes, int64 vectors of length 1.
    compute_dtype: of the tensors, which is computed in.
    """

    graph: Graph
    rope: RotaryEmbedding
    angles: Angles
    layout: str
    batch: str
    sequence: str
    compute_dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        """Add the nodes that the tensors share."""

    def rotate(self, x: str, heads: int | None) -> str:
        """Rotate `x`, of self.layout and the compute dtype; heads: their number where it is known."""
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


@dataclass(frozen=True)
class Attending:
    """What attention is computed from: the settings of `export_attention`, and values of the graph.

    mask: "none", "padding", "bool" or "float"; the input attention_mask is declared. past: keys and values (batch,
    kv_heads, past, width) of the compute dtype.
    """

    graph: Graph
    rotator: Rotator
    lengths: Lengths
    past: tuple[str, str] | None
    heads: int
    kv_heads: int
    v_head_dim: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    mask_dtype: np.dtype[Any]

    @property
    def head_dim(self) -> int:
        """Width of a query or key vector."""
        return self.rotator.rope.head_dim

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype computed in."""
        return self.rotator.compute_dtype


def block_names(rope: RotaryEmbedding) -> list[str]:
    """Return a name for each block that pairs are formed in."""
    return [f"block_{index}" for index in range(len(rope.blocks))]


def parts_of(rope: RotaryEmbedding) -> tuple[list[str], list[int]]:
    """Return the names and widths of the parts of a head vector: its blocks, and the rest where there is one."""
    rest = rope.head_dim - rope.rotary_dim
    return block_names(rope) + ["rest"] * (rest > 0), [*rope.blocks, rest][: len(rope.blocks) + (rest > 0)]
