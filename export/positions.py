"""From what a graph is fed to the angles of its tokens, and to what rotates by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rope_cpu.export import angles as angle_ops
from rope_cpu.export.angles import Angles, counting
from rope_cpu.export.graph import Graph, Shape
from rope_cpu.export.layouts import LAYOUTS
from rope_cpu.export.operators import OnnxRotator, OrtRotator
from rope_cpu.export.options import RopeOptions
from rope_cpu.export.primitive import PrimitiveRotator
from rope_cpu.export.rotate import Rotator
from rope_cpu.export.targets import core_of

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

ROTATORS: dict[str, type[Rotator]] = {"primitive": PrimitiveRotator, "onnx": OnnxRotator, "ort": OrtRotator}


def rotator_of(
    graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sizes: tuple[str, str], first: str | None = None
) -> Rotator:
    """Add what comes before the rotation, positions and angles, and return what rotates.

    sizes: batch and sequence, int64 vectors of length 1; first: the position of the first token where tokens are
    counted, an int64 vector (batch or 1,), 0 where it is None.
    """
    core = core_of(np.dtype(options.dtype))
    rotator = ROTATORS[options.target](
        graph, rope, _angles(graph, rope, options, sizes, first, core), options.layout, *sizes, core
    )
    rotator.prepare()
    return rotator


def sizes_of(graph: Graph, x: str, layout: str) -> tuple[str, str]:
    """Return the sizes of batch and sequence, int64 vectors of length 1; a packed token is a batch row of its own."""
    axis = LAYOUTS[layout].axis
    if layout == "thd":
        return graph.size(x, axis("tokens"), "batch_size"), graph.ints(1)
    return graph.size(x, axis("batch"), "batch_size"), graph.size(x, axis("sequence"), "sequence_length")


def _angles(
    graph: Graph,
    rope: RotaryEmbedding,
    options: RopeOptions,
    sizes: tuple[str, str],
    first: str | None,
    core: np.dtype[Any],
) -> Angles:
    pairs = rope.rotary_dim // 2
    if options.token_tables:
        return _token_tables(graph, options.layout, pairs, core)
    given = options.positions == "position_ids"
    ids = _given_ids(graph, rope, options, sizes) if given else _counted_ids(graph, rope, options, sizes[1], first)
    if not options.tables:
        return angle_ops.computed(graph, rope, ids, options.inverse, core)
    owner = angle_ops.owners(rope.spec.inv_freq[0]) if rope.axes > 1 else None
    names = ("cos_cache", "sin_cache")
    if options.table_inputs:
        cos, sin = (graph.input(name, core, ["table_length", pairs]) for name in names)
    else:
        made = angle_ops.tables(rope, options.max_positions or 0, options.inverse, core)
        cos, sin = (graph.table(name, table) for name, table in zip(names, made, strict=True))
    return Angles(cos, sin, pairs, ids=ids, owner=owner)


def _token_tables(graph: Graph, layout: str, pairs: int, core: np.dtype[Any]) -> Angles:
    packed = layout == "thd"
    shape: Shape = ["tokens", pairs] if packed else ["batch_or_1", "sequence", pairs]
    cos, sin = (graph.input(name, core, shape) for name in ("cos_cache", "sin_cache"))
    if packed:
        cos, sin = (graph.node("Unsqueeze", [name, graph.ints(1)], f"{name}_of_tokens") for name in (cos, sin))
    return Angles(cos, sin, pairs)


def _given_ids(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sizes: tuple[str, str]) -> str:
    """Declare position_ids and return them as (batch or 1, seq), with several axes (batch or 1, seq, axes)."""
    packed, tail = options.layout == "thd", [rope.axes] if rope.axes > 1 else []
    shape: list[str | int] = ["tokens"] if packed else ["batch_or_1", "sequence"]
    ids = graph.input("position_ids", options.position_dtype, [*shape, *tail])
    # One id for many tokens would broadcast; reshaped to [0, seq], 0 keeping a size, it fails instead. (As a Concat
    # of sizes, onnxruntime's optimizer would put a -1 there, which takes anything.)
    size, place = (sizes[0], [1]) if packed else (sizes[1], [0, 1])
    exact = graph.node("Mul", [size, graph.ints(*place, *(0 for _ in tail))], "ids_shape")
    ids = graph.node("Reshape", [ids, exact], "ids")
    return graph.node("Unsqueeze", [ids, graph.ints(1)], "ids_of_tokens") if packed else ids


def _counted_ids(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sequence: str, first: str | None) -> str:
    """Return first + 0, 1, 2, …, the same on every axis, shaped as `_given_ids` are."""
    ids = graph.node("Unsqueeze", [counting(graph, sequence, "token_index"), graph.ints(0)], "ids")
    if options.positions == "offset":
        first = graph.input("offset", options.position_dtype, ["batch_or_1"])
    if first is not None:
        if options.position_dtype != "int64":
            ids = graph.cast(ids, options.position_dtype, "ids_real")
        ids = graph.node("Add", [graph.node("Unsqueeze", [first, graph.ints(1)], "first_id"), ids], "ids_from_first")
    if rope.axes > 1:
        column = graph.node("Unsqueeze", [ids, graph.ints(2)], "ids_column")
        ids = graph.node("Expand", [column, graph.ints(1, 1, rope.axes)], "ids_of_axes")
    return ids
