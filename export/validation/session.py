"""Running models under onnxruntime, bfloat16 included: sessions and bound arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import helper

from rope_cpu.array_types import Array

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BFLOAT16_TYPE = "tensor(bfloat16)"  # as onnxruntime names it


def open_session(
    model: onnx.ModelProto | str | os.PathLike[str], threads: int = 0
) -> onnxruntime.InferenceSession:
    """Open a model, or a file, on the CPU; threads: 0 leaves the number to onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Errors are raised as exceptions; the log would print them a second time.
    options.log_severity_level = 4
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(
    session: onnxruntime.InferenceSession,
    feeds: Mapping[str, Array],
    shapes: Sequence[tuple[int, ...]],
) -> list[Array]:
    """Run a model; shapes: of the outputs.

    onnxruntime takes and returns bfloat16 only through arrays that are bound to it.
    """
    values = [*session.get_inputs(), *session.get_outputs()]
    if all(value.type != BFLOAT16_TYPE for value in values):
        return list(session.run(None, dict(feeds)))
    outputs = {
        value.name: np.zeros(shape, BFLOAT16 if value.type == BFLOAT16_TYPE else np.float32)
        for value, shape in zip(session.get_outputs(), shapes, strict=True)
    }
    call = bind_arrays(
        session, {name: np.ascontiguousarray(x) for name, x in feeds.items()}, outputs
    )
    call()
    return list(outputs.values())


def bind_arrays(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Callable[[], None]:
    """Return a call that runs a model on arrays bound to it once, of which nothing is checked.

    Nothing is copied. feeds, outputs: C-contiguous arrays by name; the call writes to the outputs.
    """
    binding = session.io_binding()
    input_values = {name: _ort_value(x) for name, x in feeds.items()}
    output_values = {name: _ort_value(x) for name, x in outputs.items()}
    for name, value in input_values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in output_values.items():
        binding.bind_ortvalue_output(name, value)
    call = partial(session.run_with_iobinding, binding)
    # onnxruntime 1.29 does not keep the arrays alive that are bound to it, so the call does.
    arrays = (dict(feeds), dict(outputs), input_values, output_values)
    call.arrays = arrays  # type: ignore[attr-defined]
    return call


def _ort_value(x: Array) -> onnxruntime.OrtValue:
    """Return an array for onnxruntime, whose Python API takes bfloat16 as bits with a type."""
    bits = x.view(np.uint16) if x.dtype == BFLOAT16 else x
    onnx_type = int(helper.np_dtype_to_tensor_dtype(x.dtype))
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx_type)
