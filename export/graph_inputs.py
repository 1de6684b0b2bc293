"""From what a graph is fed to the angles of its tokens, and to what rotates by them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rope_cpu import RotaryEmbedding

from . import cos_sin_nodes as angle_ops
from .cos_sin_nodes import Angles, counting
from .graph import Graph, Shape
from .options import RopeOptions
from .targets import TARGETS
from .targets.base import Rotator

CACHES = ("cos_cache", "sin_cache")


def inputs_of(rope: RotaryEmbedding, options: RopeOptions) -> Iterator[tuple[str, Any, Shape]]:
    """Yield name, dtype and shape of the inputs that say where tokens are, and of cos and sin where they are fed."""
    tokens: list[str | int] = ["tokens"] if options.layout == "thd" else ["batch_or_1", "sequence"]
    if options.positions == "position_ids":
        yield (
            "position_ids",
            options.position_dtype,
            [*tokens, *([rope.axes] if rope.axes > 1 else [])],
        )
    elif options.positions == "offset":
        yield "offset", options.position_dtype, ["batch_or_1"]
    if options.table_inputs:
        for name in CACHES:
            rows = tokens if options.token_tables else ["table_length"]
            yield name, options.compute_dtype, [*rows, rope.rotary_dim // 2]


def rotator_of(
    graph: Graph,
    rope: RotaryEmbedding,
    options: RopeOptions,
    sizes: tuple[str, str],
    first: str | None = None,
) -> Rotator:
    """Add what comes before the rotation, positions and angles, and return what rotates.

    sizes: batch and sequence, int64 vectors of length 1; first: the position of the first token where tokens are
    counted, an int64 vector (batch or 1,), 0 where it is None.
    """
    if options.token_tables:
        angles = _given_angles(graph, rope, options)
    elif options.positions == "position_ids":
        angles = _angles(graph, rope, options, _given_ids(graph, rope, options, sizes))
    else:
        first = "offset" if options.positions == "offset" else first
        angles = _angles(graph, rope, options, _counted_ids(graph, rope, options, sizes[1], first))
    return TARGETS[options.target].rotator(
        graph, rope, angles, options.layout, *sizes, options.compute_dtype
    )


def sizes_of(graph: Graph, x: str, layout: str) -> tuple[str, str]:
    """Return the sizes of batch and sequence, int64 vectors of length 1; a packed token is a batch row of its own."""
    if layout == "thd":
        return graph.size(x, 0, "batch_size"), graph.ints(1)
    return graph.size(x, layout.index("b"), "batch_size"), graph.size(
        x, layout.index("s"), "sequence_length"
    )


def _given_angles(graph: Graph, rope: RotaryEmbedding, options: RopeOptions) -> Angles:
    """Return cos and sin that are inputs, those of the tokens."""
    cos, sin = CACHES
    if options.layout == "thd":
        cos, sin = (
            graph.node("Unsqueeze", [name, graph.ints(1)], f"{name}_of_tokens") for name in CACHES
        )
    return Angles(cos, sin, rope.rotary_dim // 2)


def _angles(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, ids: str) -> Angles:
    """Return the angles of ids: computed, or looked up in tables that are inputs or initializers."""
    if not options.tables:
        return angle_ops.computed(graph, rope, ids, options.inverse, options.compute_dtype)
    if options.max_positions is not None:
        made = angle_ops.tables(rope, options.max_positions, options.inverse, options.compute_dtype)
        for name, table in zip(CACHES, made, strict=True):
            graph.initializer(name, table)
    pair_axis = rope.spec.pair_axis if rope.axes > 1 else None
    return Angles(*CACHES, rope.rotary_dim // 2, ids=ids, pair_axis=pair_axis)


def _given_ids(
    graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sizes: tuple[str, str]
) -> str:
    """Return position_ids as (batch or 1, seq), with several axes (batch or 1, seq, axes)."""
    packed, tail = options.layout == "thd", [0] if rope.axes > 1 else []
    # One id for many tokens would broadcast; reshaped to [0, seq], 0 keeping a size, it fails instead. (As a Concat
    # of sizes, onnxruntime's optimizer would put a -1 there, which takes anything.)
    size, place = (sizes[0], [1]) if packed else (sizes[1], [0, 1])
    exact = graph.node("Mul", [size, graph.ints(*place, *tail)], "ids_shape")
    ids = graph.node("Reshape", ["position_ids", exact], "ids")
    return graph.node("Unsqueeze", [ids, graph.ints(1)], "ids_of_tokens") if packed else ids


def _counted_ids(
    graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sequence: str, first: str | None
) -> str:
    """Return first + 0, 1, 2, …, the same on every axis, shaped as `_given_ids` are."""
    ids = graph.node("Unsqueeze", [counting(graph, sequence, "token_index"), graph.ints(0)], "ids")
    if first is not None:
        if options.position_dtype != "int64":
            ids = graph.cast(ids, options.position_dtype, "ids_real")
        ids = graph.node(
            "Add",
            [graph.node("Unsqueeze", [first, graph.ints(1)], "first_id"), ids],
            "ids_from_first",
        )
    if rope.axes > 1:
        column = graph.node("Unsqueeze", [ids, graph.ints(2)], "ids_column")
        ids = graph.node("Expand", [column, graph.ints(1, 1, rope.axes)], "ids_of_axes")
    return ids
