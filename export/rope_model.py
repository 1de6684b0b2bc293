"""export_rope: a rotation as an ONNX model that rotates its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Dtype

from .checks import check_rope, checked_options
from .graph import BATCH, SEQUENCE, Graph, Layout, tensor_shape
from .metadata import POSITION_DESCRIPTIONS, model_metadata, rotation_text
from .nodes import CosSinValues, arange, computed_cos_sin, cos_sin_tables
from .options import Positions, RopeOptions, TargetName
from .targets import TARGETS
from .targets.base import Rotator


def export_rope(
    rope: RotaryEmbedding,
    *,
    target: TargetName = "onnx",
    dtype: Dtype = np.float32,
    layout: Layout = "bhsd",
    inputs: Sequence[str] = ("q", "k"),
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    positions: Positions = "position_ids",
    max_positions: int | None = None,
    inverse: bool = False,
    opset: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> onnx.ModelProto:
    """Return an ONNX model that rotates queries and keys as `rope` does.

    With the default `inputs` the model has inputs q, k and outputs q_rot, k_rot.

    Parameters
    ----------
    rope : RotaryEmbedding
        The rotation, of one sequence length.
    target : {"onnx", "primitive", "ort"}
        "onnx": ai.onnx RotaryEmbedding, opset 23. "primitive": operators of opset 14; the only
        target in float64. "ort": com.microsoft RotaryEmbedding and MRotaryEmbedding.
    dtype : dtype
        Of inputs and outputs: float32, float16, bfloat16 or float64. float16 and bfloat16 are cast
        to float32 before the rotation and back after it.
    layout : {"bhsd", "bshd", "sbhd", "thd", "bsd"}
        Axes of the tensors: b batch, h heads, s sequence, d head_dim, t packed tokens. "bsd" is the
        packed (batch, seq, heads·head_dim).
    inputs : sequence of str
        Names of the tensors to rotate. Each has an output of this name with `_rot` appended.
    num_heads, num_kv_heads : int, optional
        Heads of the first input, and of the others. None: any number. Layout "bsd" needs them, and
        so do frequencies per head, which target "primitive" alone can express.
    positions : {"position_ids", "offset", "none"}
        "position_ids": an int64 input (batch or 1, seq), for "thd" (tokens,); with several axes a
        trailing axis holds the coordinates. "offset": an int64 input (batch or 1,), for
        positions offset + 0, 1, 2, … "none": positions are 0, 1, 2, …
    max_positions : int, optional
        Rows of the cos and sin tables, which become initializers; other positions fail at run time.
        Their pairs must rotate with one axis each.
        None: cos and sin are computed in the graph, without a limit. Their angles are rounded to
        float64, which adds |angle|·2^-53·A·(|x_a| + |x_b|) to the error: most of it in float64.
    inverse : bool
        Undo the rotation: rotate by the negative angle and divide by the attention factor.
    opset : int, optional
        Opset of the model; by default the lowest that the target supports.
    metadata : mapping of str to str, optional
        Further metadata entries of the model. Keys that the export itself writes are refused.

    Returns
    -------
    onnx.ModelProto
        The model; its metadata hold the options, which `validate` reads.

    Raises
    ------
    TypeError, ValueError
        Before anything is built, if an argument is invalid or the target cannot express the
        rotation. The text names the targets that can.

    References
    ----------
    https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html

    onnxruntime, docs/ContribOperators.md, com.microsoft.RotaryEmbedding and MRotaryEmbedding

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> model = export.export_rope(RotaryEmbedding(16), target="onnx", max_positions=8)
    >>> [value.name for value in model.graph.input]
    ['q', 'k', 'position_ids']
    >>> [value.name for value in model.graph.output]
    ['q_rot', 'k_rot']
    """
    check_rope(rope)
    given = RopeOptions(
        target=target,
        dtype=dtype,
        layout=layout,
        inputs=inputs,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        positions=positions,
        max_positions=max_positions,
        inverse=inverse,
        opset=opset,
    )
    options = checked_options(given, rope)
    entries = model_metadata(rope, options, metadata)
    graph = Graph()
    descriptions = POSITION_DESCRIPTIONS | dict.fromkeys(options.inputs, "Vectors to rotate.")
    compute_dtype = options.compute_dtype
    shapes = {
        name: tensor_shape(options.layout, heads or f"{name}_heads", rope.head_dim)
        for name, heads in options.heads.items()
    }
    for name, shape in shapes.items():
        graph.input(name, options.dtype, shape)
    declare_positions(graph, rope, options)
    sizes = batch_and_sequence(graph, options.inputs[0], options.layout)
    ids = position_values(graph, rope, options, sizes)
    rotator = build_rotator(graph, rope, options, sizes, ids)
    for name, heads in options.heads.items():
        with graph.scope(name):
            x = graph.cast(name, compute_dtype, f"to_{compute_dtype}", source=options.dtype)
            y = rotator.rotate(x, heads)
            y = graph.cast(y, options.dtype, f"to_{options.dtype}", source=compute_dtype)
        graph.output(y, f"{name}_rot", options.dtype, shapes[name])
        descriptions[f"{name}_rot"] = f"The vectors of {name}, rotated."
    return graph.model(
        "rotary_embedding",
        opset=options.opset,
        doc=rotation_text(rope),
        descriptions=descriptions,
        metadata=entries,
    )


def declare_positions(graph: Graph, rope: RotaryEmbedding, options: RopeOptions) -> None:
    """Declare the input for positions, if there is one."""
    if options.positions == "position_ids":
        tokens = ["tokens"] if options.layout == "thd" else [BATCH, SEQUENCE]
        coordinates = [rope.axes] if rope.axes > 1 else []
        graph.input("position_ids", np.int64, [*tokens, *coordinates])
    elif options.positions == "offset":
        graph.input("offset", np.int64, [BATCH])


def position_values(
    graph: Graph,
    rope: RotaryEmbedding,
    options: RopeOptions,
    sizes: tuple[str, str],
    first: str | None = None,
) -> str:
    """Return the position ids (batch or 1, seq), with several axes (batch or 1, seq, axes).

    sizes: batch and sequence, int64 vectors of length 1. first: the position of the first token
    where positions are consecutive, an int64 vector (batch or 1,); None: 0.
    """
    if options.positions == "position_ids":
        return _input_ids(graph, rope, options.layout, sizes)
    if options.positions == "offset":
        first = graph.node("Expand", ["offset", sizes[0]], "offset_of_rows")
    return of_axes(graph, rope, _consecutive_ids(graph, sizes[1], first))


def build_rotator(
    graph: Graph, rope: RotaryEmbedding, options: RopeOptions, sizes: tuple[str, str], ids: str
) -> Rotator:
    """Add the nodes from positions to cos and sin, and return the target's rotator.

    sizes: batch and sequence, int64 vectors of length 1. ids: as of `position_values`.
    """
    dtype = options.compute_dtype
    if options.max_positions is None:
        cos_sin = computed_cos_sin(graph, rope, ids, options.inverse, dtype)
    else:
        tables = cos_sin_tables(rope, options.max_positions, options.inverse, dtype)
        cos = graph.initializer("cos_cache", tables[0])
        sin = graph.initializer("sin_cache", tables[1])
        pair_axis = rope.spec.pair_axis if rope.axes > 1 else None
        cos_sin = CosSinValues(cos, sin, rope.rotary_dim // 2, ids=ids, pair_axis=pair_axis)
    rotator = TARGETS[options.target].rotator
    return rotator(graph, rope, cos_sin, options.layout, *sizes, dtype)


def batch_and_sequence(graph: Graph, x: str, layout: str) -> tuple[str, str]:
    """Return the sizes of batch and sequence, int64 vectors of length 1.

    Packed tokens (thd) are as many batch rows of one token each.
    """
    if layout == "thd":
        return graph.size(x, 0, "batch_size"), graph.ints(1)
    batch = graph.size(x, layout.index("b"), "batch_size")
    return batch, graph.size(x, layout.index("s"), "sequence_length")


def _input_ids(graph: Graph, rope: RotaryEmbedding, layout: str, sizes: tuple[str, str]) -> str:
    """Return position_ids as (batch, seq), with several axes (batch, seq, axes)."""
    batch, sequence = sizes
    coordinates = [0] if rope.axes > 1 else []
    # One id for many tokens would broadcast. Reshaped to [0, seq], where 0 keeps a size, it fails.
    # (With a Concat of sizes, onnxruntime's optimizer would put a -1 there, which takes any size.)
    if layout == "thd":
        shape = graph.node("Mul", [batch, graph.ints(1, *coordinates)], "ids_shape")
        ids = graph.node("Reshape", ["position_ids", shape], "ids")
        return graph.node("Unsqueeze", [ids, graph.ints(1)], "ids_of_tokens")
    # One row for all is expanded first: the planner of onnxruntime trusts the declared batch.
    ones = graph.ints(*[1] * (1 + len(coordinates)))
    shape = graph.node("Concat", [batch, ones], "ids_of_rows/shape", axis=0)
    rows = graph.node("Expand", ["position_ids", shape], "ids_of_rows")
    shape = graph.node("Mul", [sequence, graph.ints(0, 1, *coordinates)], "ids_shape")
    ids = graph.node("Reshape", [rows, shape], "ids")
    axes = [rope.axes] if coordinates else []
    graph.value_info(ids, np.int64, [BATCH, SEQUENCE, *axes])
    return ids


def _consecutive_ids(graph: Graph, sequence: str, first: str | None) -> str:
    """Return first + 0, 1, 2, …, (batch or 1, seq)."""
    index = arange(graph, sequence, "token_index")
    ids = graph.node("Unsqueeze", [index, graph.ints(0)], "ids")
    if first is not None:
        first_column = graph.node("Unsqueeze", [first, graph.ints(1)], "first_id")
        ids = graph.node("Add", [first_column, ids], "ids_from_first")
    return ids


def of_axes(graph: Graph, rope: RotaryEmbedding, ids: str) -> str:
    """Return ids (batch or 1, seq), the same on every axis."""
    if rope.axes == 1:
        return ids
    column = graph.node("Unsqueeze", [ids, graph.ints(2)], "ids_column")
    return graph.node("Expand", [column, graph.ints(1, 1, rope.axes)], "ids_of_axes")
