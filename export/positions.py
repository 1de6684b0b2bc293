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


def rotator_of(graph: Graph, rope: RotaryEmbedding, options: RopeOptions) -> Rotator:
    """Add what comes before the rotation, positions and angles, and return what rotates."""
    x, axes = options.inputs[0], LAYOUTS[options.layout].axes
    packed = options.layout == "thd"
    batch = graph.size(x, axes.index("tokens" if packed else "batch"), "batch_size")
    sequence = graph.ints(1) if packed else graph.size(x, axes.index("sequence"), "sequence_length")
    core = core_of(np.dtype(options.dtype))
    angles = _angles(graph, rope, options, batch, sequence, core)
    rotator = ROTATORS[options.target](graph, rope, angles, options.layout, batch, sequence, core)
    rotator.prepare()
    return rotator


def _angles(
    graph: Graph, rope: RotaryEmbedding, options: RopeOptions, batch: str, sequence: str, core: np.dtype[Any]
) -> Angles:
    pairs = rope.rotary_dim // 2
    if options.token_tables:
        return _token_tables(graph, options.layout, pairs, core)
    ids = _ids(graph, rope, options, batch, sequence)
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


def _ids(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, batch: str, sequence: str) -> str:
    """Return ids (batch or 1, seq), with several axes (batch or 1, seq, axes)."""
    axes = rope.axes
    if options.positions == "position_ids":
        packed, tail = options.layout == "thd", [axes] if axes > 1 else []
        shape: list[str | int] = ["tokens"] if packed else ["batch_or_1", "sequence"]
        ids = graph.input("position_ids", options.position_dtype, [*shape, *tail])
        # One id for many tokens would broadcast; reshaped to [0, seq], 0 keeping a size, it fails instead. (As a Concat
        # of sizes, onnxruntime's optimizer would put a -1 there, which takes anything.)
        size, place = (batch, [1]) if packed else (sequence, [0, 1])
        exact = graph.node("Mul", [size, graph.ints(*place, *(0 for _ in tail))], "ids_shape")
        ids = graph.node("Reshape", [ids, exact], "ids")
        return graph.node("Unsqueeze", [ids, graph.ints(1)], "ids_of_tokens") if packed else ids
    ids = graph.node("Unsqueeze", [counting(graph, sequence, "token_index"), graph.ints(0)], "ids")
    if options.positions == "offset":
        offset = graph.input("offset", options.position_dtype, ["batch_or_1"])
        first = graph.node("Unsqueeze", [offset, graph.ints(1)], "first_id")
        if options.position_dtype != "int64":
            ids = graph.cast(ids, options.position_dtype, "ids_real")
        ids = graph.node("Add", [first, ids], "ids_from_offset")
    if axes > 1:
        column = graph.node("Unsqueeze", [ids, graph.ints(2)], "ids_column")
        ids = graph.node("Expand", [column, graph.ints(1, 1, axes)], "ids_of_axes")
    return ids
