"""The functional form: rotation by cos and sin tables of the caller's own."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.plan import Rotation, form
from rope_cpu.validation import arrays as check
from rope_cpu.validation.arrays import Array
from rope_cpu.validation.scalars import boolean


class _TableRotation(Rotation):
    """A rotation by given cos and sin, (batch or 1, seq, 1, pairs)."""

    __slots__ = ("_given", "_tables")

    def __init__(self, layout: str, head_dim: int, interleaved: bool, given: str, cos: Array, sin: Array) -> None:
        super().__init__(layout, head_dim, form(head_dim, [2 * cos.shape[-1]]), interleaved, cos.shape)
        self._given, self._tables = f"{given} are for", (cos, sin)

    def _given_for(self) -> tuple[str, str]:
        return self._given, self._given

    def _cos_sin(self, real: str) -> tuple[Array, Array]:
        cos, sin = (table.astype(real, copy=False) for table in self._tables)
        if cos.strides[-1] != cos.itemsize or sin.strides[-1] != sin.itemsize:
            return cos.copy(), sin.copy()  # also of one pair, which NumPy calls contiguous in any case
        return cos, sin


def apply_rotary(
    x: Array,
    cos: Array,
    sin: Array,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    layout: str = "bshd",
    inverse: bool = False,
    out: Array | None = None,
) -> Array:
    """Rotate `x` by tables of cos and sin, like the ONNX operator RotaryEmbedding (whose layout is bhsd).

    x: float32, float64, float16 or bfloat16, axes as `layout` says: "bshd", "bhsd", "sbhd" or "thd"; any strides.
    cos, sin: float32 or float64. With position_ids: (table, pairs), looked up. Without: (seq, pairs) or (batch, seq,
        pairs), for thd (tokens, pairs). Elements of x past 2·pairs are copied.
    position_ids: integers from 0 to table − 1, (seq,) or (batch, seq), for thd (tokens,).
    interleaved: pairs are (2i, 2i+1) rather than (i, i+n). inverse: −sin, the transposed rotation.
    out: where to write, `x` itself or memory that shares nothing with it; it is returned.

    Returns an array of x's shape and dtype, computed in float32 (float64 for float64) and rounded once; what of
    bfloat16 is below 2^-126 becomes zero.

    Raises TypeError or ValueError, before anything is written, naming argument, value and rule.
    Source: ONNX operator RotaryEmbedding, opset 23.
    """
    x = check.array("x", x, check.layout(layout))
    cos, sin = check.tables(cos, sin, position_ids is not None, layout)
    for name, table in (("cos", cos), ("sin", sin)):
        if isinstance(out, np.ndarray) and np.may_share_memory(out, table) and check.share(out, table):
            raise ValueError(f"`out` shares memory with `{name}`; it must share nothing with what is read")
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"`x` has head_dim {x.shape[-1]}, but `cos` of shape {cos.shape} rotates {2 * cos.shape[-1]} elements"
        )
    if position_ids is not None:
        ids = check.table_ids(position_ids, len(cos), layout)
        cos, sin = cos[ids], sin[ids]
    if boolean("inverse", inverse):
        sin = -sin
    if cos.ndim == 2:
        cos, sin = cos[None], sin[None]
    given = "`cos` and `sin`" if position_ids is None else "`position_ids`"
    adjacent = boolean("interleaved", interleaved)
    return _TableRotation(layout, x.shape[-1], adjacent, given, cos[:, :, None], sin[:, :, None]).rotate(x, out)
