"""`apply_rotary`: the functional interface, with the caller's own cos and sin."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import position_ids as check_ids
from rope_cpu.arguments.arrays import check_array, check_layout, check_tables, share_memory
from rope_cpu.arguments.scalars import boolean
from rope_cpu.array_types import COMPUTE_DTYPES, Array
from rope_cpu.rotation.dispatch import Launch, Pairing, launcher, rotate_copies


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

    x: float32, float64, float16 or bfloat16, axes as in `layout`: "bshd", "bhsd", "sbhd" or "thd"; any strides.
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
    x = check_array("x", x, check_layout(layout))
    cos, sin = check_tables(cos, sin, position_ids is not None, layout)
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            isinstance(out, np.ndarray)
            and np.may_share_memory(out, table)
            and share_memory(out, table)
        ):
            raise ValueError(
                f"`out` shares memory with `{name}`; it must share nothing with what is read"
            )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"`x` has head_dim {x.shape[-1]}, but `cos` of shape {cos.shape} rotates {2 * cos.shape[-1]} elements"
        )
    if position_ids is not None:
        ids = check_ids.parse_table_rows(position_ids, cos.shape, layout)
        cos, sin = cos[ids], sin[ids]
    if boolean("inverse", inverse):
        sin = -sin
    cos_sin = np.array([cos, sin])
    cos_sin = cos_sin[:, None, :, None] if cos.ndim == 2 else cos_sin[:, :, :, None]
    pairing = Pairing(x.shape[-1], boolean("interleaved", interleaved), (2 * cos.shape[-1],))

    def launch_of(dtype: np.dtype[Any]) -> tuple[Launch, Array]:
        return launcher(dtype, pairing, layout), cos_sin.astype(COMPUTE_DTYPES[dtype], copy=False)

    result = np.empty_like(x) if out is None else out
    if type(x) is type(result) is np.ndarray:
        launch, table = launch_of(x.dtype)
        same = result is x or result.dtype == x.dtype
        if same and launch(table, x, x, result, result, 1):
            return result
    given = "`cos` and `sin` are for" if position_ids is None else "`position_ids` are for"
    outs, shape = None if out is None else {"out": out}, cos_sin.shape[1:]
    (result,) = rotate_copies({"x": x}, outs, layout, x.shape[-1], shape, (given, given), launch_of)
    return result
