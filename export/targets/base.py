"""Base of all targets: Target, the rotation of one tensor, and the inputs of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding

from ..cos_sin_nodes import CosSinValues
from ..graph import FLOAT32, HALF, Graph, relayout
from ..layouts import four_axes
from ..masks import Lengths

if TYPE_CHECKING:  # the options import the table of targets
    from ..attention_settings import AttentionOptions


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to write a rotation, and attention, in ONNX.

    op: the operator that rotates.
    opsets: the lowest and the highest opset; the lowest is the default.
    dtypes: supported dtypes of queries and keys.
    rotator: writes rotations.
    attend: writes attention, from queries, keys and values in `attention_layout` to the result in
        the same layout, and to present keys and values (batch, kv_heads, total, width).
    per_head: whether heads may have their own frequencies.
    attention_rotates: whether `attend` takes unrotated queries and keys.
    takes_chunks: whether attention of several new tokens on a past works for a batch above 1.
    shared_cache_opset: the lowest opset of attention over a shared cache, None if it is that of
        `opsets`.
    int8_cache: whether a shared cache may be int8.
    attention_problems: yields the reasons why this target cannot express an attention.
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
    shared_cache_opset: int | None = None
    int8_cache: bool = False
    attention_problems: Callable[[RotaryEmbedding, AttentionOptions], Iterator[str]] = (
        lambda rope, options: iter(())
    )


@dataclass
class Rotator:
    """Writes the rotation of tensors into a graph; all tensors share the same cos and sin.

    layout: of the tensors. batch, sequence: their sizes, int64 vectors of length 1.
    compute_dtype: of the tensors and of the arithmetic.
    """

    graph: Graph
    rope: RotaryEmbedding
    cos_sin: CosSinValues
    layout: str
    batch: str
    sequence: str
    compute_dtype: np.dtype[Any]

    def __post_init__(self) -> None:
        """Add the nodes that the tensors share."""

    def rotate(self, x: str, heads: int | None) -> str:
        """Rotate `x`, which has `self.layout`; heads: their number, None if it is unknown."""
        layout = self.rotation_layout()
        width = self.rope.head_dim
        x = relayout(self.graph, x, self.layout, layout, heads, width)
        y = self.rotate_in_layout(x, heads)
        return relayout(self.graph, y, layout, self.layout, heads, width)

    def rotation_layout(self) -> str:
        """Return the layout that `rotate_in_layout` takes and returns."""
        return four_axes(self.layout)

    def rotate_in_layout(self, x: str, heads: int | None) -> str:
        """Rotate `x`, which has the layout of `rotation_layout`."""
        raise NotImplementedError

    def functions(self, opset: int) -> list[onnx.FunctionProto]:
        """Return the model-local functions that the nodes call."""
        return []


@dataclass(frozen=True)
class Attention:
    """The inputs from which a target writes attention.

    past: keys and values (batch, kv_heads, past, width); those of a shared cache are in `lengths`.
    bias: a mask to add to the scores. sinks: (heads,). All have the compute dtype. A boolean mask
    is an input of the graph.

    `attend` returns present keys and values in the compute dtype, of a shared cache in its own.
    """

    graph: Graph
    options: AttentionOptions
    rotator: Rotator
    lengths: Lengths
    past: tuple[str, str] | None
    bias: str | None
    sinks: str | None

    @property
    def head_dim(self) -> int:
        """Width of a query or key vector."""
        return self.rotator.rope.head_dim

    @property
    def compute_dtype(self) -> np.dtype[Any]:
        """The dtype of the arithmetic."""
        return self.rotator.compute_dtype


def block_widths(rope: RotaryEmbedding) -> dict[str, int]:
    """Return the widths of the blocks in which pairs are formed, by names for them."""
    return {f"block_{index}": width for index, width in enumerate(rope.blocks)}


def part_widths(rope: RotaryEmbedding) -> dict[str, int]:
    """Return the widths of the parts of a head vector: blocks and, if any, unrotated rest."""
    widths = block_widths(rope)
    if rope.rotary_dim < rope.head_dim:
        widths["rest"] = rope.head_dim - rope.rotary_dim
    return widths


def pairing_text(rope: RotaryEmbedding) -> str:
    """Return a description of which elements form a pair."""
    pairs = "(2i, 2i+1), interleaved" if rope.interleaved else "(i, i+n), half-split"
    within = f" within each of the blocks {list(rope.blocks)}" if len(rope.blocks) > 1 else ""
    return f"{pairs}{within}, over the first {rope.rotary_dim} of {rope.head_dim} elements"
