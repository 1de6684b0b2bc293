"""Target "onnx": ai.onnx RotaryEmbedding and Attention, of opset 23."""

from __future__ import annotations

from typing import Any

from .. import cos_sin_nodes as angle_ops
from .. import masks
from ..cos_sin_nodes import Angles
from .base import Attention, Target
from .fused import OperatorRotator


class OnnxRotator(OperatorRotator):
    """ai.onnx RotaryEmbedding, since opset 23."""

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return tables and ids, or cos and sin (batch, seq, pairs) of the tokens."""
        if angles.ids is not None and angles.pair_axis is None:
            return [angles.cos, angles.sin, self.expanded(angles.ids, "position_ids_by_batch")]
        found = angle_ops.of_tokens(self.graph, angles)
        return [
            self.expanded(value, f"{name}/{of}_by_batch", found.pairs) for value, of in found.both()
        ]

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add RotaryEmbedding(x, cos, sin[, ids])."""
        return self.graph.node(
            "RotaryEmbedding",
            [x, *tables],
            name,
            interleaved=int(self.rope.interleaved),
            **attributes,
        )


def attend(a: Attention, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write ai.onnx Attention."""
    graph, settings = a.graph, a.settings
    # The operator is causal itself, but knows neither windows nor a padded past.
    apart = settings.window is not None or (settings.causal and settings.mask == "padding")
    near = masks.by_distance(graph, a.lengths, settings.window) if apart else None
    mask, bias = masks.allowed(graph, a.lengths, settings.mask, near), a.bias
    if bias is not None:
        mask = bias if mask is None else masks.as_bias(graph, mask, bias, a.compute_dtype)
    attributes: dict[str, Any] = {"is_causal": int(settings.causal), "scale": settings.scale}
    if settings.softcap is not None:
        attributes["softcap"] = settings.softcap
    outputs = ["", "present_key", "present_value"] if a.past else [""]
    made = graph.several(
        "Attention", [q, k, v, mask or "", *(a.past or ())], "attend", outputs, **attributes
    )
    return (made[0], made[1], made[2]) if a.past else (made[0], k, v)


ONNX = Target(
    name="onnx",
    op="ai.onnx RotaryEmbedding",
    opsets=(23, 24),
    rotator=OnnxRotator,
    attend=attend,
    attention_layout="bhsd",
)
