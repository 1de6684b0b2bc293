"""export_rope: a rotation as an ONNX model that rotates its inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from numpy.typing import DTypeLike

from rope_cpu import RotaryEmbedding

from .graph import Graph
from .graph_inputs import batch_and_sequence, build_rotator, position_inputs
from .layouts import tensor_shape
from .metadata import POSITION_DESCRIPTIONS, model_metadata, rotation_text
from .options import RopeOptions, check_rotary_embedding


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
        "onnx": ai.onnx RotaryEmbedding, opset 23. "primitive": operators of opset 13 inside one
        model-local function; the only target in float64. "ort": com.microsoft RotaryEmbedding and
        MRotaryEmbedding.
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
    check_rotary_embedding(rope)
    options = RopeOptions(
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
    options.check_rope(rope)
    return _build_model(rope, options, model_metadata(rope, options, metadata))


def _build_model(
    rope: RotaryEmbedding, options: RopeOptions, metadata: dict[str, str]
) -> onnx.ModelProto:
    graph = Graph()
    dtype = options.dtype
    compute_dtype = options.compute_dtype
    shapes = {
        name: tensor_shape(options.layout, heads or f"{name}_heads", rope.head_dim)
        for name, heads in options.heads.items()
    }
    for name, shape in shapes.items():
        graph.input(name, dtype, shape)
    for declaration in position_inputs(rope, options):
        graph.input(*declaration)
    sizes = batch_and_sequence(graph, options.inputs[0], options.layout)
    rotator = build_rotator(graph, rope, options, sizes)
    for name, heads in options.heads.items():
        with graph.scope(name):
            x = graph.cast(name, compute_dtype, f"to_{compute_dtype}", source=dtype)
            y = rotator.rotate(x, heads)
            y = graph.cast(y, dtype, f"to_{dtype}", source=compute_dtype)
        graph.output(y, f"{name}_rot", dtype, shapes[name])
    return graph.model(
        "rotary_embedding",
        opset=options.opset,
        doc=rotation_text(rope),
        descriptions=_descriptions(options),
        functions=rotator.functions(options.opset),
        metadata=metadata,
    )


def _descriptions(options: RopeOptions) -> dict[str, str]:
    """Return the doc strings of inputs and outputs."""
    names = dict.fromkeys(options.inputs, "Vectors to rotate.")
    rotated = {f"{name}_rot": f"The vectors of {name}, rotated." for name in options.inputs}
    return POSITION_DESCRIPTIONS | names | rotated
