"""Target "onnx": ai.onnx RotaryEmbedding and Attention, of opset 23."""

from __future__ import annotations

from typing import Any

from .. import angles as angle_ops
from .. import masks
from ..angles import Angles
from ..graph import FLOAT32, HALF
from .base import Attending, Target
from .fused import OperatorRotator


class OnnxRotator(OperatorRotator):
    """ai.onnx RotaryEmbedding, since opset 23."""

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return tables and ids, or cos and sin (batch, seq, pairs) of the tokens."""
        if angles.ids is not None and angles.pair_axis is None:
            return [angles.cos, angles.sin, self.expanded(angles.ids, "position_ids_by_batch")]
        found = angle_ops.of_tokens(self.graph, angles)
        return [
            self.expanded(v, f"{name}/{n}_by_batch", found.pairs) for v, n in ((found.cos, "cos"), (found.sin, "sin"))
        ]

    def operator(self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any) -> str:
        """Add RotaryEmbedding(x, cos, sin[, ids])."""
        return self.graph.node(
            "RotaryEmbedding", [x, *tables], name, interleaved=int(self.rope.interleaved), **attributes
        )


def attend(a: Attending, q: str, k: str, v: str) -> tuple[str, str, str]:
    """Write ai.onnx Attention."""
    graph = a.graph
    bias = masks.added(graph, a.mask, a.mask_dtype, a.compute_dtype)
    # The operator is causal itself; a window, or a padded past, it does not know.
    apart = a.window is not None or (a.causal and a.mask == "padding")
    near = masks.by_distance(graph, a.lengths, a.window) if apart else None
    mask = masks.allowed(graph, a.lengths, a.mask, near)
    if bias is not None:
        mask = bias if mask is None else masks.as_bias(graph, mask, bias, a.compute_dtype)
    attributes: dict[str, Any] = {"is_causal": int(a.causal), "scale": a.scale}
    if a.softcap is not None:
        attributes["softcap"] = a.softcap
    outputs = ["", "present_key", "present_value"] if a.past else [""]
    made = graph.several("Attention", [q, k, v, mask or "", *(a.past or ())], "attend", outputs, **attributes)
    return (made[0], made[1], made[2]) if a.past else (made[0], k, v)


ONNX = Target(
    "onnx",
    "ai.onnx RotaryEmbedding",
    opsets=(23, 24),
    default_opset=23,
    dtypes=(FLOAT32, *HALF),
    rotator=OnnxRotator,
    attend=attend,
    attention_layout="bhsd",
)
