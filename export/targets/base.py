"""What all targets share: what a target is, the rotation of one tensor, and what attention is computed from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding

from ..cos_sin_nodes import Angles
from ..graph import FLOAT32, HALF, Graph, relayout
from ..layouts import four_axes
from ..masks import Lengths


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to write a rotation, and attention, in ONNX.

    op: the operator that rotates. opsets: the first and the last opset it is written in; the first is the default.
    dtypes: of queries and keys. rotator: writes rotations. per_head: heads may have their own frequencies.
    attend: writes attention; from queries, keys and values in attention_layout to the result in the same layout, and
    present keys and values (batch, kv_heads, total, width). attention_rotates: q and k come to it unrotated.
    takes_chunks: it takes several new tokens on a past for more than one sequence. cannot_attend: from the rotary
    embedding and settings of attention to what this target would do wrong, by reason.
    """

    name: str
    op: str
    opsets: tuple[int, int]
    dtypes: tuple[np.dtype[Any], ...] = (FLOAT32, *HALF)
    rotator: type[Rotator]
    attend: Callable[[Attention, str, str, str], tuple[str, str, str]]
    attention_layout: str = "bshd"
    per_head: bool = False
    attention_rotates: bool = False
    takes_chunks: bool = True
    cannot_attend: Callable[[RotaryEmbedding, AttentionSettings], dict[str, bool]] = (
        lambda rope, settings: {}
    )


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
        order, width = self.order(), self.rope.head_dim
        y = self.rotate_ordered(relayout(self.graph, x, self.layout, order, heads, width), heads)
        return relayout(self.graph, y, order, self.layout, heads, width)

    def order(self) -> str:
        """Return the layout that `rotate_ordered` takes and gives."""
        return four_axes(self.layout)

    def rotate_ordered(self, x: str, heads: int | None) -> str:
        """Rotate `x`, whose layout is that of `order`."""
        raise NotImplementedError

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        """Return the model-local functions that the nodes call."""
        return []


@dataclass(frozen=True, kw_only=True)
class AttentionSettings:
    """The arguments of `export_attention` that targets read; see there. num_kv_heads, v_head_dim, scale: never None."""

    num_heads: int
    num_kv_heads: int
    causal: bool
    window: int | None
    softcap: float | None
    scale: float
    mask: str
    positions: str
    max_positions: int | None
    v_head_dim: int

    def sizes(self, head_dim: int) -> dict[str, tuple[int, int]]:
        """Return the number of heads, and the width of each, of q, k and v."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        return {"q": (heads, head_dim), "k": (kv_heads, head_dim), "v": (kv_heads, self.v_head_dim)}


@dataclass(frozen=True)
class Attention:
    """What attention is computed from.

    past: keys and values (batch, kv_heads, past, width). bias: a mask that is added to the scores. Both are of the
    compute dtype. A boolean mask is the graph's input.
    """

    graph: Graph
    settings: AttentionSettings
    rotator: Rotator
    lengths: Lengths
    past: tuple[str, str] | None
    bias: str | None

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
    names, widths, rest = block_names(rope), list(rope.blocks), rope.head_dim - rope.rotary_dim
    return ([*names, "rest"], [*widths, rest]) if rest else (names, widths)


def pairing(rope: RotaryEmbedding) -> str:
    """Return in words which elements form a pair."""
    kind = "(2i, 2i+1), interleaved" if rope.interleaved else "(i, i+n), half-split"
    where = f" within each of the blocks {list(rope.blocks)}" if len(rope.blocks) > 1 else ""
    return f"{kind}{where}, over the first {rope.rotary_dim} of {rope.head_dim} elements"
