"""Bases of all targets: Target, and the classes that write rotations and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError

from ..graph import FLOAT32, HALF, Graph, four_axes, relayout, tensor_shape
from ..nodes import MASK_INPUT, CosSinValues, Lengths, arange, token_cos_sin
from ..options import AttentionLayout, AttentionOptions


@dataclass(frozen=True, kw_only=True)
class Target:
    """One way to write a rotation, and attention, in ONNX.

    op: the operator that rotates.
    opsets: the lowest and the highest opset; the lowest is the default.
    dtypes: supported dtypes of queries and keys.
    rotator: writes rotations.
    attention: writes attention, of queries, keys and values in `attention_layout`.
    per_head: whether heads may have their own frequencies.
    attention_rotates: whether attention takes unrotated queries and keys.
    takes_chunks: whether attention of several new tokens on a past works for a batch above 1.
    shared_cache_opset: the lowest opset of attention over a shared cache, None if it is that of
        `opsets`.
    """

    name: str
    op: str
    opsets: tuple[int, int]
    dtypes: tuple[np.dtype[Any], ...] = (FLOAT32, *HALF)
    rotator: type[Rotator]
    attention: type[Attention]
    attention_layout: AttentionLayout = "bshd"
    per_head: bool = False
    attention_rotates: bool = False
    takes_chunks: bool = True
    shared_cache_opset: int | None = None


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


class OperatorRotator(Rotator):
    """Rotates by an operator on (batch, heads, seq, head_dim), or on packed heads if it can.

    Targets "onnx" and "ort" have such operators. Blocks are split, rotated one by one, and joined.
    """

    def __post_init__(self) -> None:
        """Bring cos and sin of each block into the operator's shape."""
        blocks = block_widths(self.rope)
        if len(blocks) == 1:
            self._tables = [self.tables(self.cos_sin, "angles")]
            return
        cos_sin = token_cos_sin(self.graph, self.cos_sin)
        pairs = {name: width // 2 for name, width in blocks.items()}
        cos = split(self.graph, cos_sin.cos, pairs, "cos_by_block")
        sin = split(self.graph, cos_sin.sin, pairs, "sin_by_block")
        self._tables = [
            self.tables(replace(cos_sin, cos=cos[i], sin=sin[i], pairs=pairs[name]), name)
            for i, name in enumerate(blocks)
        ]

    def rotation_layout(self) -> str:
        """Return the operator's own layout: packed heads stay packed unless blocks are split."""
        return "bsd" if self.layout == "bsd" and len(self.rope.blocks) == 1 else "bhsd"

    def rotate_in_layout(self, x: str, heads: int | None) -> str:
        """Rotate `x` in one operator, or its blocks one by one."""
        shape = tensor_shape(self.rotation_layout(), heads or f"{x}_heads", self.rope.head_dim)
        if len(self.rope.blocks) == 1 and self.takes_partial(heads):
            return self.operator(x, self._tables[0], "rotate", shape, **self._attributes(heads))
        return self._rotate_blocks(x, shape)

    def takes_partial(self, heads: int | None) -> bool:
        """Return True if the operator can rotate the leading elements of a head vector alone."""
        return True

    def _attributes(self, heads: int | None) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        partial = self.rope.rotary_dim < self.rope.head_dim
        if heads and (self.layout == "bsd" or partial):
            attributes["num_heads"] = heads
        if partial:
            attributes["rotary_embedding_dim"] = self.rope.rotary_dim
        return attributes

    def _rotate_blocks(self, x: str, shape: list[str | int]) -> str:
        parts = split(self.graph, x, part_widths(self.rope), "x")
        for index, (name, width) in enumerate(block_widths(self.rope).items()):
            parts[index] = self.operator(
                parts[index], self._tables[index], f"rotate_{name}", [*shape[:3], width]
            )
        return self.graph.node("Concat", parts, "joined", axis=-1)

    def expanded(self, value: str, name: str, *last: int) -> str:
        """Return ids, cos or sin with the batch of x: these operators do not broadcast."""
        trailing = [self.graph.ints(*last)] if last else []
        sizes = [self.batch, self.sequence, *trailing]
        shape = self.graph.node("Concat", sizes, f"{name}/shape", axis=0)
        return self.graph.node("Expand", [value, shape], name)

    def tables(self, cos_sin: CosSinValues, name: str) -> list[str]:
        """Return the operator's inputs for cos, sin and ids."""
        raise NotImplementedError

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add the operator that rotates `x`; shape: of x."""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention:
    """Writes attention into a graph.

    past: keys and values (batch, kv_heads, past, width); those of a shared cache are in `lengths`.
    bias: a mask to add to the scores. sinks: (heads,). All have the compute dtype. A boolean mask
    is an input of the graph.
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

    @staticmethod
    def check(rope: RotaryEmbedding, options: AttentionOptions) -> None:
        """Raise ValueError, without a remedy, where the target cannot express an attention."""
        if options.keeps_window:
            rule = f"be 'growing' or 'shared' with target {options.target!r}"
            raise ArgumentError("cache", options.cache, rule)
        if options.cache_dtype is not None:
            rule = f"be left out with target {options.target!r}"
            raise ArgumentError("cache_dtype", options.cache_dtype, rule)

    def attend(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """Return the result in the layout of q, and present keys and values.

        These are (batch, kv_heads, total, width), in the compute dtype, of a shared cache in its
        own.
        """
        raise NotImplementedError

    def as_cached(self, new: str, name: str) -> str:
        """Return new keys or values in the dtype of a shared cache."""
        name = f"{name}/as_cached"
        return self.graph.cast(new, self.options.dtype, name, source=self.compute_dtype)

    def from_cached(self, cached: str, name: str) -> str:
        """Return keys or values of a shared cache in the compute dtype."""
        name = f"{name}/from_cached"
        return self.graph.cast(cached, self.compute_dtype, name, source=self.options.dtype)

    def causal_mask(self, keys: str | None = None) -> str:
        """Return the causal mask (seq, keys), restricted to the window if there is one.

        keys: their number, `lengths.total` by default. Of a shared cache: (batch, 1, seq, keys).
        """
        graph = self.graph
        lengths = self.lengths
        window = self.options.window
        key = arange(graph, keys or lengths.total, "key_index")
        query = arange(graph, lengths.sequence, "query_index")
        past = lengths.past
        new_axes = graph.ints(1)
        if lengths.shared is not None:
            column = [lengths.shared.past, graph.ints(1)]
            past = graph.node("Unsqueeze", column, "query_index/past_column")
            new_axes = graph.ints(1, 3)
        if past is not None:
            query = graph.node("Add", [query, past], "query_index/from_past")
        query = graph.node("Unsqueeze", [query, new_axes], "query_index/column")
        not_later = graph.node("LessOrEqual", [key, query], "is_not_later")
        if window is None:
            return not_later
        before = [query, graph.scalar(window, np.int64)]
        oldest = graph.node("Sub", before, "query_index/before_window")
        in_window = graph.node("Greater", [key, oldest], "is_in_window")
        return graph.node("And", [not_later, in_window], "is_near")

    def boolean_mask(self, causal: str | None) -> str | None:
        """Return the input mask, if it is boolean, and the causal mask combined; None without.

        The result is (seq, total), or (batch or 1, heads or 1, seq, total).
        """
        options = self.options
        if not options.has_boolean_mask:
            return causal
        mask = MASK_INPUT
        if options.has_token_mask:
            mask = self.graph.cast(MASK_INPUT, np.bool_, "is_token")
        if options.has_padding:
            mask = self._expanded_padding(mask)
        if causal is None:
            return mask
        return self.graph.node("And", [mask, causal], "is_allowed")

    def _expanded_padding(self, mask: str) -> str:
        """Return a padding mask (batch, total) as (batch, 1, seq, total)."""
        graph = self.graph
        value = graph.node("Unsqueeze", [mask, graph.ints(1, 2)], "mask_by_head")
        # onnxruntime's Attention does not broadcast the query axis. The shape for Expand,
        # [1, 1, seq, 1], is computed as seq·[0, 0, 1, 0] + [1, 1, 0, 1].
        rows = graph.node("Mul", [self.lengths.sequence, graph.ints(0, 0, 1, 0)], "mask_shape/rows")
        shape = graph.node("Add", [rows, graph.ints(1, 1, 0, 1)], "mask_shape")
        return graph.node("Expand", [value, shape], "mask")

    def masked_bias(self, mask: str | None) -> str | None:
        """Return numbers to add to the scores: the bias or 0 where a mask is true, −inf elsewhere.

        mask: None for all keys.
        """
        if mask is None:
            return self.bias
        dtype = self.compute_dtype
        bias = self.bias or self.graph.scalar(0.0, dtype)
        return self.graph.node(
            "Where", [mask, bias, self.graph.scalar(-np.inf, dtype)], "mask_to_add"
        )

    def with_sinks(self, scores: str, sinks: str, heads: Sequence[int]) -> str:
        """Return scores, or a bias of scores, with one more column: the sink of each head.

        scores: (batch, *heads, seq, total). sinks: as many as heads.
        """
        graph = self.graph
        by_head = graph.node("Reshape", [sinks, graph.ints(1, *heads, 1, 1)], "sinks")
        axes = len(heads) + 3
        # The shape of one column: the shape of the scores, times 1, …, 1, 0, plus 0, …, 0, 1.
        shape = graph.node("Shape", [scores], "scores_shape")
        rows = graph.node("Mul", [shape, graph.ints(*[1] * (axes - 1), 0)], "sinks/rows")
        shape = graph.node("Add", [rows, graph.ints(*[0] * (axes - 1), 1)], "sinks/shape")
        column = graph.node("Expand", [by_head, shape], "sinks/column")
        return graph.node("Concat", [scores, column], "scores_with_sinks", axis=-1)


def split(graph: Graph, value: str, widths: dict[str, int], name: str) -> list[str]:
    """Split the last axis into parts of these widths, if there are several."""
    if len(widths) == 1:
        return [value]
    sizes = graph.ints(*widths.values())
    return graph.multi_output_node("Split", [value, sizes], name, list(widths), axis=-1)


def block_widths(rope: RotaryEmbedding) -> dict[str, int]:
    """Return the widths of the blocks in which pairs are formed, by names for them."""
    return {f"block_{index}": width for index, width in enumerate(rope.blocks)}


def part_widths(rope: RotaryEmbedding) -> dict[str, int]:
    """Return the widths of the parts of a head vector: blocks and, if any, unrotated rest."""
    widths = block_widths(rope)
    if rope.rotary_dim < rope.head_dim:
        widths["rest"] = rope.head_dim - rope.rotary_dim
    return widths
