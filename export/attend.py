"""Attention itself, by each target's own means; queries and keys come rotated, but for GroupQueryAttention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_cpu.export import masks
from rope_cpu.export.attention_options import AttentionOptions
from rope_cpu.export.graph import ORT_DOMAIN, Graph
from rope_cpu.export.masks import Lengths
from rope_cpu.export.rotate import Rotator


@dataclass(frozen=True)
class Attending:
    """What attention is computed from. past: keys and values (batch, kv_heads, past, width) of the core's dtype.

    Each method takes queries, keys and values in the target's core layout, and returns the result in the same layout,
    then present keys and values (batch, kv_heads, total, width).
    """

    graph: Graph
    options: AttentionOptions
    rotator: Rotator
    lengths: Lengths
    past: tuple[str, str] | None

    @property
    def core(self) -> np.dtype[Any]:
        """The dtype computed in."""
        return self.rotator.core

    def primitive(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """MatMul, Softmax, MatMul; a group of query heads shares its keys by broadcasting."""
        graph, options = self.graph, self.options
        keys, values = self._with_past(k, 0, "key"), self._with_past(v, 1, "value")
        kv_heads, group = options.kv_heads, options.heads // options.kv_heads
        # A vector, not a scalar: onnxruntime folds scalar factors of MatMul into a float32 attribute, in float64 too.
        factor = np.full(q_width(self.rotator), options.scale / (options.softcap or 1.0), self.core)
        q = graph.node("Mul", [q, graph.table("score_scale", factor)], "q_scaled")
        q = graph.node("Reshape", [q, graph.ints(0, 0, kv_heads, group, q_width(self.rotator))], "q_by_group")
        q = graph.node("Transpose", [q], "q_by_group/order", perm=(0, 2, 3, 1, 4))
        turned = graph.node("Transpose", [keys], "keys_by_column", perm=(0, 1, 3, 2))
        turned, grouped = (
            graph.node("Unsqueeze", [value, graph.ints(2)], name)
            for value, name in ((turned, "keys_of_group"), (values, "values_of_group"))
        )
        scores = graph.node("MatMul", [q, turned], "scores")
        if options.softcap is not None:
            small = graph.node("Tanh", [scores], "scores/tanh")
            scores = graph.node("Mul", [small, graph.scalar(options.softcap, self.core)], "scores/capped")
        result = graph.node("MatMul", [self._weights(scores, group), grouped], "weighted_values")
        result = graph.node("Transpose", [result], "weighted_values/order", perm=(0, 3, 1, 2, 4))
        merged = graph.ints(0, 0, options.heads, options.v_head_dim)
        return graph.node("Reshape", [result, merged], "attention_by_head"), keys, values

    def _weights(self, scores: str, group: int) -> str:
        """Return the softmax of the scores (batch, kv_heads, group, seq, total); rows without any key become zero."""
        graph = self.graph
        added = masks.added_mask(graph, self.options)
        if added is not None:
            scores = graph.node("Add", [scores, self._grouped(added, group)], "scores/with_mask")
        allowed = masks.boolean_mask(graph, self.options, self.lengths, distance=True)
        lowest = graph.scalar(float(np.finfo(self.core).min), self.core)
        if allowed is not None:
            allowed = allowed if self.options.mask not in ("padding", "bool") else self._grouped(allowed, group)
            scores = graph.node("Where", [allowed, scores, lowest], "scores/allowed")
        if added is not None:
            scores = graph.node("Max", [scores, lowest], "scores/finite")
        weights = graph.node("Softmax", [scores], "weights", axis=-1)
        if self.options.mask == "none":
            return weights
        some = graph.node("Greater", [scores, lowest], "scores/is_any")
        return graph.node("Where", [some, weights, graph.scalar(0.0, self.core)], "weights/of_allowed")

    def _grouped(self, mask: str, group: int) -> str:
        """Return a mask (batch or 1, heads or 1, seq, total) as (…, kv_heads, group, seq, total)."""
        graph, options = self.graph, self.options
        every = graph.node("Expand", [mask, graph.ints(1, options.heads, 1, 1)], f"{mask}/of_heads")
        last = graph.node("Transpose", [every], f"{mask}/heads_last", perm=(0, 2, 3, 1))
        split = graph.node("Reshape", [last, graph.ints(0, 0, 0, options.kv_heads, group)], f"{mask}/groups_last")
        return graph.node("Transpose", [split], f"{mask}/by_group", perm=(0, 3, 4, 1, 2))

    def _with_past(self, new: str, which: int, name: str) -> str:
        new = self.graph.node("Transpose", [new], f"{name}_by_head", perm=(0, 2, 1, 3))
        if self.past is None:
            return new
        return self.graph.node("Concat", [self.past[which], new], f"{name}_with_past", axis=2)

    def onnx(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """ai.onnx Attention."""
        graph, options = self.graph, self.options
        added = masks.added_mask(graph, options)
        distance = options.window is not None or (options.causal and options.mask == "padding")
        mask = masks.boolean_mask(graph, options, self.lengths, distance=distance)
        if added is not None:
            mask = added if mask is None else masks.as_bias(graph, mask, added, self.core)
        attributes: dict[str, Any] = {"is_causal": int(options.causal), "scale": options.scale}
        if options.softcap is not None:
            attributes["softcap"] = options.softcap
        outputs = ["", "present_key", "present_value"] if self.past else [""]
        made = graph.split("Attention", [q, k, v, mask or "", *(self.past or ())], "attend", outputs, **attributes)
        return (made[0], made[1], made[2]) if self.past else (made[0], k, v)

    def ort(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """com.microsoft GroupQueryAttention, which rotates too."""
        graph, options, width = self.graph, self.options, q_width(self.rotator)
        packed = [
            graph.node("Reshape", [x, graph.ints(0, 0, heads * width)], f"{name}_packed")
            for x, heads, name in ((q, options.heads, "q"), (k, options.kv_heads, "k"), (v, options.kv_heads, "v"))
        ]
        bias = masks.added_mask(graph, options)
        allowed = masks.boolean_mask(graph, options, self.lengths, distance=options.mask != "none")
        if allowed is not None:
            bias = masks.as_bias(graph, allowed, bias, self.core)
        total = graph.cast(self.lengths.total, np.int32, "total_length_int32")
        last = graph.node("Sub", [total, graph.scalar(1, np.int32)], "last_index")
        last = graph.node("Expand", [last, self.rotator.batch], "last_index_by_row")
        whole = graph.node("Squeeze", [total, graph.ints(0)], "total_length_scalar")
        past = self.past or ("", "")
        inputs = [*packed, *past, last, whole, self.rotator.angles.cos, self.rotator.angles.sin, "", bias or ""]
        attributes: dict[str, Any] = {
            "num_heads": options.heads,
            "kv_num_heads": options.kv_heads,
            "do_rotary": 1,
            "rotary_interleaved": int(self.rotator.rope.interleaved),
            "scale": options.scale,
        }
        attributes |= {} if options.softcap is None else {"softcap": options.softcap}
        attributes |= {} if options.window is None else {"local_window_size": options.window}
        outputs = ["", "present_key", "present_value"]
        y, keys, values = graph.split("GroupQueryAttention", inputs, "attend", outputs, domain=ORT_DOMAIN, **attributes)
        graph.describe(y, self.core, ["batch", "sequence", options.heads * width])
        for value in (keys, values):
            graph.describe(value, self.core, ["batch", options.kv_heads, "total_length", width])
        y = graph.node("Reshape", [y, graph.ints(0, 0, options.heads, width)], "attention_by_head")
        return (y if bias is None else self._zero_without_keys(y, bias)), keys, values

    def _zero_without_keys(self, y: str, bias: str) -> str:
        """Return y (batch, seq, heads, width), zero where a query has no key: GroupQueryAttention may give NaN."""
        graph = self.graph
        allowed = graph.node("Greater", [bias, graph.scalar(-np.inf, self.core)], "has_key")
        count = graph.node("ReduceSum", [graph.cast(allowed, self.core, "has_key/count"), graph.ints(-1)], "key_count")
        some = graph.node("Greater", [count, graph.scalar(0.0, self.core)], "has_any_key")
        some = graph.node("Transpose", [some], "has_any_key/order", perm=(0, 2, 1, 3))
        return graph.node("Where", [some, y, graph.scalar(0.0, self.core)], "attention_of_any_key")


# target → its attention
ATTEND = {"primitive": Attending.primitive, "onnx": Attending.onnx, "ort": Attending.ort}


def q_width(rotator: Rotator) -> int:
    """Return the width of a query vector."""
    return rotator.rope.head_dim
