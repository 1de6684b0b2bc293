"""Targets "onnx" and "ort": a fused operator rotates."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.export import angles as angle_ops
from rope_cpu.export.angles import Angles, counting
from rope_cpu.export.graph import ORT_DOMAIN
from rope_cpu.export.layouts import LAYOUTS, back
from rope_cpu.export.rotate import Rotator, block_names, parts_of


class OperatorRotator(Rotator):
    """A fused operator on (batch, heads, seq, head_dim), or (batch, seq, heads·head_dim) where it takes that itself."""

    def prepare(self) -> None:
        """Split the angles by block, and bring them into the operator's form."""
        self._tables = [self.tables(angles, name) for angles, name in self._angles_by_block()]

    def _angles_by_block(self) -> list[tuple[Angles, str]]:
        names = block_names(self.rope)
        if len(names) == 1:
            return [(self.angles, "angles")]
        found, pairs = angle_ops.of_tokens(self.graph, self.angles), [width // 2 for width in self.rope.blocks]
        cos, sin = (
            self.graph.split("Split", [value, self.graph.ints(*pairs)], f"{name}_by_block", names, axis=-1)
            for value, name in ((found.cos, "cos"), (found.sin, "sin"))
        )
        return [
            (replace(found, cos=c, sin=s, pairs=n), name) for c, s, n, name in zip(cos, sin, pairs, names, strict=True)
        ]

    def rotate(self, x: str, heads: int | None) -> str:
        """Rotate `x` as it is where the operator takes three axes, else by head."""
        if self.layout == "bsd" and len(self.rope.blocks) == 1:
            shape: list[str | int] = ["batch", "sequence", (heads or 0) * self.rope.head_dim]
            return self.operator(x, self._tables[0], "rotate", shape, **self._attributes(heads))
        return super().rotate(x, heads)

    def by_head(self, x: str, heads: int | None) -> str:
        """Bring `x` into the operator's axis order, rotate it or its blocks, and go back."""
        order = LAYOUTS[self.layout].to_bhsd
        if order:
            x = self.graph.node("Transpose", [x], "to_bhsd", perm=order)
        shape: list[str | int] = ["batch", heads or f"{x}_heads", "sequence", self.rope.head_dim]
        if len(self.rope.blocks) == 1 and self.takes_partial(heads):
            y = self.operator(x, self._tables[0], "rotate", shape, **self._attributes(heads))
        else:
            y = self._by_block(x, shape)
        return self.graph.node("Transpose", [y], "from_bhsd", perm=back(order)) if order else y

    def takes_partial(self, heads: int | None) -> bool:
        """Tell whether the operator can rotate some leading elements of a head vector."""
        return True

    def _attributes(self, heads: int | None) -> dict[str, Any]:
        partial = self.rope.rotary_dim < self.rope.head_dim
        packed = {"num_heads": heads} if heads and (self.layout == "bsd" or partial) else {}
        return packed | ({"rotary_embedding_dim": self.rope.rotary_dim} if partial else {})

    def _by_block(self, x: str, shape: list[str | int]) -> str:
        parts, widths = parts_of(self.rope)
        pieces = self.graph.split("Split", [x, self.graph.ints(*widths)], "x", parts, axis=-1)
        turned = [
            self.operator(piece, tables, f"rotate_{name}", [*shape[:3], width])
            for piece, tables, name, width in zip(pieces, self._tables, block_names(self.rope), widths, strict=False)
        ]
        return self.graph.node("Concat", [*turned, *pieces[len(turned) :]], "joined", axis=-1)

    def expanded(self, value: str, name: str, *last: int) -> str:
        """Return ids, cos or sin with the batch of x: these operators do not broadcast."""
        tail = [self.graph.ints(*last)] if last else []
        shape = self.graph.node("Concat", [self.batch, self.sequence, *tail], f"{name}/shape", axis=0)
        return self.graph.node("Expand", [value, shape], name)

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return what the operator takes for cos, sin and ids."""
        raise NotImplementedError

    def operator(self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any) -> str:
        """Add the operator that rotates `x`, of this shape."""
        raise NotImplementedError


class OnnxRotator(OperatorRotator):
    """ai.onnx RotaryEmbedding, since opset 23."""

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return tables and ids, or cos and sin (batch, seq, pairs) of the tokens."""
        if angles.ids is not None and angles.owner is None:
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


class OrtRotator(OperatorRotator):
    """com.microsoft RotaryEmbedding, or MRotaryEmbedding where the axes are laid out as it knows them.

    Both only look up in tables (table, pairs). Cos and sin of the tokens become such a table, with a row for each.
    """

    op = "RotaryEmbedding"

    def prepare(self) -> None:
        """Choose the operator, then prepare as usual."""
        layout = None if self.angles.ids is None else mrope_layout(self.angles.owner)
        self._mrope: dict[str, Any] = {}
        if layout is not None and len(self.rope.blocks) == 1:
            sections = np.bincount(self.angles.owner, minlength=3).tolist()  # type: ignore[arg-type]
            self.op, self._mrope = "MRotaryEmbedding", {"mrope_section": sections, "mrope_layout": layout}
        super().prepare()

    def takes_partial(self, heads: int | None) -> bool:
        """Tell whether the number of heads is known: without it a partial rotation is refused at run time."""
        return heads is not None or self.rope.rotary_dim == self.rope.head_dim

    def tables(self, angles: Angles, name: str) -> list[str]:
        """Return ids and tables."""
        if angles.ids is not None and self._mrope:
            ids = self.expanded(angles.ids, "position_ids_by_batch", self.rope.axes)
            return [self.graph.node("Transpose", [ids], "position_ids_by_axis", perm=(2, 0, 1)), angles.cos, angles.sin]
        if angles.ids is not None and angles.owner is None:
            return [self.expanded(angles.ids, "position_ids_by_batch"), angles.cos, angles.sin]
        found = angle_ops.of_tokens(self.graph, angles)
        values = ((found.cos, f"{name}/cos"), (found.sin, f"{name}/sin"))
        return [self._every_row, *(self._rows(value, of, found.pairs) for value, of in values)]

    def _rows(self, value: str, name: str, pairs: int) -> str:
        """Return cos or sin of the tokens as a table with a row for each."""
        value = self.expanded(value, f"{name}_by_batch", pairs)
        # Angles of more batch rows than x has would be cut off; reshaped to [batch, 0, 0], 0 keeping a size, they fail.
        exact = self.graph.node("Mul", [self.batch, self.graph.ints(1, 0, 0)], f"{name}_exact/shape")
        value = self.graph.node("Reshape", [value, exact], f"{name}_exact")
        value = self.graph.node("Reshape", [value, self.graph.ints(-1, pairs)], f"{name}_rows")
        # The operator wants a table of at least `sequence` rows even where the batch is empty.
        more = self.graph.node("Mul", [self.sequence, self.graph.ints(0, 0, 1, 0)], f"{name}_rows/more")
        return self.graph.node("Pad", [value, more], f"{name}_table")

    @cached_property
    def _every_row(self) -> str:
        """Return ids (batch, seq) that count the tokens: batch row · seq + token."""
        graph = self.graph
        row, token = counting(graph, self.batch, "batch_row"), counting(graph, self.sequence, "token")
        column = graph.node("Unsqueeze", [row, graph.ints(1)], "batch_row/column")
        return graph.node("Add", [graph.node("Mul", [column, self.sequence], "batch_row/first"), token], "every_row")

    def operator(self, x: str, tables: list[str], name: str, shape: list[str | int], **attributes: Any) -> str:
        """Add the operator, and say what its output is: shape inference stops at a foreign op."""
        options = attributes | self._mrope | {"interleaved": int(self.rope.interleaved)}
        y = self.graph.node(self.op, [x, *tables], name, domain=ORT_DOMAIN, **options)
        self.graph.describe(y, self.core, shape)
        return y


def mrope_layout(owner: NDArray[np.int64] | None) -> int | None:
    """Return MRotaryEmbedding's mrope_layout if it assigns pairs to three axes in this way, else None."""
    if owner is None or owner.max() != 2:
        return None
    sections = np.bincount(owner, minlength=3)
    turn = np.arange(owner.size) % 3
    limit = np.where(turn > 0, 3 * sections[turn], 0)
    interleaved = np.where(np.arange(owner.size) < limit, turn, 0)
    for layout, pattern in enumerate((np.repeat(np.arange(3), sections), interleaved)):
        if np.array_equal(owner, pattern):
            return layout
    return None
