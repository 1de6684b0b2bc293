"""Models under onnxruntime, bfloat16 included: sessions, and arrays that are bound to them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from rope_cpu.arguments.arrays import share_memory
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.scalars import refuse_masked
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Array

from ..metadata import OPTIONS_KEY
from ..options import name_in_graph

# The parts of a shared cache, input and output of one buffer: patterns of the first name, and
# forms of the second.
PARTS = {
    r"(.*)past_(key|value)": r"\1present_\2",
    r"past_key_values\.(\d+)\.(key|value)": r"present.\1.\2",
}


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

    The arrays are bound: onnxruntime takes and returns bfloat16 in no other way.
    """
    outputs = {
        value.name: np.zeros(shape, _dtype(value.type))
        for value, shape in zip(session.get_outputs(), shapes, strict=True)
    }
    bind_arrays(session, {name: np.ascontiguousarray(x) for name, x in feeds.items()}, outputs)()
    return list(outputs.values())


def bind_arrays(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Callable[[], None]:
    """Return a call that runs a model on arrays bound to it once, of which nothing is checked.

    Nothing is copied. feeds, outputs: C-contiguous arrays by name; the call writes to the outputs.

    Raises RuntimeError if an input is missing: onnxruntime finds that in `run` alone, where no node
    reads the input.
    """
    for value in session.get_inputs():
        if value.name not in feeds:
            raise RuntimeError(f"the model has an input {value.name!r} that its options lack")
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
    bits = x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x
    onnx_type = int(helper.np_dtype_to_tensor_dtype(x.dtype))
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx_type)


def bind(
    session: onnxruntime.InferenceSession, feeds: Mapping[str, Array], outputs: Mapping[str, Array]
) -> Callable[[], None]:
    """Return a call that runs a model on the caller's own arrays; nothing is copied.

    The arrays are bound once. Before each call the caller writes the new inputs into them, and
    after it the results lie in `outputs`. A model with a shared cache (`export_attention`,
    cache="shared") writes its new keys and values into past_key and past_value themselves.

    Parameters
    ----------
    session : onnxruntime.InferenceSession
        A session, on the CPU, of a model from `export_rope` or `export_attention`, or of several
        layers that were merged.
    feeds : mapping of str to ndarray
        All inputs by name: C-contiguous arrays of the declared dtypes and shapes. The third axis of
        past_key and past_value of a shared cache is its capacity, in tokens.
    outputs : mapping of str to ndarray
        All outputs by name, likewise, except present_key and present_value of a shared cache. These
        and the outputs are written: no other array may share their memory.

    Returns
    -------
    callable
        Runs the model once, without arguments, and returns None. It keeps the arrays alive.

    Raises
    ------
    TypeError
        If `session` is no session, or an entry no array of the declared dtype.
    ValueError
        If names are missing or unknown, an array is not contiguous or has another shape, one that
        is written is read-only or shares memory with another, or a cache has a capacity above the
        model's `max_positions`. The call raises onnxruntime's error, and writes nothing, where
        past_lengths and the new tokens exceed the capacity.

    Examples
    --------
    >>> import numpy as np, onnxruntime
    >>> from rope_cpu import RotaryEmbedding, export
    >>> model = export.export_attention(
    ...     RotaryEmbedding(16),
    ...     num_heads=2,
    ...     target="ort",
    ...     cache="shared",
    ...     layout="bshd",
    ...     max_positions=64,
    ... )
    >>> session = onnxruntime.InferenceSession(
    ...     model.SerializeToString(), providers=["CPUExecutionProvider"]
    ... )
    >>> feeds = {name: np.ones((1, 1, 2, 16), np.float32) for name in "qkv"}
    >>> feeds |= {name: np.zeros((1, 2, 64, 16), np.float32) for name in ("past_key", "past_value")}
    >>> feeds["past_lengths"] = np.zeros(1, np.int64)
    >>> attention = np.empty((1, 1, 2, 16), np.float32)
    >>> step = export.bind(session, feeds, {"attention": attention})
    >>> for position in range(3):
    ...     feeds["past_lengths"][:] = position
    ...     step()
    >>> int(feeds["past_value"].sum())  # 3 tokens of 2 heads of 16 ones
    96
    """
    if not isinstance(session, onnxruntime.InferenceSession):
        rule = "be an onnxruntime.InferenceSession"
        raise ArgumentTypeError("session", Finding.type_of(session), rule)
    inputs = {value.name: value for value in session.get_inputs()}
    results = {value.name: value for value in session.get_outputs()}
    shared = _shared_buffers(inputs, results)
    own_results = {name: value for name, value in results.items() if name not in shared}
    _check_arrays("feeds", feeds, inputs)
    _check_arrays("outputs", outputs, own_results)
    _check_capacities(session, feeds)
    _check_written(feeds, outputs, tuple(shared.values()))
    buffers = {present: feeds[past] for present, past in shared.items()}
    return bind_arrays(session, feeds, {**outputs, **buffers})


def _shared_buffers(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> dict[str, str]:
    """Return {present: past} of the shared caches; their declared shapes are equal."""
    shared = {}
    for name, value in inputs.items():
        for pattern, form in PARTS.items():
            match = re.fullmatch(pattern, name)
            output = outputs.get(match.expand(form)) if match else None
            if output is not None and output.shape == value.shape:
                shared[output.name] = name
    return shared


def _check_arrays(argument: str, arrays: Mapping[str, Array], declared: Mapping[str, Any]) -> None:
    """Raise unless an argument is a mapping of exactly the arrays that the session declares."""
    if not isinstance(arrays, Mapping):
        rule = "be a mapping of names to arrays"
        raise ArgumentTypeError(argument, Finding.type_of(arrays), rule)
    missing = [name for name in declared if name not in arrays]
    unknown = [name for name in arrays if name not in declared]
    if missing or unknown:
        present = "present keys and values of a shared cache are those of the past"
        rule = f"hold {cut(', '.join(declared))} ({present})"
        raise ArgumentError(argument, Finding.holds(shown(list(arrays))), rule)
    for name, x in arrays.items():
        _check_array(f"{argument}[{shown(name)}]", x, declared[name])


def _check_array(name: str, x: object, declared: Any) -> None:
    """Raise unless an array has the declared dtype and shape, and is C-contiguous."""
    if not isinstance(x, np.ndarray):
        raise ArgumentTypeError(name, Finding.type_of(x), "be an array")
    refuse_masked(name, x)
    dtype = _dtype(declared.type)
    if x.dtype != dtype:
        raise ArgumentTypeError(name, Finding.dtype_of(x), f"be {dtype}")
    sizes = zip(x.shape, declared.shape, strict=False)
    fits = all(not isinstance(size, int) or n == size for n, size in sizes)
    if x.ndim != len(declared.shape) or not fits:
        raise ArgumentError(name, Finding.shape_of(x), f"be {tuple(declared.shape)}")
    if not x.flags.c_contiguous:
        finding = Finding(f"has strides {x.strides}")
        raise ArgumentError(name, finding, "be C-contiguous, its rows one after another")


def _check_written(
    feeds: Mapping[str, Array], outputs: Mapping[str, Array], caches: tuple[str, ...]
) -> None:
    """Raise ValueError where outputs or shared caches are read-only, or share memory.

    onnxruntime has addresses only: it would write to a read-only array, and crash where the memory
    itself cannot be written. caches: names of the feeds that are written.
    """
    results = {f"outputs[{shown(name)}]": x for name, x in outputs.items()}
    arrays = {f"feeds[{shown(name)}]": x for name, x in feeds.items()} | results
    for argument in (*(f"feeds[{shown(name)}]" for name in caches), *results):
        x = arrays[argument]
        if not x.flags.writeable:
            finding = Finding("is read-only, and each call writes to it")
            raise ArgumentError(argument, finding, "be writeable", "give a copy")
        for other, y in arrays.items():
            if other != argument and share_memory(x, y):
                finding = Finding(f"shares memory with `{other}`, and each call writes to it")
                raise ArgumentError(argument, finding, "have memory of its own")


def _dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a value as onnxruntime names it, such as tensor(float)."""
    onnx_name = name.removeprefix("tensor(").removesuffix(")").upper()
    return np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, onnx_name)))


def _check_capacities(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> None:
    """Raise ValueError where a shared cache has more rows than the tables of its model."""
    for key, text in session.get_modelmeta().custom_metadata_map.items():
        if not key.endswith(OPTIONS_KEY):
            continue
        options = json.loads(text)
        most = options.get("max_positions")
        if options.get("cache") != "shared" or most is None:
            continue
        prefix = key.removesuffix(OPTIONS_KEY)
        names = options.get("names", "rope_cpu")  # files of older versions have none
        name = name_in_graph("past_key", prefix, names, options.get("layer"))
        capacity = feeds[name].shape[2]
        if capacity > most:
            finding = Finding(f"has shape {feeds[name].shape}, a capacity of {capacity}")
            rule = f"have at most {most} rows, the positions of the model's tables"
            raise ArgumentError(f"feeds[{shown(name)}]", finding, rule)
