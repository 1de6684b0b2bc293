"""Which keys a query attends to, as tensors inside a graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rope_cpu.export.angles import counting
from rope_cpu.export.attention_options import AttentionOptions
from rope_cpu.export.graph import Graph
from rope_cpu.export.targets import core_of


@dataclass(frozen=True)
class Lengths:
    """Sizes in a graph, int64 vectors of length 1: tokens that come in, those that passed, and both together."""

    sequence: str
    past: str | None
    total: str


def lengths_of(graph: Graph, sequence: str, past_key: str | None) -> Lengths:
    """Return the lengths; past_key: (batch, heads, past, head_dim) where there is one."""
    if past_key is None:
        return Lengths(sequence, None, sequence)
    past = graph.size(past_key, 2, "past_length")
    return Lengths(sequence, past, graph.node("Add", [past, sequence], "total_length"))


def by_distance(graph: Graph, options: AttentionOptions, lengths: Lengths) -> str | None:
    """Return (seq, total), true where a key is not after the query and within the window; None where all are."""
    if not options.causal:
        return None
    key = counting(graph, lengths.total, "key_index")
    query = counting(graph, lengths.sequence, "query_index")
    if lengths.past is not None:
        query = graph.node("Add", [query, lengths.past], "query_index/from_past")
    query = graph.node("Unsqueeze", [query, graph.ints(1)], "query_index/column")
    allowed = graph.node("LessOrEqual", [key, query], "is_not_later")
    if options.window is None:
        return allowed
    oldest = graph.node("Sub", [query, graph.scalar(options.window, np.int64)], "query_index/before_window")
    return graph.node("And", [allowed, graph.node("Greater", [key, oldest], "is_in_window")], "is_near")


def by_mask(graph: Graph, options: AttentionOptions, lengths: Lengths) -> str | None:
    """Declare the mask input, and return it where it is boolean: (batch or 1, heads or 1, seq, total)."""
    if options.mask == "padding":
        mask = graph.input("attention_mask", np.bool_, ["batch", "total_length"])
        mask = graph.node("Unsqueeze", [mask, graph.ints(1, 2)], "mask_by_head")
        # onnxruntime's Attention wants the query axis in full; a size times [0, 0, 1, 0] plus ones elsewhere says so.
        rows = graph.node("Mul", [lengths.sequence, graph.ints(0, 0, 1, 0)], "mask_shape/rows")
        shape = graph.node("Add", [rows, graph.ints(1, 1, 0, 1)], "mask_shape")
        return graph.node("Expand", [mask, shape], "mask")
    if options.mask == "bool":
        return graph.input("attention_mask", np.bool_, ["batch_or_1", "heads_or_1", "sequence", "total_length"])
    return None


def boolean_mask(graph: Graph, options: AttentionOptions, lengths: Lengths, distance: bool) -> str | None:
    """Return where attention is allowed, from the mask input and, if `distance` is set, causality and window."""
    near = by_distance(graph, options, lengths) if distance else None
    mask = by_mask(graph, options, lengths)
    if near is None or mask is None:
        return near or mask
    return graph.node("And", [mask, near], "is_allowed")


def added_mask(graph: Graph, options: AttentionOptions) -> str | None:
    """Declare the mask input where it is added to the scores, and return it in the core's dtype."""
    if options.mask != "float":
        return None
    dtype = np.dtype(options.rope.dtype)
    mask = graph.input("attention_mask", dtype, ["batch_or_1", "heads_or_1", "sequence", "total_length"])
    core = core_of(dtype)
    return mask if dtype == core else graph.cast(mask, core, "mask_float32")


def as_bias(graph: Graph, allowed: str, added: str | None, core: np.dtype[np.generic]) -> str:
    """Return a mask to be added: `added`, or 0, where attention is allowed, minus infinity elsewhere."""
    nothing = graph.scalar(0.0, core) if added is None else added
    return graph.node("Where", [allowed, nothing, graph.scalar(-np.inf, core)], "mask_to_add")
