"""Rotation by a fused operator, shared by the targets "onnx" and "ort"."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..cos_sin_nodes import CosSinValues, token_cos_sin
from ..layouts import tensor_shape
from .base import Rotator, block_widths, part_widths


class OperatorRotator(Rotator):
    """Rotates by an operator on (batch, heads, seq, head_dim), or on packed heads if it can.

    Blocks are split, rotated one by one, and joined.
    """

    def __post_init__(self) -> None:
        """Bring cos and sin of each block into the operator's shape."""
        blocks = block_widths(self.rope)
        if len(blocks) == 1:
            self._tables = [self.tables(self.cos_sin, "angles")]
            return
        cos_sin = token_cos_sin(self.graph, self.cos_sin)
        pairs = [width // 2 for width in blocks.values()]
        cos, sin = (
            self.graph.multi_output_node(
                "Split", [value, self.graph.ints(*pairs)], f"{name}_by_block", list(blocks), axis=-1
            )
            for name, value in cos_sin.by_name().items()
        )
        self._tables = [
            self.tables(replace(cos_sin, cos=cos[i], sin=sin[i], pairs=pairs[i]), name)
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
        widths = part_widths(self.rope)
        parts = self.graph.multi_output_node(
            "Split", [x, self.graph.ints(*widths.values())], "x", list(widths), axis=-1
        )
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
