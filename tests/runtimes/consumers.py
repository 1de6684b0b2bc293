"""Runtimes and tools that take ONNX files: functions (model bytes, feeds) → results by name."""

import base64
import json
import subprocess
import tempfile
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import onnx
import onnx2torch
import onnxruntime
import openvino
import torch
import tract
from onnx import version_converter
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import quantize_dynamic
from onnxscript import optimizer, rewriter

HERE = Path(__file__).parent
NODE_PACKAGES = ("onnxruntime-node", "onnxruntime-web")
OPENVINO_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}  # otherwise bfloat16 where the CPU has it


def output_names(model):
    return [value.name for value in onnx.load_from_string(model).graph.output]


def by_name(model, results):
    """Return lists of outputs in the order of the graph as dictionaries."""
    names = output_names(model)
    return [dict(zip(names, outputs, strict=True)) for outputs in results]


def run_onnxruntime(model, feeds):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return by_name(model, [session.run(None, feed) for feed in feeds])


def run_reference(model, feeds):
    evaluator = ReferenceEvaluator(onnx.load_from_string(model))
    return by_name(model, [evaluator.run(None, feed) for feed in feeds])


def run_converted(model, feeds):
    converted = version_converter.convert_version(onnx.load_from_string(model), 25)
    return run_onnxruntime(converted.SerializeToString(), feeds)


def run_optimized(model, feeds):
    optimized = optimizer.optimize(onnx.load_from_string(model))
    return run_onnxruntime(optimized.SerializeToString(), feeds)


def run_rewritten(model, feeds):
    rewritten = rewriter.rewrite(onnx.load_from_string(model))
    return run_onnxruntime(rewritten.SerializeToString(), feeds)


def run_quantized(model, feeds, **options):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantized.onnx")
        quantize_dynamic(onnx.load_from_string(model), path, **options)
        return run_onnxruntime(path.read_bytes(), feeds)


def run_quantized_matmul(model, feeds):
    return run_quantized(model, feeds, op_types_to_quantize=["MatMul"])


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
    "onnx.reference": run_reference,
    "onnx.version_converter": run_converted,
    "onnxscript.optimizer": run_optimized,
    "onnxscript.rewriter": run_rewritten,
    "quantize_dynamic of MatMul": run_quantized_matmul,
    "quantize_dynamic": run_quantized,
}


def consumer_version(consumer):
    """Return the version of the package that has a consumer."""
    if consumer in NODE_PACKAGES:
        description = HERE / "node_modules" / consumer / "package.json"
        return json.loads(description.read_text())["version"]
    package = "onnxruntime" if consumer.startswith("quantize") else consumer.split(".")[0]
    return version(package)
