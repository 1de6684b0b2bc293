"""Target "onnx": ai.onnx RotaryEmbedding and Attention, since opset 23."""

from __future__ import annotations

from typing import Any

from ..cos_sin_nodes import CosSinValues, token_cos_sin
from ..masks import boolean_mask, causal_mask, mask_as_bias
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


def _mask(attention: Attention) -> str | None:
    """Return the mask for the operator, which is causal itself but knows no window.

    Nor does it know a padded past, so that causality is part of the mask then.
    """
    graph = attention.graph
    options = attention.options
    bias = attention.bias
    causal = None
    if options.window is not None or (options.causal and options.mask == "padding"):
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
