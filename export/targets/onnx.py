"""Target "onnx": ai.onnx RotaryEmbedding and Attention, since opset 23."""

from __future__ import annotations

from typing import Any

from ..cos_sin_nodes import CosSinValues, token_cos_sin
from ..masks import boolean_mask, causal_mask, mask_as_bias, with_sinks
from .base import Attention, Target
from .fused import OperatorRotator


class OnnxRotator(OperatorRotator):
    """Rotates by ai.onnx RotaryEmbedding."""

    def tables(self, cos_sin: CosSinValues, name: str) -> list[str]:
        """Return tables and ids, or cos and sin (batch, seq, pairs) per token."""
        if cos_sin.ids is not None and cos_sin.pair_axis is None:
            ids = self.expanded(cos_sin.ids, "position_ids_by_batch")
            return [cos_sin.cos, cos_sin.sin, ids]
        per_token = token_cos_sin(self.graph, cos_sin)
        return [
            self.expanded(value, f"{name}/{function}_by_batch", per_token.pairs)
            for function, value in per_token.by_name().items()
        ]

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add RotaryEmbedding(x, cos, sin[, ids])."""
        interleaved = int(self.rope.interleaved)
        return self.graph.node(
            "RotaryEmbedding", [x, *tables], name, interleaved=interleaved, **attributes
        )


def attend(attention: Attention, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write ai.onnx Attention."""
    graph = attention.graph
    options = attention.options
    attributes: dict[str, Any] = {"is_causal": int(options.causal), "scale": options.scale}
    if options.softcap is not None:
        attributes["softcap"] = options.softcap
    if attention.sinks is not None:
        return _attend_with_sinks(
            attention, q, k, v, attention.sinks, attributes | {"is_causal": 0}
        )
    mask = _mask(attention) or ""  # an empty name omits an input
    if attention.past is None:
        result = graph.node("Attention", [q, k, v, mask], "attend", **attributes)
        return result, k, v
    result, keys, values = graph.multi_output_node(
        "Attention",
        [q, k, v, mask, *attention.past],
        "attend",
        ["", "present_key", "present_value"],
        **attributes,
    )
    return result, keys, values


def _attend_with_sinks(
    attention: Attention, q: str, k: str, v: str, sinks: str, attributes: dict[str, Any]
) -> tuple[str, str, str]:
    """Write Attention over one more key, which is zero, and has the sinks as its bias.

    The operator is not causal then: without a past of its own it would align the first query with
    the first key.
    """
    graph = attention.graph
    options = attention.options
    keys, values = k, v
    if attention.past is not None:
        keys = graph.node("Concat", [attention.past[0], k], "key_with_past", axis=2)
        values = graph.node("Concat", [attention.past[1], v], "value_with_past", axis=2)
    one_row = graph.ints(0, 0, 0, 0, 0, 0, 1, 0)
    keys_and_sink = graph.node("Pad", [keys, one_row], "keys_and_sink")
    values_and_sink = graph.node("Pad", [values, one_row], "values_and_sink")
    bias = _mask(attention)
    if bias is None:
        bias = graph.scalar(0.0, attention.compute_dtype)
    elif options.mask != "float":
        bias = mask_as_bias(graph, bias, None, attention.compute_dtype)
    heads = graph.ints(1, options.num_heads)
    lengths = attention.lengths
    shape = graph.node("Concat", [heads, lengths.sequence, lengths.total], "bias/shape", axis=0)
    bias = graph.node("Expand", [bias, shape], "bias")
    bias = with_sinks(graph, bias, sinks, (options.num_heads,))
    inputs = [q, keys_and_sink, values_and_sink, bias]
    return graph.node("Attention", inputs, "attend", **attributes), keys, values


def _mask(attention: Attention) -> str | None:
    """Return the mask for the operator, which is causal itself but knows no window.

    Nor does it know a padded past, so that causality is part of the mask then, as it is where the
    operator is not causal because of sinks.
    """
    graph = attention.graph
    options = attention.options
    bias = attention.bias
    causal = None
    beside_operator = options.mask == "padding" or attention.sinks is not None
    if options.window is not None or (options.causal and beside_operator):
        causal = causal_mask(graph, attention.lengths, options.window)
    mask = boolean_mask(graph, attention.lengths, options.mask, causal)
    if bias is None or mask is None:
        return mask or bias
    return mask_as_bias(graph, mask, bias, attention.compute_dtype)


ONNX = Target(
    name="onnx",
    op="ai.onnx RotaryEmbedding",
    opsets=(23, 24),
    rotator=OnnxRotator,
    attend=attend,
    attention_layout="bhsd",
)
