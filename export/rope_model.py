"""export_rope: a rotation as an ONNX model that rotates its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding

from .graph import Graph
from .graph_inputs import inputs_of, rotator_of, sizes_of
from .layouts import shape_of
from .metadata import described, entries
from .options import RopeOptions, is_rotary_embedding, options_given


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
    num_heads, num_kv_heads: heads of the first and of the other inputs; None: whatever comes. Layout bsd needs them, as
        do frequencies per head, which target "primitive" alone can express.
    positions: "position_ids" (an input (batch or 1, seq), thd (tokens,), with several axes a trailing axis of
        coordinates), "offset" (an input (batch or 1,): positions offset + 0, 1, 2, …) or "none" (0, 1, 2, …).
    position_dtype: int64, or float32 or float64 where angles are computed in the graph.
    max_positions: rows of cos and sin tables, which become initializers; other positions fail when the model runs.
        None: cos and sin are computed in the graph, without a limit, of angles rounded to float64, which adds
        |angle|·2^-53·A·(|x_a| + |x_b|) to the error: in float64 most of it.
    table_inputs: cos_cache and sin_cache (table, pairs), of any length, are inputs, float32 (float64 for float64); with
        positions "none" they are those of the tokens, (batch or 1, seq, pairs), thd (tokens, pairs). Not together with
        max_positions or inverse. Tables of either kind need pairs that rotate with one axis each.
    inverse: undo the rotation: the angle −θ and the factor 1/A.
    opset: of the model; None: the lowest that the target can be written in.
    metadata: further entries for the file, strings to strings; keys that the file uses itself are refused.

    Raises TypeError or ValueError, before anything is built, where the target cannot express the rotation, saying why
    and which can.

    Source: https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html and onnxruntime's docs/ContribOperators.md
    """
    is_rotary_embedding(rope)
    options = RopeOptions(**options_given(RopeOptions, locals()))
    options.check_rope(rope)
    return _model(rope, options, entries(rope, options, metadata))


def _model(
    rope: RotaryEmbedding, options: RopeOptions, metadata: dict[str, str]
) -> onnx.ModelProto:
    graph, dtype, compute_dtype = Graph(), options.dtype, options.compute_dtype
    shapes = {
        name: shape_of(options.layout, heads or f"{name}_heads", rope.head_dim)
        for name, heads in options.heads.items()
    }
    for name, shape in shapes.items():
        graph.input(name, dtype, shape)
    for declared in inputs_of(rope, options):
        graph.input(*declared)
    rotator = rotator_of(graph, rope, options, sizes_of(graph, options.inputs[0], options.layout))
    for name, heads in options.heads.items():
        with graph.scope(name):
            x = graph.cast(name, compute_dtype, f"to_{compute_dtype}", source=dtype)
            y = graph.cast(rotator.rotate(x, heads), dtype, f"to_{dtype}", source=compute_dtype)
        graph.output(y, f"{name}_rot", dtype, shapes[name])
    return graph.model(
        "rotary_embedding",
        opset=options.opset,
        doc=described(rope),
        functions=rotator.functions(options.opset),
        metadata=metadata,
    )
