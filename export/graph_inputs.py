"""Graph inputs → position ids → cos and sin → a Rotator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding

from .cos_sin_nodes import CosSinValues, arange, computed_cos_sin, cos_sin_tables
from .graph import Graph, Shape
from .options import RopeOptions
from .targets import TARGETS
from .targets.base import Rotator

TABLE_NAMES = ("cos_cache", "sin_cache")


def position_inputs(
    rope: RotaryEmbedding, options: RopeOptions
) -> Iterator[tuple[str, Any, Shape]]:
    """Yield name, dtype and shape of the inputs for positions."""
    tokens: list[str | int] = ["tokens"] if options.layout == "thd" else ["batch_or_1", "sequence"]
    if options.positions == "position_ids":
        coordinates = [rope.axes] if rope.axes > 1 else []
        yield "position_ids", np.int64, [*tokens, *coordinates]
    elif options.positions == "offset":
        yield "offset", np.int64, ["batch_or_1"]


def build_rotator(
    graph: Graph,
    rope: RotaryEmbedding,
    options: RopeOptions,
    sizes: tuple[str, str],
    first: str | None = None,
) -> Rotator:
    """Add the nodes from positions to cos and sin, and return the target's rotator.

    sizes: batch and sequence, int64 vectors of length 1. first: the position of the first token
    where positions are consecutive, an int64 vector (batch or 1,); None: 0.
    """
    if options.positions == "position_ids":
        ids = _input_ids(graph, rope, options.layout, sizes)
    else:
        if options.positions == "offset":
            first = "offset"
        ids = _consecutive_ids(graph, rope, sizes[1], first)
    cos_sin = _cos_sin(graph, rope, options, ids)
    rotator = TARGETS[options.target].rotator
    return rotator(graph, rope, cos_sin, options.layout, *sizes, options.compute_dtype)


def batch_and_sequence(graph: Graph, x: str, layout: str) -> tuple[str, str]:
    """Return the sizes of batch and sequence, int64 vectors of length 1.

    Packed tokens (thd) are as many batch rows of one token each.
    """
    if layout == "thd":
        batch = graph.size(x, 0, "batch_size")
        sequence = graph.ints(1)
    else:
        batch = graph.size(x, layout.index("b"), "batch_size")
        sequence = graph.size(x, layout.index("s"), "sequence_length")
    return batch, sequence


def _cos_sin(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, ids: str) -> CosSinValues:
    """Return cos and sin of ids: computed, or tables that are initializers."""
    inverse = options.inverse
    dtype = options.compute_dtype
    if options.max_positions is None:
        return computed_cos_sin(graph, rope, ids, inverse, dtype)
    tables = cos_sin_tables(rope, options.max_positions, inverse, dtype)
    for name, table in zip(TABLE_NAMES, tables, strict=True):
        graph.initializer(name, table)
    pair_axis = rope.spec.pair_axis if rope.axes > 1 else None
    return CosSinValues(*TABLE_NAMES, rope.rotary_dim // 2, ids=ids, pair_axis=pair_axis)


def _input_ids(graph: Graph, rope: RotaryEmbedding, layout: str, sizes: tuple[str, str]) -> str:
    """Return position_ids as (batch or 1, seq), with several axes (batch or 1, seq, axes)."""
    batch, sequence = sizes
    coordinates = [0] if rope.axes > 1 else []
    # One id for many tokens would broadcast. Reshaped to [0, seq], where 0 keeps a size, it fails.
    # (With a Concat of sizes, onnxruntime's optimizer would put a -1 there, which takes any size.)
    if layout == "thd":
        shape = graph.node("Mul", [batch, graph.ints(1, *coordinates)], "ids_shape")
        ids = graph.node("Reshape", ["position_ids", shape], "ids")
        return graph.node("Unsqueeze", [ids, graph.ints(1)], "ids_of_tokens")
    shape = graph.node("Mul", [sequence, graph.ints(0, 1, *coordinates)], "ids_shape")
    ids = graph.node("Reshape", ["position_ids", shape], "ids")
    axes = [rope.axes] if coordinates else []
    graph.value_info(ids, np.int64, ["batch_or_1", "sequence", *axes])
    return ids


def _consecutive_ids(graph: Graph, rope: RotaryEmbedding, sequence: str, first: str | None) -> str:
    """Return first + 0, 1, 2, …, the same on every axis, shaped as those of `_input_ids`."""
    index = arange(graph, sequence, "token_index")
    ids = graph.node("Unsqueeze", [index, graph.ints(0)], "ids")
    if first is not None:
        first_column = graph.node("Unsqueeze", [first, graph.ints(1)], "first_id")
        ids = graph.node("Add", [first_column, ids], "ids_from_first")
    if rope.axes > 1:
        column = graph.node("Unsqueeze", [ids, graph.ints(2)], "ids_column")
        ids = graph.node("Expand", [column, graph.ints(1, 1, rope.axes)], "ids_of_axes")
    return ids
