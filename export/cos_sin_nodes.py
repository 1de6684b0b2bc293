"""Cos and sin of positions inside a graph: computed in float64, or looked up in tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation.cos_sin import CosSin

from .graph import FLOAT64, Graph

# Rows of a table that are computed at a time, so that their float64 values stay small.
TABLE_ROWS = 8192


@dataclass(frozen=True)
class CosSinValues:
    """Names of the values in a graph that hold cos and sin, attention factor included.

    Per token: `ids` is None; cos and sin are (batch or 1, seq, pairs), or (…, heads, pairs).
    Tables: cos and sin are (table, pairs); `ids`, (batch, seq) or (batch, seq, axes), holds the row
    of each token. With several axes `pair_axis` holds the axis that each pair rotates with.
    """

    cos: str
    sin: str
    pairs: int
    heads: int = 1
    ids: str | None = None
    pair_axis: tuple[int, ...] | None = None

    def by_name(self) -> dict[str, str]:
        """Return the values under the keys "cos" and "sin"."""
        return {"cos": self.cos, "sin": self.sin}


def length_factor(rope: RotaryEmbedding, inverse: bool) -> float:
    """Return the factor by which a rotation changes the length of a vector."""
    return 1 / rope.attention_factor if inverse else rope.attention_factor


def cos_sin_tables(
    rope: RotaryEmbedding, rows: int, inverse: bool, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return cos and sin of positions 0 … rows − 1, the same on every axis.

    Each is (rows, pairs), and each value is rounded once to `dtype`.
    """
    angles = CosSin.from_spec(rope.spec)
    operation = "inverse" if inverse else "rotate"
    shape = (rows, rope.rotary_dim // 2)
    cos = np.empty(shape, dtype)
    sin = np.empty(shape, dtype)
    for start in range(0, rows, TABLE_ROWS):
        part = slice(start, start + TABLE_ROWS)
        ids = np.arange(start, min(start + TABLE_ROWS, rows), dtype=np.float64)
        positions = np.repeat(ids, rope.axes).reshape(1, -1, rope.axes)
        angles.write(positions, operation, cos[part], sin[part])
    return cos, sin


def computed_cos_sin(
    graph: Graph, rope: RotaryEmbedding, ids: str, inverse: bool, dtype: np.dtype[Any]
) -> CosSinValues:
    """Compute cos and sin in the graph.

    ids: (batch or 1, seq), with several axes (batch or 1, seq, axes), int64.

    The product of position and frequency is float64 and off by its rounding, |p·ω|·2^-53. With
    angle_dtype float32, product and results are float32, as in transformers; cos and sin are
    computed in float64 and then rounded.
    """
    _, axes, heads, pairs = rope.spec.inv_freq.shape
    angle_dtype = np.dtype(rope.spec.angle_dtype)
    frequencies = rope.spec.inv_freq[0].reshape(axes, heads * pairs).astype(angle_dtype)
    inv_freq = graph.initializer("inv_freq", frequencies)
    with graph.scope("angles"):
        position = graph.cast(ids, angle_dtype, "position")
        if axes == 1:
            position = graph.node("Unsqueeze", [position, graph.ints(-1)], "position_column")
            angle = graph.node("Mul", [position, inv_freq], "position_times_inv_freq")
        else:
            angle = graph.node("MatMul", [position, inv_freq], "position_times_inv_freq")
        if heads > 1:
            angle = graph.node("Reshape", [angle, graph.ints(0, 0, heads, pairs)], "by_head")
        angle = graph.cast(angle, FLOAT64, "angle")
        factor = length_factor(rope, inverse)
        cos = _cosine(graph, angle, dtype)
        cos = _scaled(graph, cos, factor, "cos", angle_dtype, dtype)
        sin = graph.node("Sin", [angle], "sin")
        sin = _scaled(graph, sin, -factor if inverse else factor, "sin", angle_dtype, dtype)
    return CosSinValues(cos, sin, pairs, heads)


def _cosine(graph: Graph, angle: str, dtype: np.dtype[Any]) -> str:
    """Return the cosine; for float32 as 1 - 2·sin²(angle/2), so that older runtimes load the file.

    onnxruntime has had Sin in float64 for long, but Cos only since 1.29. The detour adds some
    roundings of 2^-53: nothing for float32, but too much for float64.
    """
    if dtype == FLOAT64:
        return graph.node("Cos", [angle], "cos")
    half = graph.node("Mul", [angle, graph.scalar(0.5, FLOAT64)], "half_angle")
    sine = graph.node("Sin", [half], "sin_of_half")
    square = graph.node("Mul", [sine, sine], "sin_of_half/squared")
    twice = graph.node("Mul", [square, graph.scalar(2.0, FLOAT64)], "sin_of_half/squared_twice")
    return graph.node("Sub", [graph.scalar(1.0, FLOAT64), twice], "cos")


def _scaled(
    graph: Graph,
    value: str,
    factor: float,
    name: str,
    angle_dtype: np.dtype[Any],
    dtype: np.dtype[Any],
) -> str:
    """Return a float64 value rounded to `angle_dtype`, times `factor`, in `dtype`."""
    value = graph.cast(value, angle_dtype, f"{name}_float32", source=FLOAT64)
    if factor != 1:
        value = graph.node("Mul", [value, graph.scalar(factor, angle_dtype)], f"{name}_factor")
    return graph.cast(value, dtype, f"{name}_{dtype}", source=angle_dtype)


def arange(graph: Graph, size: str, name: str) -> str:
    """Return 0, 1, 2, … size − 1, an int64 vector; size: an int64 vector of length 1."""
    zero = graph.scalar(0, np.int64)
    one = graph.scalar(1, np.int64)
    end = graph.node("Squeeze", [size, graph.ints(0)], f"{name}/end")
    return graph.node("Range", [zero, end, one], f"{name}/count")


def token_cos_sin(graph: Graph, values: CosSinValues) -> CosSinValues:
    """Return cos and sin per token, looked up where `values` are tables.

    A row outside the table fails at run time. Gather counts negative indices from the end, so they
    are replaced by the table's length, which fails too.
    """
    if values.ids is None:
        return values
    with graph.scope("lookup"):
        length = graph.size(values.cos, 0, "table_length")
        negative = graph.node("Less", [values.ids, graph.ints(0)], "is_negative")
        ids = graph.node("Where", [negative, length, values.ids], "row")
        cos = _table_rows(graph, values.cos, ids, values.pair_axis, "cos")
        sin = _table_rows(graph, values.sin, ids, values.pair_axis, "sin")
    return replace(values, cos=cos, sin=sin, ids=None, pair_axis=None)


def _table_rows(
    graph: Graph, table: str, ids: str, pair_axis: tuple[int, ...] | None, name: str
) -> str:
    """Return the table's row for each token.

    With several axes a token has one row per axis; each pair comes from the row of its own axis.
    """
    if pair_axis is None:
        return graph.node("Gather", [table, ids], name, axis=0)
    first, *others = sorted(set(pair_axis))
    result = _axis_row(graph, table, ids, first, name)
    for axis in others:
        row = _axis_row(graph, table, ids, axis, name)
        owned = graph.initializer(f"pairs_of_axis_{axis}", np.array(pair_axis) == axis)
        result = graph.node("Where", [owned, row, result], f"{name}/to_axis_{axis}")
    return result


def _axis_row(graph: Graph, table: str, ids: str, axis: int, name: str) -> str:
    """Return the table's row for each token's coordinate on one axis."""
    axis_index = graph.scalar(axis, np.int64)
    row = graph.node("Gather", [ids, axis_index], f"{name}/row_of_axis_{axis}", axis=-1)
    return graph.node("Gather", [table, row], f"{name}/by_axis_{axis}", axis=0)
