"""Positions → cos and sin inside a graph: computed there in float64, or looked up in tables."""

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
class Angles:
    """Cos and sin in a graph, attention factor included.

    Looked up: cos and sin are (table, pairs), ids (batch, seq) or (batch, seq, axes) says which row a token takes, and
    pair_axis, with several axes, which of its coordinates each pair goes by.
    Of the tokens themselves: ids is None and cos and sin are (batch or 1, seq, pairs), or (…, heads, pairs).
    """

    cos: str
    sin: str
    pairs: int
    heads: int = 1
    ids: str | None = None
    pair_axis: tuple[int, ...] | None = None

    def both(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Return cos and sin, each with its name."""
        return (self.cos, "cos"), (self.sin, "sin")


def tables(
    rope: RotaryEmbedding, rows: int, inverse: bool, dtype: np.dtype[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return cos and sin of positions 0 … rows − 1 on every axis, (rows, pairs), each rounded once to `dtype`."""
    angles, mode, pairs = (
        CosSin.from_spec(rope.spec),
        "inverse" if inverse else "rotate",
        rope.rotary_dim // 2,
    )
    cos, sin = np.empty((rows, pairs), dtype), np.empty((rows, pairs), dtype)
    for start in range(0, rows, TABLE_ROWS):
        part = slice(start, start + TABLE_ROWS)
        ids = np.arange(start, min(start + TABLE_ROWS, rows), dtype=np.float64)
        positions = np.repeat(ids, rope.axes).reshape(1, -1, rope.axes)
        angles.write(positions, mode, cos[part], sin[part])
    return cos, sin


def computed(
    graph: Graph, rope: RotaryEmbedding, ids: str, inverse: bool, dtype: np.dtype[Any]
) -> Angles:
    """Compute cos and sin in the graph; ids (batch or 1, seq), or (…, axes) with several axes, of any real dtype.

    The product of position and frequency is float64 and off by its rounding, |p·ω|·2^-53. With angle_dtype float32
    product and results are float32, as in transformers; cos and sin are computed in float64 and then rounded.
    """
    spec = rope.spec
    _, axes, heads, pairs = spec.inv_freq.shape
    angle_dtype = np.dtype(spec.angle_dtype)
    omega = graph.initializer(
        "inv_freq", spec.inv_freq[0].reshape(axes, heads * pairs).astype(angle_dtype)
    )
    with graph.scope("angles"):
        position = graph.cast(ids, angle_dtype, "position")
        if axes == 1:
            position = graph.node("Unsqueeze", [position, graph.ints(-1)], "position_column")
        angle = graph.node(
            "Mul" if axes == 1 else "MatMul", [position, omega], "position_times_inv_freq"
        )
        if heads > 1:
            angle = graph.node("Reshape", [angle, graph.ints(0, 0, heads, pairs)], "by_head")
        angle = graph.cast(angle, FLOAT64, "angle")
        factor = 1 / rope.attention_factor if inverse else rope.attention_factor
        cos = _scaled(graph, _cosine(graph, angle, dtype), factor, "cos", angle_dtype, dtype)
        sin = _scaled(
            graph,
            graph.node("Sin", [angle], "sin"),
            -factor if inverse else factor,
            "sin",
            angle_dtype,
            dtype,
        )
    return Angles(cos, sin, pairs, heads)


def _cosine(graph: Graph, angle: str, dtype: np.dtype[Any]) -> str:
    """Return the cosine, for float32 as 1 - 2·sin²(angle/2): older runtimes load the file, too.

    onnxruntime has had Sin in float64 for long, but Cos only since 1.29. The detour is off by some roundings of 2^-53,
    nothing for float32, but too many for float64 itself.
    """
    if dtype == FLOAT64:
        return graph.node("Cos", [angle], "cos")
    half = graph.node("Mul", [angle, graph.scalar(0.5, FLOAT64)], "half_angle")
    sine = graph.node("Sin", [half], "sin_of_half")
    square = graph.node("Mul", [sine, sine], "sin_of_half/squared")
    twice = graph.node("Mul", [square, graph.scalar(2.0, FLOAT64)], "sin_of_half/squared_twice")
    return graph.node("Sub", [graph.scalar(1.0, FLOAT64), twice], "cos")


def _scaled(
    graph: Graph, value: str, factor: float, name: str, angle_dtype: Any, dtype: np.dtype[Any]
) -> str:
    value = graph.cast(value, angle_dtype, f"{name}_float32", source=FLOAT64)
    if factor != 1:
        value = graph.node("Mul", [value, graph.scalar(factor, angle_dtype)], f"{name}_factor")
    return graph.cast(value, dtype, f"{name}_{dtype}", source=angle_dtype)


def counting(graph: Graph, size: str, name: str) -> str:
    """Return 0, 1, 2, … up to a size, an int64 vector of length 1."""
    zero, one = graph.scalar(0, np.int64), graph.scalar(1, np.int64)
    end = graph.node("Squeeze", [size, graph.ints(0)], f"{name}/end")
    return graph.node("Range", [zero, end, one], f"{name}/count")


def of_tokens(graph: Graph, angles: Angles) -> Angles:
    """Look tables up, so that cos and sin are those of the tokens; a row outside the table fails when it runs.

    Gather counts negative indices from the end: they are sent past the end instead.
    """
    if angles.ids is None:
        return angles
    with graph.scope("lookup"):
        length = graph.size(angles.cos, 0, "table_length")
        negative = graph.node("Less", [angles.ids, graph.ints(0)], "is_negative")
        ids = graph.node("Where", [negative, length, angles.ids], "row")
        cos, sin = (
            _rows(graph, table, ids, angles.pair_axis, name) for table, name in angles.both()
        )
    return replace(angles, cos=cos, sin=sin, ids=None, pair_axis=None)


def _rows(graph: Graph, table: str, ids: str, pair_axis: tuple[int, ...] | None, name: str) -> str:
    """Return the row of each token; with several axes, each pair's from the row of the axis that it rotates with."""
    if pair_axis is None:
        return graph.node("Gather", [table, ids], name, axis=0)
    found = ""
    for axis in sorted(set(pair_axis)):
        row = graph.node(
            "Gather", [ids, graph.scalar(axis, np.int64)], f"{name}/row_of_axis_{axis}", axis=-1
        )
        value = graph.node("Gather", [table, row], f"{name}/by_axis_{axis}", axis=0)
        mine = graph.initializer(f"pairs_of_axis_{axis}", np.array(pair_axis) == axis)
        found = (
            graph.node("Where", [mine, value, found], f"{name}/to_axis_{axis}") if found else value
        )
    return found
