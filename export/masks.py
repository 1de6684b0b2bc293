"""Attention masks as tensors inside a graph: boolean, true where a query attends to a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cos_sin_nodes import arange
from .graph import Graph, Shape

MASK_INPUT = "attention_mask"
PAST_LENGTHS = "past_lengths"

# Shape of the input for each kind of mask.
_SCORES_SHAPE: Shape = ["batch_or_1", "heads_or_1", "sequence", "total_length"]
MASK_SHAPES: dict[str, Shape] = {
    "padding": ["batch", "total_length"],
    "bool": _SCORES_SHAPE,
    "float": _SCORES_SHAPE,
}


@dataclass(frozen=True)
class SharedCache:
    """A cache whose rows have lengths: keys and values, inputs of the graph.

    past, total: number of tokens of each row before and after the new ones, int64 (batch,).
    """

    key: str
    value: str
    past: str
    total: str


@dataclass(frozen=True)
class Lengths:
    """Numbers of new tokens, of tokens in the past, and of both, as int64 vectors of length 1.

    With a shared cache, `past` is (batch,), and `total` that of the longest row.
    """

    sequence: str
    past: str | None
    total: str
    shared: SharedCache | None = None


def sequence_lengths(graph: Graph, sequence: str, past_key: str | None) -> Lengths:
    """Return the lengths; past_key: (batch, heads, past, head_dim), None without a past."""
    if past_key is None:
        return Lengths(sequence, None, sequence)
    past = graph.size(past_key, 2, "past_length")
    total = graph.node("Add", [past, sequence], "total_length")
    return Lengths(sequence, past, total)


def shared_cache_lengths(graph: Graph, batch: str, sequence: str) -> Lengths:
    """Return the lengths of the rows of a shared cache, checked when the graph runs.

    ONNX has no operator that fails on purpose. Gather fails outside its data, and onnxruntime's
    error holds the name of the node.
    """
    # One length for many rows would broadcast; reshaped to the batch, it fails instead.
    past = graph.node("Reshape", [PAST_LENGTHS, batch], "past_lengths_are_one_for_each_row")
    graph.value_info(past, np.int64, ["batch"])
    unchecked = graph.node("Add", [past, sequence], "total_length_by_row/unchecked")
    capacity = graph.size("past_key", 2, "capacity")
    is_beyond = graph.node("Greater", [unchecked, capacity], "is_beyond_capacity")
    is_negative = graph.node("Less", [past, graph.ints(0)], "is_negative")
    is_wrong = graph.node("Or", [is_beyond, is_negative], "is_outside_cache")
    index = graph.cast(is_wrong, np.int64, "is_outside_cache/index")
    name = "past_lengths_must_be_0_or_more_and_with_the_new_tokens_at_most_the_capacity"
    zero = graph.node("Gather", [graph.ints(0), index], name)
    past = graph.node("Add", [past, zero], "past_length_by_row")
    total = graph.node("Add", [past, sequence], "total_length_by_row")
    longest = graph.node("ReduceMax", [total], "total_length", keepdims=1)
    shared = SharedCache("past_key", "past_value", past, total)
    return Lengths(sequence, past, longest, shared)


def causal_mask(graph: Graph, lengths: Lengths, window: int | None, keys: str | None = None) -> str:
    """Return the causal mask (seq, keys), restricted to `window` keys where that is given.

    keys: their number, `lengths.total` by default. Of a shared cache: (batch, 1, seq, keys).
    """
    key = arange(graph, keys or lengths.total, "key_index")
    query = arange(graph, lengths.sequence, "query_index")
    past = lengths.past
    new_axes = graph.ints(1)
    if lengths.shared is not None:
        column = [lengths.shared.past, graph.ints(1)]
        past = graph.node("Unsqueeze", column, "query_index/past_column")
        new_axes = graph.ints(1, 3)
    if past is not None:
        query = graph.node("Add", [query, past], "query_index/from_past")
    query = graph.node("Unsqueeze", [query, new_axes], "query_index/column")
    not_later = graph.node("LessOrEqual", [key, query], "is_not_later")
    if window is None:
        return not_later
    oldest = graph.node("Sub", [query, graph.scalar(window, np.int64)], "query_index/before_window")
    in_window = graph.node("Greater", [key, oldest], "is_in_window")
    return graph.node("And", [not_later, in_window], "is_near")


def boolean_mask(graph: Graph, lengths: Lengths, kind: str, causal: str | None) -> str | None:
    """Return the input mask, if it is boolean, and the causal mask combined; None without either.

    kind: of the input mask. The result is (seq, total), or (batch or 1, heads or 1, seq, total).
    """
    if kind not in ("padding", "bool"):
        return causal
    mask = _expanded_padding(graph, lengths) if kind == "padding" else MASK_INPUT
    if causal is None:
        return mask
    return graph.node("And", [mask, causal], "is_allowed")


def _expanded_padding(graph: Graph, lengths: Lengths) -> str:
    """Return the padding mask (batch, total) as (batch, 1, seq, total)."""
    value = graph.node("Unsqueeze", [MASK_INPUT, graph.ints(1, 2)], "mask_by_head")
    # onnxruntime's Attention does not broadcast the query axis. The shape for Expand,
    # [1, 1, seq, 1], is computed as seq·[0, 0, 1, 0] + [1, 1, 0, 1].
    rows = graph.node("Mul", [lengths.sequence, graph.ints(0, 0, 1, 0)], "mask_shape/rows")
    shape = graph.node("Add", [rows, graph.ints(1, 1, 0, 1)], "mask_shape")
    return graph.node("Expand", [value, shape], "mask")


def with_sinks(graph: Graph, scores: str, sinks: str, heads: Sequence[int]) -> str:
    """Return scores, or a bias of scores, with one more column: the sink of each head.

    scores: (batch, *heads, seq, total). sinks: as many as heads.
    """
    by_head = graph.node("Reshape", [sinks, graph.ints(1, *heads, 1, 1)], "sinks")
    axes = len(heads) + 3
    # The shape of one column: the shape of the scores, times 1, …, 1, 0, plus 0, …, 0, 1.
    shape = graph.node("Shape", [scores], "scores_shape")
    rows = graph.node("Mul", [shape, graph.ints(*[1] * (axes - 1), 0)], "sinks/rows")
    shape = graph.node("Add", [rows, graph.ints(*[0] * (axes - 1), 1)], "sinks/shape")
    column = graph.node("Expand", [by_head, shape], "sinks/column")
    return graph.node("Concat", [scores, column], "scores_with_sinks", axis=-1)


def mask_as_bias(graph: Graph, mask: str, bias: str | None, compute_dtype: np.dtype[Any]) -> str:
    """Return a mask to add to the scores: `bias` or 0 where `mask` is true, elsewhere −inf."""
    if bias is None:
        bias = graph.scalar(0.0, compute_dtype)
    return graph.node("Where", [mask, bias, graph.scalar(-np.inf, compute_dtype)], "mask_to_add")
