"""Target "ort": onnxruntime's own operators, com.microsoft RotaryEmbedding, MRotaryEmbedding, GroupQueryAttention."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.axes import mrope_pair_axis

from .. import angles as angle_ops
from .. import masks
from ..angles import Angles, counting
from ..graph import FLOAT32, HALF, ORT_DOMAIN
from .base import Attending, Target
from .fused import OperatorRotator


class OrtRotator(OperatorRotator):
    """com.microsoft RotaryEmbedding, or MRotaryEmbedding where the axes are laid out as it knows them.

    Both only look up in tables (table, pairs). Cos and sin of the tokens become such a table, with a row for each.
    """

    op = "RotaryEmbedding"

    def __post_init__(self) -> None:
        """Choose the operator, then go on as usual."""
        self._mrope: dict[str, Any] = {}
        pair_axis = self.angles.pair_axis
        if self.angles.ids is not None and pair_axis is not None and self.rope.axes == 3 and len(self.rope.blocks) == 1:
            layout = mrope_layout(pair_axis)
            if layout is not None:
                sections = np.bincount(pair_axis, minlength=3).tolist()
                self.op, self._mrope = "MRotaryEmbedding", {"mrope_section": sections, "mrope_layout": layout}
        super().__post_init__()

    def takes_partial(self, heads: int | None) -> bool:
        """Return True if the number of heads is known: without it a partial rotation is refused at run time."""
        return heads is not None or self.rope.rotary_dim == self.rope.head_dim

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return ids and tables."""
        if angles.ids is not None and self._mrope:
            ids = self.expanded(angles.ids, "position_ids_by_batch", self.rope.axes)
            return [self.graph.node("Transpose", [ids], "position_ids_by_axis", perm=(2, 0, 1)), angles.cos, angles.sin]
        if angles.ids is not None and angles.pair_axis is None:
            return [self.expanded(angles.ids, "position_ids_by_batch"), angles.cos, angles.sin]
        found = angle_ops.of_tokens(self.graph, angles)
        values = ((found.cos, f"{name}/cos"), (found.sin, f"{name}/sin"))
        return [self._every_row, *(self._rows(value, of, found.pairs) for value, of in values)]

    def _rows(self, value: str, name: str, pairs: int) -> str:
        """Return cos or sin of the tokens as a table with a row for each."""
        value = self.expanded(value, f"{name}_by_batch", pairs)
        # Angles of more batch rows than x has would be cut off; reshaped to [batch, 0, 0], 0 keeping a size, they fail.
        exact = self.graph.node("Mul", [self.batch, self.graph.ints(1, 0, 0)], f"{name}_exact/shape")
        value = self.graph.node("Reshape", [value, exact], f"{name}_exact")
        value = self.graph.node("Reshape", [value, self.graph.ints(-1, pairs)], f"{name}_rows")
        # The operator wants a table of at least `sequence` rows even where the batch is empty.
        more = self.graph.node("Mul", [self.sequence, self.graph.ints(0, 0, 1, 0)], f"{name}_rows/more")
        return self.graph.node("Pad", [value, more], f"{name}_table")

    @cached_property
    def _every_row(self) -> str:
        """Return ids (batch, seq) that count the tokens: batch row · seq + token."""
        graph = self.graph
        row, token = counting(graph, self.batch, "batch_row"), counting(graph, self.sequence, "token")
        column = graph.node("Unsqueeze", [row, graph.ints(1)], "batch_row/column")
        return graph.node("Add", [graph.node("Mul", [column, self.sequence], "batch_row/first"), token], "every_row")

    def operator(self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any) -> str:
        """Add the operator, and say what its output is: shape inference stops at a foreign op."""
        options = attributes | self._mrope | {"interleaved": int(self.rope.interleaved)}
        y = self.graph.node(self.op, [x, *tables], name, domain=ORT_DOMAIN, **options)
        self.graph.value_info(y, self.compute_dtype, shape)
        return y


def mrope_layout(pair_axis: tuple[int, ...]) -> int | None:
    """Return MRotaryEmbedding's mrope_layout if it assigns pairs to three axes in this way, else None."""
    if max(pair_axis) != 2:
        return None
    sections = np.bincount(pair_axis, minlength=3).tolist()
    for layout, interleaved in enumerate((False, True)):
        with suppress(ValueError):  # of sections that cannot be dealt out
            if mrope_pair_axis(len(pair_axis), sections, interleaved) == pair_axis:
                return layout
    return None


def attend(a: Attending, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write com.microsoft GroupQueryAttention, which rotates too."""
    graph, width = a.graph, a.head_dim
    packed = [
        graph.node("Reshape", [x, graph.ints(0, 0, heads * width)], f"{name}_packed")
        for x, heads, name in ((q, a.heads, "q"), (k, a.kv_heads, "k"), (v, a.kv_heads, "v"))
    ]
    bias = masks.added(graph, a.mask, a.mask_dtype, a.compute_dtype)
    near = masks.by_distance(graph, a.lengths, a.window) if a.mask != "none" else None
    allowed = masks.allowed(graph, a.lengths, a.mask, near)
    if allowed is not None:
        bias = masks.as_bias(graph, allowed, bias, a.compute_dtype)
    total = graph.cast(a.lengths.total, np.int32, "total_length_int32")
    last = graph.node("Sub", [total, graph.scalar(1, np.int32)], "last_index")
    last = graph.node("Expand", [last, a.rotator.batch], "last_index_by_row")
    whole = graph.node("Squeeze", [total, graph.ints(0)], "total_length_scalar")
    past, angles = a.past or ("", ""), a.rotator.angles
    inputs = [*packed, *past, last, whole, angles.cos, angles.sin, "", bias or ""]
    attributes: dict[str, Any] = {
        "num_heads": a.heads,
        "kv_num_heads": a.kv_heads,
        "do_rotary": 1,
        "rotary_interleaved": int(a.rotator.rope.interleaved),
        "scale": a.scale,
    }
    attributes |= {} if a.softcap is None else {"softcap": a.softcap}
    attributes |= {} if a.window is None else {"local_window_size": a.window}
    outputs = ["", "present_key", "present_value"]
    y, keys, values = graph.several("GroupQueryAttention", inputs, "attend", outputs, domain=ORT_DOMAIN, **attributes)
    graph.value_info(y, a.compute_dtype, ["batch", "sequence", a.heads * width])
    for value in (keys, values):
        graph.value_info(value, a.compute_dtype, ["batch", a.kv_heads, "total_length", width])
    y = graph.node("Reshape", [y, graph.ints(0, 0, a.heads, width)], "attention_by_head")
    return (y if bias is None else _zero_without_keys(a, y, bias)), keys, values


def _zero_without_keys(a: Attending, y: str, bias: str) -> str:
    """Return y (batch, seq, heads, width), zero where a query has no key: GroupQueryAttention may give NaN."""
    graph, dtype = a.graph, a.compute_dtype
    has_key = graph.node("Greater", [bias, graph.scalar(-np.inf, dtype)], "has_key")
    count = graph.node("ReduceSum", [graph.cast(has_key, dtype, "has_key/count"), graph.ints(-1)], "key_count")
    some = graph.node("Greater", [count, graph.scalar(0.0, dtype)], "has_any_key")
    some = graph.node("Transpose", [some], "has_any_key/order", perm=(0, 2, 1, 3))
    return graph.node("Where", [some, y, graph.scalar(0.0, dtype)], "attention_of_any_key")


def cannot_attend(
    rope: RotaryEmbedding, *, positions: str, causal: bool, tables: bool, v_head_dim: int
) -> dict[str, bool]:
    """Return what GroupQueryAttention would do silently wrong, or not at all."""
    shared = rope.axes == 1 or rope.spec.shared_id
    return {
        f"`positions` is 'position_ids', but {GROUP_QUERY} reads the first id of a prompt only and counts on from "
        "it": positions == "position_ids",
        f"`causal` is False, but {GROUP_QUERY} is causal": not causal,
        f"`max_positions` is None, but {GROUP_QUERY} looks angles up in tables itself": not tables,
        f"the rotary has blocks {list(rope.blocks)}, but {GROUP_QUERY} pairs over one": len(rope.blocks) > 1,
        f"the rotary has {rope.axes} axes, but {GROUP_QUERY} knows one position a token": not shared,
        f"`head_dim` is {rope.head_dim}, but {GROUP_QUERY} rotates multiples of 16 only": rope.head_dim % 16 != 0,
        f"`rotary_dim` is {rope.rotary_dim}, but {GROUP_QUERY} wants tables of a multiple of 8 columns": rope.rotary_dim
        % 16
        != 0,
        f"`v_head_dim` is {v_head_dim}, but {GROUP_QUERY} knows head_dim only": v_head_dim != rope.head_dim,
    }


GROUP_QUERY = "com.microsoft GroupQueryAttention"

ORT = Target(
    "ort",
    "com.microsoft RotaryEmbedding",
    opsets=(13, 24),
    default_opset=13,
    dtypes=(FLOAT32, *HALF),
    rotator=OrtRotator,
    attend=attend,
    attention_layout="bshd",
    attention_rotates=True,
    takes_chunks=False,
    cannot_attend=cannot_attend,
)
