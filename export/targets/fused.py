"""What targets "onnx" and "ort" share: a fused operator rotates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import cos_sin_nodes as angle_ops
from ..cos_sin_nodes import Angles
from ..layouts import shape_of
from .base import Rotator, block_names, parts_of


class OperatorRotator(Rotator):
    """A fused operator on (batch, heads, seq, head_dim), or (batch, seq, heads·head_dim) where it takes that itself."""

    def __post_init__(self) -> None:
        """Bring the angles of each block into the operator's shape."""
        names = block_names(self.rope)
        if len(names) == 1:
            self._tables = [self.tables(self.angles, "angles")]
            return
        found, pairs = (
            angle_ops.of_tokens(self.graph, self.angles),
            [width // 2 for width in self.rope.blocks],
        )
        cos, sin = (
            self.graph.several(
                "Split", [value, self.graph.ints(*pairs)], f"{name}_by_block", names, axis=-1
            )
            for value, name in found.both()
        )
        self._tables = [
            self.tables(replace(found, cos=c, sin=s, pairs=n), name)
            for c, s, n, name in zip(cos, sin, pairs, names, strict=True)
        ]

    def order(self) -> str:
        """Return the operator's own layout: it takes packed heads too, where they are not cut into blocks."""
        return "bsd" if self.layout == "bsd" and len(self.rope.blocks) == 1 else "bhsd"

    def rotate_ordered(self, x: str, heads: int | None) -> str:
        """Rotate `x`, or its blocks one by one."""
        shape = shape_of(self.order(), heads or f"{x}_heads", self.rope.head_dim)
        if len(self.rope.blocks) == 1 and self.takes_partial(heads):
            return self.operator(x, self._tables[0], "rotate", shape, **self._attributes(heads))
        return self._by_block(x, shape)

    def takes_partial(self, heads: int | None) -> bool:
        """Return True if the operator can rotate some leading elements of a head vector."""
        return True

    def _attributes(self, heads: int | None) -> dict[str, Any]:
        partial = self.rope.rotary_dim < self.rope.head_dim
        packed = {"num_heads": heads} if heads and (self.layout == "bsd" or partial) else {}
        return packed | ({"rotary_embedding_dim": self.rope.rotary_dim} if partial else {})

    def _by_block(self, x: str, shape: list[str | int]) -> str:
        parts, widths = parts_of(self.rope)
        pieces = self.graph.several("Split", [x, self.graph.ints(*widths)], "x", parts, axis=-1)
        rotated = [
            self.operator(piece, tables, f"rotate_{name}", [*shape[:3], width])
            for piece, tables, name, width in zip(
                pieces, self._tables, block_names(self.rope), widths, strict=False
            )
        ]
        return self.graph.node("Concat", [*rotated, *pieces[len(rotated) :]], "joined", axis=-1)

    def expanded(self, value: str, name: str, *last: int) -> str:
        """Return ids, cos or sin with the batch of x: these operators do not broadcast."""
        tail = [self.graph.ints(*last)] if last else []
        shape = self.graph.node(
            "Concat", [self.batch, self.sequence, *tail], f"{name}/shape", axis=0
        )
        return self.graph.node("Expand", [value, shape], name)

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return what the operator takes for cos, sin and ids."""
        raise NotImplementedError

    def operator(
        self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any
    ) -> str:
        """Add the operator that rotates `x`, of this shape."""
        raise NotImplementedError
