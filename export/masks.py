"""Which keys a query attends to, as tensors inside a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cos_sin_nodes import counting
from .graph import Graph, Shape

INPUT = "attention_mask"

# Shape of the input for each kind of mask.
_BY_HEAD: Shape = ["batch_or_1", "heads_or_1", "sequence", "total_length"]
SHAPES: dict[str, Shape] = {
    "padding": ["batch", "total_length"],
    "bool": _BY_HEAD,
    "float": _BY_HEAD,
}


@dataclass(frozen=True)
class Lengths:
    """Sizes in a graph, int64 vectors of length 1: new tokens, those in the past, and both together."""

    sequence: str
    past: str | None
    total: str


def lengths_of(graph: Graph, sequence: str, past_key: str | None) -> Lengths:
    """Return the lengths; past_key: (batch, heads, past, head_dim) where there is one."""
    if past_key is None:
        return Lengths(sequence, None, sequence)
    past = graph.size(past_key, 2, "past_length")
    return Lengths(sequence, past, graph.node("Add", [past, sequence], "total_length"))


def by_distance(graph: Graph, lengths: Lengths, window: int | None) -> str:
    """Return (seq, total), true where a key is not after the query and within the window."""
    key = counting(graph, lengths.total, "key_index")
    query = counting(graph, lengths.sequence, "query_index")
    if lengths.past is not None:
        query = graph.node("Add", [query, lengths.past], "query_index/from_past")
    query = graph.node("Unsqueeze", [query, graph.ints(1)], "query_index/column")
    allowed = graph.node("LessOrEqual", [key, query], "is_not_later")
    if window is None:
        return allowed
    oldest = graph.node("Sub", [query, graph.scalar(window, np.int64)], "query_index/before_window")
    return graph.node(
        "And", [allowed, graph.node("Greater", [key, oldest], "is_in_window")], "is_near"
    )


def allowed(graph: Graph, lengths: Lengths, mask: str, near: str | None) -> str | None:
    """Return where attention is allowed, by the input mask where it is boolean, and by `near`; None where everywhere.

    The result is (seq, total) or (batch or 1, heads or 1, seq, total).
    """
    if mask not in ("padding", "bool"):
        return near
    value = _padding(graph, lengths) if mask == "padding" else INPUT
    return value if near is None else graph.node("And", [value, near], "is_allowed")


def _padding(graph: Graph, lengths: Lengths) -> str:
    """Return the input (batch, total) as (batch, 1, seq, total)."""
    value = graph.node("Unsqueeze", [INPUT, graph.ints(1, 2)], "mask_by_head")
    # onnxruntime's Attention wants the query axis in full; a size times [0, 0, 1, 0] plus ones elsewhere says so.
    rows = graph.node("Mul", [lengths.sequence, graph.ints(0, 0, 1, 0)], "mask_shape/rows")
    shape = graph.node("Add", [rows, graph.ints(1, 1, 0, 1)], "mask_shape")
    return graph.node("Expand", [value, shape], "mask")


def as_bias(graph: Graph, where: str, bias: str | None, compute_dtype: np.dtype[Any]) -> str:
    """Return a mask to be added: `bias`, or 0, where attention is allowed, minus infinity elsewhere."""
    nothing = graph.scalar(0.0, compute_dtype) if bias is None else bias
    return graph.node(
        "Where", [where, nothing, graph.scalar(-np.inf, compute_dtype)], "mask_to_add"
    )
