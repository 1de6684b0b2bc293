"""Running models under onnxruntime, bfloat16 included."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

Array = NDArray[Any]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def session(model: onnx.ModelProto | str | os.PathLike[str], threads: int = 0) -> onnxruntime.InferenceSession:
    """Open a model, or a file, on the CPU; threads: 0 leaves the number to onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Errors come as exceptions; as log lines they would show twice.
    options.log_severity_level = 4
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(
    opened: onnxruntime.InferenceSession, feeds: Mapping[str, Array], shapes: Sequence[tuple[int, ...]]
) -> list[Array]:
    """Run a model; shapes: of the outputs. onnxruntime takes and gives bfloat16 only through buffers bound to it."""
    if not any(value.type == "tensor(bfloat16)" for value in (*opened.get_inputs(), *opened.get_outputs())):
        return list(opened.run(None, dict(feeds)))
    # Held until the model has run, as onnxruntime 1.29 keeps nothing that is bound to it.
    given = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
    results = [np.zeros(shape, _dtype(output)) for output, shape in zip(opened.get_outputs(), shapes, strict=True)]
    inputs, outputs = {name: _buffer(array) for name, array in given.items()}, [_buffer(array) for array in results]
    binding = opened.io_binding()
    for name, buffer in inputs.items():
        binding.bind_ortvalue_input(name, buffer)
    for output, buffer in zip(opened.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(output.name, buffer)
    opened.run_with_iobinding(binding)
    return results


def _dtype(output: onnxruntime.NodeArg) -> np.dtype[Any]:
    return BFLOAT16 if output.type == "tensor(bfloat16)" else np.dtype(np.float32)


def _buffer(array: Array) -> onnxruntime.OrtValue:
    if array.dtype == BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), onnx.TensorProto.BFLOAT16)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)
