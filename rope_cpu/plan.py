"""A plan: cos and sin of the tokens at hand, computed once for every layer of a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import ArrayLike

from rope_cpu._check import Array
from rope_cpu._rotate import Rotation
from rope_cpu.spec import Float64

if TYPE_CHECKING:
    from rope_cpu.rotary import RotaryEmbedding


class RotaryPlan(Rotation):
    """Cos and sin of the tokens at hand, for every layer, dtype and number of heads; made by `RotaryEmbedding.plan`.

    A plan is immutable, and several threads may use it at a time.
    """

    __slots__ = ("_mode", "_positions", "_rotary", "_tables")

    def __init__(
        self, rotary: RotaryEmbedding, positions: Float64, ids: ArrayLike, layout: str, mode: str, real: str = "float32"
    ) -> None:
        """Compute cos and sin in a real dtype; those in the other follow when they are first needed."""
        self._tables = {real: rotary._angles.tables(positions, ids, mode, real)}
        super().__init__(rotary._frames[layout], self._tables[real][0].shape)
        self._rotary, self._positions, self._mode = rotary, positions, mode

    def _name(self) -> str:
        return "keys" if self._mode == "shift" else "x"

    def _given_for(self) -> tuple[str, str]:
        given = "`delta` is given for" if self._mode == "shift" else "positions are given for"
        of_lengths = len(self._positions) < self._table_shape[0]
        return given, "lengths are given for" if of_lengths else given

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        tables = self._tables.get(real)
        if tables is None:
            tables = self._rotary._angles.tables(self._positions, self._positions, self._mode, real)
            self._tables[real] = tables
        return tables

    def __repr__(self) -> str:
        batch, seq, _, _ = self._table_shape
        return f"RotaryPlan(batch={batch}, seq={seq}, layout={self._frame.layout!r}, {self._mode}, {self._rotary!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return RotaryPlan, (self._rotary, self._positions, self._positions, self._frame.layout, self._mode)
