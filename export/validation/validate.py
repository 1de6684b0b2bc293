"""validate: run a model under onnxruntime and compare it with the exact reference."""

from __future__ import annotations

import os
from collections.abc import Iterable

import onnx
from google.protobuf.message import DecodeError
from onnx import numpy_helper

from rope_cpu import RotaryEmbedding
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import cut, first_line
from rope_cpu.array_types import Array

from ..checks import check_rope
from ..metadata import read_options
from ..options import AttentionOptions, RopeOptions
from .attention_validation import AttentionValidation
from .report import Outcome, Report
from .rope_validation import RopeValidation, Validation
from .session import open_session

# Bytes that operating systems allow for a path.
MAX_PATH_BYTES = 4096
# The largest seed.
MAX_SEED = 2**128 - 1


def validate(
    model: onnx.ModelProto | str | os.PathLike[str], rope: RotaryEmbedding, *, seed: int = 0
) -> Report:
    """Check that a model of this package rotates as `rope` does.

    The model is checked statically (full check, strict shape inference, a dtype and a shape for
    every value), and run on inputs chosen to break it: no tokens, one token, left-padded and
    shuffled ids, ids up to the table's end (1,000,000 where cos and sin are computed), and ids past
    it, which it must refuse. Attention over a shared cache runs on rows of different length, and
    must write to no other row than those of the new tokens.

    Parameters
    ----------
    model : onnx.ModelProto, str or os.PathLike
        From `export_rope` or `export_attention`, or the path of a saved one. Its metadata hold the
        options of the export.
    rope : RotaryEmbedding
        The rotation that the model must have, of one sequence length.
    seed : int
        Seed of the random inputs.

    Returns
    -------
    Report
        The outcome of every case. A wrong model raises no error: the report says what failed.

    Raises
    ------
    TypeError
        If `model`, `rope` or `seed` has another type.
    OSError
        If there is no file at the path.
    ValueError
        If the file is no ONNX model, or its metadata hold no options; if `rope` depends on a
        sequence length and has none, or has several; if `seed` is negative.

    Examples
    --------
    >>> from rope_cpu import RotaryEmbedding, export
    >>> rope = RotaryEmbedding(16)
    >>> model = export.export_rope(rope, max_positions=32)
    >>> export.validate(model, rope).passed
    True
    >>> export.validate(model, RotaryEmbedding(16, rope_theta=5e5)).passed
    False
    """
    if not isinstance(model, onnx.ModelProto | str | os.PathLike):
        rule = "be an onnx.ModelProto or a path"
        raise ArgumentTypeError("model", Finding.type_of(model), rule)
    check_rope(rope)
    whole_number("seed", seed, 0, MAX_SEED)
    source = model if isinstance(model, onnx.ModelProto) else os.fspath(model)
    loaded = _load(source) if isinstance(source, str) else source
    options = read_options(loaded)
    title = f"{options.kind} model, target {options.target}, {options.dtype}, opset {options.opset}"
    problem = static_problem(source, loaded)
    static = Outcome("checker, shape inference", seed, (), problem=problem)
    try:
        session = open_session(source)
    except Exception as error:  # onnxruntime's errors have no common class of their own
        message = first_line(error)[-200:]
        failed = Outcome("load", seed, (), problem=f"onnxruntime cannot load it: {message}")
        return Report(title, (static, failed))
    validation: Validation
    if isinstance(options, RopeOptions):
        validation = RopeValidation(session, rope, options)
    else:
        folder = os.path.dirname(source) if isinstance(source, str) else ""
        arrays = _arrays(loaded, folder, options, options.array_shapes(rope.head_dim))
        validation = AttentionValidation(session, rope, options, arrays)
    outcomes = [validation.outcome(case, seed) for case in validation.cases()]
    return Report(title, (static, *outcomes))


def _arrays(
    model: onnx.ModelProto, folder: str, options: AttentionOptions, names: Iterable[str]
) -> dict[str, Array]:
    """Return the initializers with these names; folder: of the model's external data.

    Raises ValueError if one is missing, but for biases, which options do not tell of.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    arrays = {}
    for name in names:
        own_name = f"{options.name_prefix}{name}"
        if own_name in tensors:
            arrays[name] = numpy_helper.to_array(tensors[own_name], folder)
        elif not name.endswith("_bias"):
            finding = Finding(f"has no initializer {own_name!r}")
            rule = "have one, as its metadata hold options for it"
            raise ArgumentError("model", finding, rule)
    return arrays


def _load(path: str) -> onnx.ModelProto:
    """Return the model in a file, without its external data."""
    if len(path) > MAX_PATH_BYTES:
        raise ArgumentError("model", path, f"be a path of at most {MAX_PATH_BYTES} bytes")
    try:
        # `save` writes protobuf under any suffix; onnx would parse .json and .textproto as such.
        return onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError):
        raise ArgumentError("model", path, "be an ONNX file") from None


def static_problem(model: onnx.ModelProto | str, loaded: onnx.ModelProto) -> str:
    """Return the error that static checks find in a model, "" if they find none.

    model: the model or its path. loaded: the model without external data.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(
            loaded, check_type=True, strict_mode=True, data_prop=True
        )
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        UnicodeDecodeError,  # onnx's own error text fails, or is empty, for a name that is no UTF-8
    ) as error:
        return first_line(error)
    known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output)}
    unknown = [
        name for node in inferred.graph.node for name in node.output if name and name not in known
    ]
    if unknown:
        return f"nothing is known about the shape of {cut(', '.join(unknown))}"
    return ""
