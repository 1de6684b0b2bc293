"""Target "ort": onnxruntime's own operators, com.microsoft RotaryEmbedding, MRotaryEmbedding, GroupQueryAttention."""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.axes import mrope_pair_axis

from .. import cos_sin_nodes as angle_ops
from .. import masks
from ..cos_sin_nodes import Angles, counting
from ..graph import ORT_DOMAIN
from .base import Attention, AttentionSettings, Target
from .fused import OperatorRotator


class OrtRotator(OperatorRotator):
    """com.microsoft RotaryEmbedding, or MRotaryEmbedding where the axes are laid out as it knows them.

    Both only look up in tables (table, pairs). Cos and sin of the tokens become such a table, with a row for each.
    """

    def __post_init__(self) -> None:
        """Choose the operator, then go on as usual."""
        angles, rope = self.angles, self.rope
        looked_up = angles.ids is not None and angles.pair_axis is not None
        three_axes = looked_up and rope.axes == 3 and len(rope.blocks) == 1
        self._mrope = mrope_attributes(angles.pair_axis or ()) if three_axes else {}
        super().__post_init__()

    def takes_partial(self, heads: int | None) -> bool:
        """Return True if the number of heads is known: without it a partial rotation is refused at run time."""
        return heads is not None or self.rope.rotary_dim == self.rope.head_dim

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return ids and tables."""
        if angles.ids is not None and self._mrope:
            ids = self.expanded(angles.ids, "position_ids_by_batch", self.rope.axes)
            by_axis = self.graph.transpose(
                ids, "bsa", "abs", "position_ids_by_axis"
            )  # a: axis of the position
            return [by_axis, angles.cos, angles.sin]
        if angles.ids is not None and angles.pair_axis is None:
            return [self.expanded(angles.ids, "position_ids_by_batch"), angles.cos, angles.sin]
        found = angle_ops.of_tokens(self.graph, angles)
        return [
            self._every_row,
            *(self._rows(value, f"{name}/{of}", found.pairs) for value, of in found.both()),
        ]

    def _rows(self, value: str, name: str, pairs: int) -> str:
        """Return cos or sin of the tokens as a table with a row for each."""
        value = self.expanded(value, f"{name}_by_batch", pairs)
        # Angles of more batch rows than x has would be cut off; reshaped to [batch, 0, 0], 0 keeping a size, they fail.
        exact = self.graph.node(
            "Mul", [self.batch, self.graph.ints(1, 0, 0)], f"{name}_exact/shape"
        )
        value = self.graph.node("Reshape", [value, exact], f"{name}_exact")
        value = self.graph.node("Reshape", [value, self.graph.ints(-1, pairs)], f"{name}_rows")
        # The operator wants a table of at least `sequence` rows even where the batch is empty.
        more = self.graph.node(
            "Mul", [self.sequence, self.graph.ints(0, 0, 1, 0)], f"{name}_rows/more"
        )
        return self.graph.node("Pad", [value, more], f"{name}_table")

    @cached_property
    def _every_row(self) -> str:
        """Return ids (batch, seq) that count the tokens: batch row · seq + token."""
        graph = self.graph
        row, token = (
            counting(graph, self.batch, "batch_row"),
            counting(graph, self.sequence, "token"),
        )
        column = graph.node("Unsqueeze", [row, graph.ints(1)], "batch_row/column")
        return graph.node(
            "Add",
            [graph.node("Mul", [column, self.sequence], "batch_row/first"), token],
            "every_row",
        )

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add the operator, and say what its output is: shape inference stops at a foreign op."""
        options = attributes | self._mrope | {"interleaved": int(self.rope.interleaved)}
        op = "MRotaryEmbedding" if self._mrope else "RotaryEmbedding"
        y = self.graph.node(op, [x, *tables], name, domain=ORT_DOMAIN, **options)
        self.graph.value_info(y, self.compute_dtype, shape)
        return y


def mrope_attributes(pair_axis: tuple[int, ...]) -> dict[str, Any]:
    """Return MRotaryEmbedding's attributes if it assigns pairs to three axes in this way, else none."""
    sections = np.bincount(pair_axis, minlength=3).tolist()
    for layout, interleaved in enumerate((False, True)):
        with suppress(ValueError):  # of sections that cannot be interleaved
            if mrope_pair_axis(len(pair_axis), sections, interleaved) == pair_axis:
                return {"mrope_section": sections, "mrope_layout": layout}
    return {}


def attend(a: Attention, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write com.microsoft GroupQueryAttention, which rotates too."""
    graph, width, settings, bias = a.graph, a.head_dim, a.settings, a.bias
    heads, kv_heads = settings.num_heads, settings.num_kv_heads
    packed = [
        graph.node("Reshape", [x, graph.ints(0, 0, count * width)], f"{name}_packed")
        for x, count, name in ((q, heads, "q"), (k, kv_heads, "k"), (v, kv_heads, "v"))
    ]
    near = masks.by_distance(graph, a.lengths, settings.window) if settings.mask != "none" else None
    allowed = masks.allowed(graph, a.lengths, settings.mask, near)
    if allowed is not None:
        bias = masks.as_bias(graph, allowed, bias, a.compute_dtype)
    total = graph.cast(a.lengths.total, np.int32, "total_length_int32")
    last = graph.node("Sub", [total, graph.scalar(1, np.int32)], "last_index")
    last = graph.node("Expand", [last, a.rotator.batch], "last_index_by_row")
    whole = graph.node("Squeeze", [total, graph.ints(0)], "total_length_scalar")
    past, angles = a.past or ("", ""), a.rotator.angles
    inputs = [*packed, *past, last, whole, angles.cos, angles.sin, "", bias or ""]
    attributes: dict[str, Any] = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "do_rotary": 1,
        "rotary_interleaved": int(a.rotator.rope.interleaved),
        "scale": settings.scale,
    }
    attributes |= {} if settings.softcap is None else {"softcap": settings.softcap}
    attributes |= {} if settings.window is None else {"local_window_size": settings.window}
    outputs = ["", "present_key", "present_value"]
    y, keys, values = graph.several(
        "GroupQueryAttention", inputs, "attend", outputs, domain=ORT_DOMAIN, **attributes
    )
    graph.value_info(y, a.compute_dtype, ["batch", "sequence", heads * width])
    for value in (keys, values):
        graph.value_info(value, a.compute_dtype, ["batch", kv_heads, "total_length", width])
    y = graph.node("Reshape", [y, graph.ints(0, 0, heads, width)], "attention_by_head")
    return (y if bias is None else _zero_without_keys(a, y, bias)), keys, values


def _zero_without_keys(a: Attention, y: str, bias: str) -> str:
    """Return y (batch, seq, heads, width), zero where a query has no key: GroupQueryAttention may give NaN."""
    graph, dtype = a.graph, a.compute_dtype
    has_key = graph.node("Greater", [bias, graph.scalar(-np.inf, dtype)], "has_key")
    count = graph.node(
        "ReduceSum", [graph.cast(has_key, dtype, "has_key/count"), graph.ints(-1)], "key_count"
    )
    some = graph.node("Greater", [count, graph.scalar(0.0, dtype)], "has_any_key")
    some = graph.transpose(some, "bhsd", "bshd", "has_any_key/order")
    return graph.node("Where", [some, y, graph.scalar(0.0, dtype)], "attention_of_any_key")


def cannot_attend(rope: RotaryEmbedding, settings: AttentionSettings) -> dict[str, bool]:
    """Return what GroupQueryAttention would do silently wrong, or not at all."""
    op, rotary_dim, shared = (
        "com.microsoft GroupQueryAttention",
        rope.rotary_dim,
        rope.axes == 1 or rope.spec.shared_id,
    )
    return {
        f"`positions` is 'position_ids', but {op} reads the first id of a prompt only and counts on from it": (
            settings.positions == "position_ids"
        ),
        f"`causal` is False, but {op} is causal": not settings.causal,
        f"`max_positions` is None, but {op} looks angles up in tables itself": settings.max_positions
        is None,
        f"`rope` has blocks {list(rope.blocks)}, but {op} pairs over one": len(rope.blocks) > 1,
        f"`rope` has {rope.axes} axes, but {op} knows one position a token": not shared,
        f"`head_dim` is {rope.head_dim}, but {op} rotates multiples of 16 only": rope.head_dim % 16
        != 0,
        f"`rotary_dim` is {rotary_dim}, but {op} wants tables of a multiple of 8 columns": rotary_dim
        % 16
        != 0,
        f"`v_head_dim` is {settings.v_head_dim}, but {op} knows head_dim only": settings.v_head_dim
        != rope.head_dim,
    }


ORT = Target(
    name="ort",
    op="com.microsoft RotaryEmbedding",
    opsets=(13, 24),
    rotator=OrtRotator,
    attend=attend,
    attention_rotates=True,
    takes_chunks=False,
    cannot_attend=cannot_attend,
)
