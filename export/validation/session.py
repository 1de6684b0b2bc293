"""Running models under onnxruntime, bfloat16 included: the one place that opens sessions and binds arrays."""

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


def open_session(
    model: onnx.ModelProto | str | os.PathLike[str], threads: int = 0
) -> onnxruntime.InferenceSession:
    """Open a model, or a file, on the CPU; threads: 0 leaves the number to onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Errors come as exceptions; as log lines they would show twice.
    options.log_severity_level = 4
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else os.fspath(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(
    session: onnxruntime.InferenceSession,
    feeds: Mapping[str, Array],
    shapes: Sequence[tuple[int, ...]],
) -> list[Array]:
    """Run a model; shapes: of the outputs. onnxruntime takes and gives bfloat16 only through arrays bound to it."""
    if not any(
        value.type == "tensor(bfloat16)"
        for value in (*session.get_inputs(), *session.get_outputs())
    ):
        return list(session.run(None, dict(feeds)))
    outputs = {
        value.name: np.zeros(shape, BFLOAT16 if value.type == "tensor(bfloat16)" else np.float32)
        for value, shape in zip(session.get_outputs(), shapes, strict=True)
    }
    bind(session, {name: np.ascontiguousarray(x) for name, x in feeds.items()}, outputs)()
    return list(outputs.values())


def bind(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Callable[[], None]:
    """Return a call that runs a model on arrays which are bound to it once, as a server does; nothing is copied.

    feeds, outputs: C-contiguous arrays by name; the call writes to the outputs.
    """
    binding = session.io_binding()
    given, made = ({name: _value(x) for name, x in arrays.items()} for arrays in (feeds, outputs))
    for name, value in given.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in made.items():
        binding.bind_ortvalue_output(name, value)
    call = partial(session.run_with_iobinding, binding)
    # onnxruntime 1.29 keeps nothing that is bound to it: the call does.
    call.held = dict(feeds), dict(outputs), given, made  # type: ignore[attr-defined]
    return call


def _value(x: Array) -> onnxruntime.OrtValue:
    # onnxruntime's Python knows no bfloat16 arrays: their bits, and a type.
    bits = x.view(np.uint16) if x.dtype == BFLOAT16 else x
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(
        bits, int(helper.np_dtype_to_tensor_dtype(x.dtype))
    )
