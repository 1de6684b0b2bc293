"""Target "onnx": ai.onnx RotaryEmbedding and Attention, since opset 23."""

from __future__ import annotations

from typing import Any

from ..graph import BATCH, TOTAL, Shape
from ..nodes import PAST_KEY, PAST_VALUE, CosSinValues, SharedCache, token_cos_sin
from .base import Attention, OperatorRotator, Target


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


class OnnxAttention(Attention):
    """Writes ai.onnx Attention."""

    def attend(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """Return the result, and present keys and values."""
        if self.lengths.shared is not None:
            return self._attend_to_shared_cache(self.lengths.shared, q, k, v)
        if self.sinks is not None:
            return self._attend_with_sinks(self.sinks, q, k, v)
        graph = self.graph
        mask = self._mask()
        if self.bias is not None:
            mask = self.masked_bias(mask)
        inputs = [q, k, v, mask or ""]
        if self.past is None:
            return graph.node("Attention", inputs, "attend", **self._attributes()), k, v
        result, keys, values = graph.multi_output_node(
            "Attention",
            [*inputs, *self.past],
            "attend",
            ["", "present_key", "present_value"],
            **self._attributes(),
        )
        for value, width in ((keys, self.head_dim), (values, self.options.v_head_dim)):
            shape: Shape = [BATCH, self.options.num_kv_heads, TOTAL, width]
            graph.value_info(value, self.compute_dtype, shape)
        return result, keys, values

    def _attend_with_sinks(self, sinks: str, q: str, k: str, v: str) -> tuple[str, str, str]:
        """Attend to one more key, which is zero, and has the sinks as its bias.

        The operator is not causal then: without a past of its own it would align the first query
        with the first key.
        """
        graph = self.graph
        keys = k
        values = v
        if self.past is not None:
            keys = graph.node("Concat", [self.past[0], k], "key_with_past", axis=2)
            values = graph.node("Concat", [self.past[1], v], "value_with_past", axis=2)
        bias = self.masked_bias(self._mask()) or graph.scalar(0.0, self.compute_dtype)
        inputs = self._inputs_with_sinks(keys, values, bias, self.lengths.total, sinks)
        attributes = self._attributes(is_causal=0)
        return graph.node("Attention", [q, *inputs], "attend", **attributes), keys, values

    def _inputs_with_sinks(
        self, keys: str, values: str, bias: str, length: str, sinks: str
    ) -> list[str]:
        """Return keys, values and bias with one more key, which is zero; length: of the keys."""
        graph = self.graph
        heads = self.options.num_heads
        # Other axes are not named: some runtimes take the size of a padded axis for an unknown one.
        one_row = [graph.ints(0, 1), "", graph.ints(2)]
        keys_and_sink = graph.node("Pad", [keys, *one_row], "keys_and_sink")
        values_and_sink = graph.node("Pad", [values, *one_row], "values_and_sink")
        sizes = [graph.ints(1, heads), self.lengths.sequence, length]
        shape = graph.node("Concat", sizes, "bias/shape", axis=0)
        bias = graph.node("Expand", [bias, shape], "bias")
        return [keys_and_sink, values_and_sink, self.with_sinks(bias, sinks, (heads,))]

    def _attend_to_shared_cache(
        self, shared: SharedCache, q: str, k: str, v: str
    ) -> tuple[str, str, str]:
        """Write TensorScatter, and attend to the whole cache.

        Without a window of the operator, the mask holds the causality: operators of runtimes before
        onnx 1.23 align it with the first key. It holds the lengths too, which nonpad_kv_seqlen
        repeats for runtimes that skip the rest.
        """
        graph = self.graph
        keys = self._written(PAST_KEY, k, shared.past, "key")
        values = self._written(PAST_VALUE, v, shared.past, "value")
        attended_keys = self.from_cached(keys, "key")
        attended_values = self.from_cached(values, "value")
        capacity = graph.size(PAST_KEY, 2, "capacity")
        attributes = self._attributes()
        mask = ""
        if self._left_window is None:
            attributes = self._attributes(is_causal=0)
            mask = self.causal_mask(capacity)
        inputs = [attended_keys, attended_values, mask, "", "", shared.total]
        if self.sinks is not None:
            bias = self.masked_bias(mask) or ""
            inputs = self._inputs_with_sinks(
                attended_keys, attended_values, bias, capacity, self.sinks
            )
        return graph.node("Attention", [q, *inputs], "attend", **attributes), keys, values

    def _written(self, cached: str, new: str, first: str, name: str) -> str:
        """Return cached keys or values with new ones from `first` on, (batch,)."""
        inputs = [cached, self.as_cached(new, name), first]
        return self.graph.node("TensorScatter", inputs, f"{name}_written", axis=2)

    def _attributes(self, **changed: int) -> dict[str, Any]:
        """Return the attributes of the operator, of which some may be changed."""
        options = self.options
        attributes: dict[str, Any] = {"is_causal": int(options.causal), "scale": options.scale}
        if options.softcap is not None:
            attributes["softcap"] = options.softcap
        if self._left_window is not None:
            attributes["left_window_size"] = self._left_window
        return attributes | changed

    @property
    def _left_window(self) -> int | None:
        """The number of keys before its own to which the operator lets a query attend.

        It has an attribute for that since opset 25. None: no window, or one of the mask.
        """
        options = self.options
        if options.window is None or options.opset < 25 or self._masks_order:
            return None
        return options.window - 1

    @property
    def _masks_order(self) -> bool:
        """Whether causality is part of the mask.

        The operator does not know a padded past, and is not causal beside sinks.
        """
        return self.options.has_padding or self.sinks is not None

    def _mask(self) -> str | None:
        """Return the boolean mask for the operator, which is causal itself."""
        options = self.options
        causal = None
        masks_window = options.window is not None and self._left_window is None
        if masks_window or (options.causal and self._masks_order):
            causal = self.causal_mask()
        return self.boolean_mask(causal)


ONNX = Target(
    name="onnx",
    op="ai.onnx RotaryEmbedding",
    opsets=(23, 25),
    rotator=OnnxRotator,
    attention=OnnxAttention,
    attention_layout="bhsd",
    shared_cache_opset=24,
)
