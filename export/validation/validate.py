"""validate: run a model under onnxruntime, and compare it with the float64 reference and the NumPy kernels."""

from __future__ import annotations

import os
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnx import numpy_helper

from rope_cpu import RotaryEmbedding
from rope_cpu.validation.scalars import whole_number
from rope_cpu.validation.texts import first_line, shown

from ..files import LONGEST_PATH
from ..metadata import options_of
from ..options import RopeOptions, has_one_length, is_rotary_embedding
from .attention import AttentionCheck
from .check import Check
from .report import Outcome, Report
from .rope import RopeCheck
from .session import open_session


def validate(model: onnx.ModelProto | str | os.PathLike[str], rope: RotaryEmbedding, *, seed: int = 0) -> Report:
    """Prove that a model of this package rotates as `rope` does, or find where it does not.

    model: from `export_rope` or `export_attention`, or the path of a saved one; its metadata says what its inputs are.
    seed: of the draws.

    The model is checked statically (full check, strict shape inference, a type and a shape for every output) and run on
    shapes, lengths and ids drawn to break it: no tokens, one token, left-padded and shuffled ids, ids up to the table's
    end (1,000,000 where angles are computed) and past it, where it has to fail.

    Returns the report; it never raises because a model is wrong.

    Raises TypeError where `model`, `rope` or `seed` is something else, OSError where there is no file at the path,
    ValueError where that is no model, or one that says nothing about its own export, where `rope` is not the same at
    every length and has none, or `seed` is negative.
    """
    if not isinstance(model, onnx.ModelProto | str | os.PathLike):
        raise TypeError(f"`model` is a {type(model).__name__}; it must be an onnx.ModelProto or a path")
    is_rotary_embedding(rope)
    whole_number("seed", seed, 0, 2**128 - 1)
    has_one_length(rope)
    source = model if isinstance(model, onnx.ModelProto) else os.fspath(model)
    loaded = _loaded(source) if isinstance(source, str) else source
    options = options_of(loaded)
    title = f"{options.kind} model, target {options.target}, {options.dtype}, opset {options.opset}"
    static = Outcome("checker, shape inference", seed, (), problem=static_problem(source, loaded))
    try:
        opened = open_session(source)
    except Exception as error:  # onnxruntime's errors share no class of their own
        unloaded = Outcome("load", seed, (), problem=f"onnxruntime cannot load it: {first_line(error)[-200:]}")
        return Report(title, (static, unloaded), lambda outcome: {})
    if isinstance(options, RopeOptions):
        check: Check = RopeCheck(opened, rope, options)
    else:
        folder = os.path.dirname(source) if isinstance(source, str) else ""
        arrays = weights_in(loaded, folder)
        for name in options.projections:
            if f"{name}_weight" not in arrays:
                raise ValueError(f"`model` has no initializer '{name}_weight', which its metadata speaks of")
        check = AttentionCheck(opened, rope, options, arrays)
    return Report(title, (static, *(check.outcome(case, seed) for case in check.cases())), check.replay)


def _loaded(path: str) -> onnx.ModelProto:
    if len(path) > LONGEST_PATH:
        raise ValueError(f"`model` is {shown(path)}, which names no file that a system could hold")
    try:
        # The format is that which `save` writes, whatever the suffix: onnx would parse .json and .textproto as such.
        return onnx.load(path, format="protobuf", load_external_data=False)
    except (DecodeError, ValueError):
        raise ValueError(f"`model` is {shown(path)}, which is no ONNX file") from None


def weights_in(model: onnx.ModelProto, folder: str) -> dict[str, NDArray[Any]]:
    """Return the weights of projections and norms that a model holds, or that lie in `folder` beside it."""
    return {
        tensor.name: numpy_helper.to_array(tensor, base_dir=folder)
        for tensor in model.graph.initializer
        if tensor.name.endswith(("_weight", "_bias", "_norm"))
    }


def static_problem(model: onnx.ModelProto | str, loaded: onnx.ModelProto) -> str:
    """Return what is wrong with a model before it runs, or nothing; `loaded`: the model, large tables aside."""
    try:
        onnx.checker.check_model(model, full_check=True)
        inferred = onnx.shape_inference.infer_shapes(loaded, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, UnicodeDecodeError) as error:
        return first_line(error)  # a name that is no UTF-8 lets the text of onnx's own error fail, or leaves none
    for output in inferred.graph.output:
        kind = output.type.tensor_type
        if not kind.elem_type or not kind.HasField("shape"):
            return f"output {output.name} has no type or no shape"
    known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output)}
    unknown = [name for node in inferred.graph.node for name in node.output if name and name not in known]
    return f"nothing is known about the shape of {', '.join(unknown)}" if unknown else ""
