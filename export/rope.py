"""export_rope: a rotary as an ONNX model that rotates its inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import DTypeLike

from rope_cpu import __version__
from rope_cpu.export import angles as angle_ops
from rope_cpu.export.angles import Angles, counting
from rope_cpu.export.graph import Graph
from rope_cpu.export.layouts import LAYOUTS
from rope_cpu.export.operators import OnnxRotator, OrtRotator
from rope_cpu.export.options import RopeOptions
from rope_cpu.export.primitive import PrimitiveRotator
from rope_cpu.export.rotate import Rotator, pairing
from rope_cpu.export.targets import TARGETS, core_of

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

ROTATORS: dict[str, type[Rotator]] = {"primitive": PrimitiveRotator, "onnx": OnnxRotator, "ort": OrtRotator}

TOLERANCE = "|result - exact| <= 1/2 ulp(exact) + 3 u A (|x_a| + |x_b|), u = 2^-53 for float64, else 2^-24"


def export_rope(
    rope: RotaryEmbedding,
    *,
    target: str = "onnx",
    dtype: DTypeLike = np.float32,
    layout: str = "bhsd",
    inputs: Sequence[str] = ("q", "k"),
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    positions: str = "position_ids",
    position_dtype: DTypeLike = np.int64,
    max_positions: int | None = None,
    table_inputs: bool = False,
    inverse: bool = False,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Return an ONNX model that rotates queries and keys as `rope` does: inputs q, k, outputs q_rot, k_rot.

    target: "onnx" (RotaryEmbedding, opset 23), "primitive" (ops of opset 13 inside one model-local function; the only
        one in float64) or "ort" (com.microsoft RotaryEmbedding / MRotaryEmbedding).
    dtype: of inputs and outputs. float16 and bfloat16 are cast to float32 and back around the rotation.
    layout: "bhsd" (batch, heads, seq, head_dim), "bshd", "sbhd", "thd" (packed tokens, heads, head_dim), or "bsd",
        the packed (batch, seq, heads·head_dim).
    inputs: names of the tensors to rotate, each to an output with `_rot` appended.
    num_heads, num_kv_heads: heads of the first and of the other inputs; None: whatever comes (layout bsd needs them).
    positions: "position_ids" (an input (batch or 1, seq), thd (tokens,), with several axes a trailing axis of
        coordinates), "offset" (an input (batch or 1,): positions offset + 0, 1, 2, …) or "none" (0, 1, 2, …).
    position_dtype: int64, or float32 or float64 where angles are computed in the graph.
    max_positions: rows of cos and sin tables, which become initializers; other positions fail when the model runs.
        None: cos and sin are computed in the graph in float64, without a limit.
    table_inputs: cos_cache and sin_cache (table, pairs), of any length, are inputs; with positions "none" they are
        those of the tokens, (batch or 1, seq, pairs), thd (tokens, pairs).
    inverse: undo the rotation: the angle −θ and the factor 1/A.
    opset: of the model; None: the lowest that the target can be written in.
    metadata: further entries for the file.

    Raises TypeError or ValueError, before anything is built, where the target cannot express the rotation, saying why
    and which can.

    Source: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html and onnxruntime's docs/ContribOperators.md
    """
    options = RopeOptions.checked(
        rope,
        target=target,
        dtype=dtype,
        layout=layout,
        inputs=inputs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        positions=positions,
        position_dtype=position_dtype,
        max_positions=max_positions,
        table_inputs=table_inputs,
        inverse=inverse,
        opset=opset,
    )
    graph = Graph()
    for name, heads in zip(options.inputs, options.heads, strict=True):
        graph.input(name, dtype, shape_of(layout, name, heads, rope.head_dim))
    rotator = rotator_of(graph, rope, options)
    for name, heads in zip(options.inputs, options.heads, strict=True):
        with graph.scope(name):
            turned = rotated(graph, rotator, name, heads, np.dtype(dtype))
        graph.output(turned, f"{name}_rot", dtype, shape_of(layout, name, heads, rope.head_dim))
    return graph.model(
        "rotary_embedding",
        opset=options.opset,
        doc=described(rope),
        functions=rotator.functions(options.opset),
        metadata=facts(rope) | options.metadata() | dict(metadata or {}),
    )


def shape_of(layout: str, name: str, heads: int | None, head_dim: int) -> list[str | int]:
    """Return the declared shape of a tensor; strings are dynamic."""
    known = {"heads": heads or f"{name}_heads", "head_dim": head_dim, "hidden": (heads or 0) * head_dim}
    return [known.get(axis, axis) for axis in LAYOUTS[layout].axes]


def rotated(graph: Graph, rotator: Rotator, x: str, heads: int | None, dtype: np.dtype[Any]) -> str:
    """Rotate one tensor, through the core's dtype."""
    if dtype == rotator.core:
        return rotator.rotate(x, heads)
    wide = graph.cast(x, rotator.core, f"to_{rotator.core}")
    return graph.cast(rotator.rotate(wide, heads), dtype, f"to_{dtype}")


def rotator_of(graph: Graph, rope: RotaryEmbedding, options: RopeOptions) -> Rotator:
    """Add what comes before the rotation, positions and angles, and return what rotates."""
    x, axes = options.inputs[0], LAYOUTS[options.layout].axes
    packed = options.layout == "thd"
    batch = graph.size(x, axes.index("tokens" if packed else "batch"), "batch_size")
    sequence = graph.ints(1) if packed else graph.size(x, axes.index("sequence"), "sequence_length")
    core = core_of(np.dtype(options.dtype) if options.dtype != "bfloat16" else np.dtype(np.float32))
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
    shape = ["tokens", pairs] if packed else ["batch_or_1", "sequence", pairs]
    both = [graph.input(name, core, shape) for name in ("cos_cache", "sin_cache")]
    if packed:
        both = [graph.node("Unsqueeze", [name, graph.ints(1)], f"{name}_of_tokens") for name in both]
    return Angles(*both, pairs)


def _ids(graph: Graph, rope: RotaryEmbedding, options: RopeOptions, batch: str, sequence: str) -> str:
    """Return ids (batch or 1, seq), with several axes (batch or 1, seq, axes)."""
    axes = rope.axes
    if options.positions == "position_ids":
        packed, tail = options.layout == "thd", [axes] if axes > 1 else []
        shape = ["tokens"] if packed else ["batch_or_1", "sequence"]
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


def described(rope: RotaryEmbedding) -> str:
    """Say in words what a rotation is."""
    return (
        f"Rotary position embedding, rope type {rope.rope_type}: pair i turns by position · inv_freq[i], its length "
        f"times {rope.attention_factor:.6g}. Pairs: {pairing(rope)}."
    )


def facts(rope: RotaryEmbedding) -> dict[str, str]:
    """Return what a file says about its rotation and its maker."""
    spec = rope.spec
    rotation = {
        "rope_type": rope.rope_type,
        "head_dim": rope.head_dim,
        "rotary_dim": rope.rotary_dim,
        "interleaved": rope.interleaved,
        "blocks": list(rope.blocks),
        "axes": rope.axes,
        "attention_factor": rope.attention_factor,
        "angle_dtype": spec.angle_dtype,
        "lengths": spec.lengths,
        "inv_freq": rope.inv_freq.tolist(),
    }
    return {
        "rope_cpu.version": __version__,
        "rope_cpu.rotation": json.dumps(rotation),
        "rope_cpu.tolerance": TOLERANCE,
    }
