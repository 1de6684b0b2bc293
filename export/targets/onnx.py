"""Target "onnx": ai.onnx RotaryEmbedding and Attention, since opset 23."""

from __future__ import annotations

from typing import Any

from .. import nodes
from ..graph import BATCH, TOTAL, Shape
from .base import Attention, OperatorRotator, Target


class OnnxRotator(OperatorRotator):
    """Rotates by ai.onnx RotaryEmbedding."""

    def tables(self, cos_sin: nodes.CosSinValues, name: str) -> list[str]:
        """Return tables and ids, or cos and sin (batch, seq, pairs) per token."""
        if cos_sin.ids is not None and cos_sin.pair_axis is None:
            ids = self.expanded(cos_sin.ids, "position_ids_by_batch")
            return [cos_sin.cos, cos_sin.sin, ids]
        per_token = nodes.token_cos_sin(self.graph, cos_sin)
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
    left = _left_window(attention)
    if left is not None:
        attributes["left_window_size"] = left
    shared = attention.lengths.shared
    if shared is not None:
        return _attend_to_shared_cache(attention, shared, q, k, v, attributes)
    if attention.sinks is not None:
        return _attend_with_sinks(
            attention, q, k, v, attention.sinks, attributes | {"is_causal": 0}
        )
    mask = _mask(attention) or ""
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
    for value, width in ((keys, attention.head_dim), (values, options.v_head_dim)):
        shape: Shape = [BATCH, options.num_kv_heads, TOTAL, width]
        graph.value_info(value, attention.compute_dtype, shape)
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
    keys = k
    values = v
    if attention.past is not None:
        keys = graph.node("Concat", [attention.past[0], k], "key_with_past", axis=2)
        values = graph.node("Concat", [attention.past[1], v], "value_with_past", axis=2)
    bias = _mask(attention)
    if bias is None:
        bias = graph.scalar(0.0, attention.compute_dtype)
    elif options.mask != "float":
        bias = nodes.mask_as_bias(graph, bias, None, attention.compute_dtype)
    inputs = _inputs_with_sinks(attention, keys, values, bias, attention.lengths.total, sinks)
    return graph.node("Attention", [q, *inputs], "attend", **attributes), keys, values


def _inputs_with_sinks(
    attention: Attention, keys: str, values: str, bias: str, length: str, sinks: str
) -> list[str]:
    """Return keys, values and bias with one more key, which is zero; length: of the keys."""
    graph = attention.graph
    heads = attention.options.num_heads
    # Other axes are not named: some runtimes take the size of a padded axis for an unknown one.
    one_row = [graph.ints(0, 1), "", graph.ints(2)]
    keys_and_sink = graph.node("Pad", [keys, *one_row], "keys_and_sink")
    values_and_sink = graph.node("Pad", [values, *one_row], "values_and_sink")
    sizes = [graph.ints(1, heads), attention.lengths.sequence, length]
    shape = graph.node("Concat", sizes, "bias/shape", axis=0)
    bias = graph.node("Expand", [bias, shape], "bias")
    return [keys_and_sink, values_and_sink, nodes.with_sinks(graph, bias, sinks, (heads,))]


def _attend_to_shared_cache(
    attention: Attention,
    shared: nodes.SharedCache,
    q: str,
    k: str,
    v: str,
    attributes: dict[str, Any],
) -> tuple[str, str, str]:
    """Write TensorScatter, and Attention over the whole cache.

    Without a window of the operator, the mask holds the causality: operators of runtimes before
    onnx 1.23 align it with the first key. It holds the lengths too, which nonpad_kv_seqlen repeats
    for runtimes that skip the rest.
    """
    graph = attention.graph
    options = attention.options
    dtype = attention.compute_dtype
    keys = _written(attention, shared.key, k, shared.past, "key")
    values = _written(attention, shared.value, v, shared.past, "value")
    attended_keys = graph.cast(keys, dtype, "key/from_cached", source=options.dtype)
    attended_values = graph.cast(values, dtype, "value/from_cached", source=options.dtype)
    capacity = graph.size(shared.key, 2, "capacity")
    mask = ""
    if _left_window(attention) is None:
        attributes = attributes | {"is_causal": 0}
        mask = nodes.causal_mask(graph, attention.lengths, options.window, capacity)
    inputs = [attended_keys, attended_values, mask, "", "", shared.total]
    if attention.sinks is not None:
        bias = nodes.mask_as_bias(graph, mask, None, dtype)
        inputs = _inputs_with_sinks(
            attention, attended_keys, attended_values, bias, capacity, attention.sinks
        )
    return graph.node("Attention", [q, *inputs], "attend", **attributes), keys, values


def _written(attention: Attention, cached: str, new: str, first: str, name: str) -> str:
    """Return cached keys or values with new ones from `first` on, (batch,)."""
    graph = attention.graph
    dtype = attention.options.dtype
    new = graph.cast(new, dtype, f"{name}/as_cached", source=attention.compute_dtype)
    return graph.node("TensorScatter", [cached, new, first], f"{name}_written", axis=2)


def _left_window(attention: Attention) -> int | None:
    """Return the number of keys before its own to which the operator lets a query attend.

    It has an attribute for that since opset 25. None: no window, or one of the mask.
    """
    options = attention.options
    if options.window is None or options.opset < 25 or _masks_order(attention):
        return None
    return options.window - 1


def _masks_order(attention: Attention) -> bool:
    """Return True if causality is part of the mask.

    The operator does not know a padded past, and is not causal beside sinks.
    """
    return attention.options.has_padding or attention.sinks is not None


def _mask(attention: Attention) -> str | None:
    """Return the mask for the operator, which is causal itself."""
    graph = attention.graph
    options = attention.options
    bias = attention.bias
    causal = None
    masks_window = options.window is not None and _left_window(attention) is None
    if masks_window or (options.causal and _masks_order(attention)):
        causal = nodes.causal_mask(graph, attention.lengths, options.window)
    mask = nodes.boolean_mask(graph, attention.lengths, options, causal)
    if bias is None or mask is None:
        return mask or bias
    return nodes.mask_as_bias(graph, mask, bias, attention.compute_dtype)


ONNX = Target(
    name="onnx",
    op="ai.onnx RotaryEmbedding",
    opsets=(23, 25),
    rotator=OnnxRotator,
    attend=attend,
    attention_layout="bhsd",
    shared_cache_opset=24,
)
