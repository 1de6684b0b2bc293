"""A plan: cos and sin of the tokens at hand, computed once for every layer of a forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu._check import Array
from rope_cpu._rotate import REAL_OF, Rotation
from rope_cpu.spec import Float64

if TYPE_CHECKING:
    from rope_cpu.rotary import RotaryEmbedding


class RotaryPlan(Rotation):
    """Cos and sin of the tokens at hand, for every layer, dtype and number of heads; made by `RotaryEmbedding.plan`.

    A plan is immutable, and several threads may use it at a time.
    """

    __slots__ = ("_mode", "_positions", "_rotary")

    def __init__(
        self, rotary: RotaryEmbedding, positions: Float64, ids: ArrayLike, layout: str, mode: str, dtype: np.dtype[Any]
    ) -> None:
        """Compute cos and sin for the arithmetic of `dtype`; those for others follow when they are first needed."""
        cos, sin = rotary._angles.tables(positions, ids, mode, REAL_OF[dtype])
        frame = rotary._frames[layout]
        super().__init__(frame, cos.shape, {dtype: frame.prepared(dtype, cos, sin)})
        self._rotary, self._positions, self._mode = rotary, positions, mode

    def _name(self) -> str:
        return "keys" if self._mode == "shift" else "x"

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        for dtype, (_, cos, sin, _) in self._prepared.copy().items():
            if REAL_OF[dtype] == real:
                return cos, sin
        return self._rotary._angles.tables(self._positions, self._positions, self._mode, real)

    def __repr__(self) -> str:
        batch, seq, _, _ = self._table_shape
        return f"RotaryPlan(batch={batch}, seq={seq}, layout={self._frame.layout!r}, {self._mode}, {self._rotary!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        float32 = np.dtype(np.float32)
        return RotaryPlan, (self._rotary, self._positions, self._positions, self._frame.layout, self._mode, float32)
