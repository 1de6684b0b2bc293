"""Runtimes and tools that take ONNX files: functions (model bytes, feeds) → results by name."""

import base64
import json
import subprocess
import sys
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import cv2
import iree.runtime
import MNN
import MNN.expr
import numpy as np
import nxrt
import onnx
import onnx2torch
import onnxruntime
import onnxruntime_ggml
import openvino
import tinygrad
import torch
import tract
import tvm

# MNN.tools.mnnconvert would install a package by pip, and ask for access to a server for logs.
from _tools import mnnconvert
from onnx import version_converter
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import quantize_dynamic
from onnxscript import optimizer, rewriter
from tinygrad.nn.onnx import OnnxRunner
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

HERE = Path(__file__).parent
NODE_PACKAGES = ("onnxruntime-node", "onnxruntime-web")
OPENVINO_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}  # otherwise bfloat16 where the CPU has it


def output_names(model):
    return [value.name for value in onnx.load_from_string(model).graph.output]


def by_name(model, results):
    """Return lists of outputs in the order of the graph as dictionaries."""
    names = output_names(model)
    return [dict(zip(names, outputs, strict=True)) for outputs in results]


def run_session(session_of, model, feeds):
    """Run a model in a session with the interface of onnxruntime."""
    session = session_of(model)
    return by_name(model, [session.run(None, feed) for feed in feeds])


run_onnxruntime = partial(
    run_session, partial(onnxruntime.InferenceSession, providers=["CPUExecutionProvider"])
)


def run_changed(change, model, feeds):
    """Run what a tool makes of a model in onnxruntime."""
    changed = change(onnx.load_from_string(model))
    return run_onnxruntime(changed.SerializeToString(), feeds)


def run_quantized(model, feeds, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantized.onnx")
        quantize_dynamic(onnx.load_from_string(model), path, **options)
        return run_onnxruntime(path.read_bytes(), feeds)


def run_openvino(model, feeds):
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(model), "CPU", OPENVINO_OPTIONS)
    return by_name(model, [list(compiled(feed).to_tuple()) for feed in feeds])


def run_onnx2torch(model, feeds):
    graph = onnx.load_from_string(model)
    module = onnx2torch.convert(graph)
    names = [value.name for value in graph.graph.input]
    results = []
    for feed in feeds:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(np.array(feed[name])) for name in names))
        results.append([y.numpy() for y in outputs])
    return by_name(model, results)


def run_tract(model, feeds):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(model)
        graph = tract.onnx().load(path)
    names = [graph.input_name(index) for index in range(graph.input_count())]
    runnable = graph.into_model().into_runnable()
    results = [runnable.run([feed[name] for name in names]) for feed in feeds]
    return by_name(model, [[y.to_numpy() for y in outputs] for outputs in results])


def run_opencv(model, feeds):
    net = cv2.dnn.readNetFromONNX(np.frombuffer(model, np.uint8))
    results = []
    for feed in feeds:
        for name, x in feed.items():
            net.setInput(x, name)
        results.append(net.forward(output_names(model)))
    return by_name(model, results)


def run_mnn(model, feeds):
    graph = onnx.load_from_string(model).graph
    inputs = [value.name for value in graph.input]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "model.onnx")
        source.write_bytes(model)
        converted = Path(folder, "model.mnn")
        files = ["--modelFile", str(source), "--MNNModel", str(converted)]
        mnnconvert(["mnnconvert", "-f", "ONNX", *files, "--bizCode", "tests"])
        if not converted.exists():
            raise RuntimeError("MNN does not convert it")
        module = MNN.nn.load_module_from_file(str(converted), inputs, output_names(model))
    results = []
    for feed in feeds:
        outputs = module.forward([_mnn_value(feed[name]) for name in inputs])
        results.append([np.array(y.read()).reshape(y.shape) for y in outputs])
    return by_name(model, results)


def _mnn_value(x):
    """Return an array for MNN, whose integers have 32 bits."""
    is_float = x.dtype.kind == "f"
    x = np.ascontiguousarray(x, None if is_float else np.int32)
    dtype = MNN.expr.float if is_float else MNN.expr.int
    return MNN.expr.const(x, list(x.shape), MNN.expr.NCHW, dtype)


def run_iree(model, feeds):
    graph = onnx.load_from_string(model).graph
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"model.{suffix}") for suffix in ("onnx", "mlir", "vmfb")]
        paths[0].write_bytes(model)
        target = ["--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host"]
        _succeed(["iree-import-onnx", paths[0], "-o", paths[1]])
        _succeed(["iree-compile", paths[1], *target, "-o", paths[2]])
        context = iree.runtime.SystemContext(config=iree.runtime.Config("local-task"))
        code = paths[2].read_bytes()
    context.add_vm_module(iree.runtime.VmModule.copy_buffer(context.instance, code))
    function = context.modules.module[graph.name]
    results = [function(*(feed[value.name] for value in graph.input)) for feed in feeds]
    return by_name(model, [[y.to_host() for y in outputs] for outputs in results])


def _succeed(command):
    """Run a program of this environment; raise its errors."""
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)


def run_tinygrad(model, feeds):
    """Run each call in a runner of its own, as a runner keeps integers of its first call."""
    results = []
    for feed in feeds:
        inputs = {name: tinygrad.Tensor(x) for name, x in feed.items()}
        outputs = OnnxRunner(tinygrad.Tensor(model))(inputs)
        results.append({name: y.numpy() for name, y in outputs.items()})
    return results


def run_tvm(model, feeds):
    graph = onnx.load_from_string(model)
    executable = tvm.compile(from_onnx(graph), "llvm")
    main = relax.VirtualMachine(executable, tvm.cpu())["main"]
    names = [value.name for value in graph.graph.input]
    results = [main(*(tvm.runtime.tensor(feed[name]) for name in names)) for feed in feeds]
    return by_name(model, [[y.numpy() for y in outputs] for outputs in results])


def run_node(package, model, feeds):
    """Run a package of npm by run.mjs, which reads and writes arrays as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.onnx").write_bytes(model)
        encoded = [{name: _encoded(x) for name, x in feed.items()} for feed in feeds]
        Path(folder, "feeds.json").write_text(json.dumps(encoded))
        command = ["node", HERE / "run.mjs", package, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr)
        results = json.loads(Path(folder, "results.json").read_text())
    return [{name: _decoded(x) for name, x in result.items()} for result in results]


def _encoded(x):
    data = base64.b64encode(np.ascontiguousarray(x)).decode()
    return {"type": str(x.dtype), "dims": x.shape, "data": data}


def _decoded(x):
    return np.frombuffer(base64.b64decode(x["data"]), x["type"]).reshape(x["dims"])


CONSUMERS = {
    "onnxruntime": run_onnxruntime,
    "onnxruntime-node": partial(run_node, "onnxruntime-node"),
    "onnxruntime-web": partial(run_node, "onnxruntime-web"),
    "openvino": run_openvino,
    "tract": run_tract,
    "onnx2torch": run_onnx2torch,
    "opencv": run_opencv,
    "mnn": run_mnn,
    "iree": run_iree,
    "tinygrad": run_tinygrad,
    "onnxruntime-ggml": partial(
        run_session, lambda model: onnxruntime_ggml.InferenceSession(model, {"device": "cpu"})
    ),
    "nxrt": partial(run_session, nxrt.InferenceSession),
    "tvm": run_tvm,
    "onnx.reference": partial(run_session, ReferenceEvaluator),
    "onnx.version_converter": partial(
        run_changed, partial(version_converter.convert_version, target_version=25)
    ),
    "onnxscript.optimizer": partial(run_changed, optimizer.optimize),
    "onnxscript.rewriter": partial(run_changed, rewriter.rewrite),
    "quantize_dynamic of MatMul": partial(run_quantized, op_types_to_quantize=["MatMul"]),
    "quantize_dynamic": run_quantized,
}

# Packages of other names than their consumers.
PACKAGES = {
    "opencv": "opencv-python-headless",
    "iree": "iree-base-compiler",
    "tvm": "apache-tvm",
    "quantize_dynamic of MatMul": "onnxruntime",
    "quantize_dynamic": "onnxruntime",
}


def consumer_version(consumer):
    """Return the version of the package that has a consumer."""
    if consumer in NODE_PACKAGES:
        description = HERE / "node_modules" / consumer / "package.json"
        return json.loads(description.read_text())["version"]
    return version(PACKAGES.get(consumer, consumer.split(".")[0]))
