"""`apply_rotary`: the functional interface, with the caller's own cos and sin."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import arrays
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.position_ids import parse_table_rows
from rope_cpu.arguments.scalars import boolean
from rope_cpu.array_types import COMPUTE_DTYPES, LAYOUT_AXES, Array, Layout
from rope_cpu.launch.rotate import HeadLayout
from rope_cpu.rotation.plan import RotaryPlan


def apply_rotary(
    x: Array,
    cos: Array,
    sin: Array,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool = False,
    layout: Layout = "bshd",
    inverse: bool = False,
    out: Array | None = None,
) -> Array:
    """Rotate `x` by tables of cos and sin, like the ONNX operator RotaryEmbedding.

    The default layout is bshd; that of the ONNX operator is bhsd.

    Parameters
    ----------
    x : array of float32, float64, float16 or bfloat16
        Queries or keys, with axes as in `layout` and any strides. Elements past 2·pairs are copied.
    cos, sin : array of float32 or float64
        With `position_ids`: (table, pairs) or (table, heads, pairs). Without: (seq, pairs),
        (batch, seq, pairs), (seq, heads, pairs) or (batch, seq, heads, pairs), for layout thd
        (tokens, pairs) or (tokens, heads, pairs). Three axes are (batch, seq, pairs) wherever
        these fit `x`: where batch, seq and heads can be equal, pass cos[None] and sin[None].
        Heads of `x` are a multiple n of those of cos, and head h takes the values of head h // n.
    position_ids : array of int, (seq,) or (batch, seq), optional
        The rows of cos and sin, from 0 to table − 1; for layout thd (tokens,).
    interleaved : bool, default False
        Whether pairs are (2i, 2i+1) rather than (i, i+n).
    layout : {"bshd", "bhsd", "sbhd", "thd"}
        Axes of x: b batch, s seq, h heads, d head_dim, t packed tokens.
    inverse : bool, default False
        Whether to rotate by −sin, which is the transposed rotation.
    out : array, optional
        Output: `x` itself (in place), or memory that shares no element with the inputs. A new array
        by default.

    Returns
    -------
    x_rot : array
        An array of the shape and dtype of x; `out` if it is given. It is computed in float32
        (float64 for float64) and rounded once. Results of bfloat16 below 2^-126 become zero.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid. Nothing is written then.

    References
    ----------
    ONNX operator RotaryEmbedding, opset 23.

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> rope = rope_cpu.RotaryEmbedding(64)
    >>> cos, sin = rope.cos_sin(np.arange(5))
    >>> x = np.ones((1, 5, 8, 64), np.float32)
    >>> np.array_equal(rope_cpu.apply_rotary(x, cos, sin), rope.rotate(x))
    True
    """
    x = arrays.check_array("x", x, arrays.check_layout(layout))
    cos, sin = arrays.check_tables(cos, sin, position_ids is not None, layout)
    rotary_dim = 2 * cos.shape[-1]
    if isinstance(out, np.ndarray):
        remedy = "pass another array or a copy of the table"
        tables = {"cos": cos, "sin": sin}
        arrays.refuse_shared("out", out, tables, "share nothing with the inputs", remedy)
    if rotary_dim > x.shape[-1]:
        rule = f"have at most {x.shape[-1] // 2} columns, one for each pair of `x`"
        half = f"cos[..., :{cos.shape[-1] // 2}]"
        remedy = f"of a pair in two columns pass one: {half}, or cos[..., ::2] if interleaved"
        raise ArgumentError("cos", Finding.shape_of(cos), rule, remedy)
    differ_by_head = _differ_by_head(cos, x, position_ids is not None, layout)
    if differ_by_head and cos.shape[-2] == 0:
        raise ArgumentError("cos", Finding.shape_of(cos), "be for at least one head")
    if position_ids is not None:
        ids = parse_table_rows(position_ids, cos.shape, layout)
        cos = cos[ids]
        sin = sin[ids]
    if boolean("inverse", inverse):
        sin = -sin
    cos_sin = _table(cos, sin, differ_by_head)
    heads = HeadLayout(x.shape[-1], boolean("interleaved", interleaved), (rotary_dim,))
    table_of = partial(cos_sin.astype, copy=False)
    plan = RotaryPlan(table_of, heads, layout, "rotate", COMPUTE_DTYPES[x.dtype])
    return plan.rotate(x, out)


def _differ_by_head(cos: Array, x: Array, looked_up: bool, layout: str) -> bool:
    """Return whether the last axis but one of cos and sin counts heads.

    Three axes are (batch, seq, pairs) if these fit `x`, otherwise (seq, heads, pairs).
    """
    batch_axis, token_axis, _ = LAYOUT_AXES[layout]
    if looked_up or batch_axis is None or cos.ndim != 3:
        return cos.ndim > 2
    tokens = x.shape[token_axis]
    fits_by_row = cos.shape[0] in (1, x.shape[batch_axis]) and cos.shape[1] == tokens
    return not fits_by_row and cos.shape[0] == tokens


def _table(cos: Array, sin: Array, differ_by_head: bool) -> Array:
    """Return cos and sin as one array (2, batch or 1, seq, heads or 1, pairs)."""
    table = np.array([cos, sin])
    if not differ_by_head:
        table = table[..., None, :]
    if table.ndim == 4:
        table = table[:, None]
    return table
