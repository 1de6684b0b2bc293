"""Pieces of graphs around attention: axis orders and norms."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.export.graph import Graph


def relayout(graph: Graph, x: str, source: str, target: str, heads: int, width: int) -> str:
    """Change the axis order, by way of (batch, seq, heads, width)."""
    if source == target:
        return x
    if source == "bsd":
        x = graph.node("Reshape", [x, graph.ints(0, 0, heads, width)], "by_head")
    elif source == "bhsd":
        x = graph.node("Transpose", [x], "to_bshd", perm=(0, 2, 1, 3))
    if target == "bsd":
        return graph.node("Reshape", [x, graph.ints(0, 0, heads * width)], "merged_heads")
    return graph.node("Transpose", [x], "to_bhsd", perm=(0, 2, 1, 3)) if target == "bhsd" else x


def rms_norm(graph: Graph, x: str, name: str, weight: NDArray[Any], epsilon: float) -> str:
    """Divide the last axis by the root of its mean square, and multiply by `weight`.

    Of elementary ops, ReduceSum among them: it reads alike in every opset, and runs in every dtype.
    """
    square = graph.node("Mul", [x, x], "norm/square")
    total = graph.node("ReduceSum", [square, graph.ints(-1)], "norm/sum", keepdims=1)
    mean = graph.node("Mul", [total, graph.scalar(1 / weight.size, weight.dtype)], "norm/mean")
    shifted = graph.node("Add", [mean, graph.scalar(epsilon, weight.dtype)], "norm/with_epsilon")
    unit = graph.node("Div", [x, graph.node("Sqrt", [shifted], "norm/root")], "norm/unit")
    return graph.node("Mul", [unit, graph.table(f"{name}_norm", np.asarray(weight))], "norm")
