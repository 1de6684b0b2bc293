#!/usr/bin/env bash
# Expected: Attention of opset 25 is the operator of opset 24 with a window, so onnxruntime runs both alike, and the window saves time.
# Really: the CPU kernel of onnxruntime 1.32 ends with opset 24. Every Attention of opset 25, with a window or without, is replaced by the 74
#   to 88 nodes of its function body: the same numbers, but a decode step takes about three times as long.
# Who meets it: whoever raises a model's opset to have `left_window_size`, or converts it by onnx.version_converter to 25 or more.
# Versions: onnxruntime 1.32.0, onnx 1.23.2. Source: docs/OperatorKernels.md of onnxruntime; the text of Attention-25.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
FOLDER=$folder "$folder/venv/bin/python" - <<'PY'
import os
import time

import numpy as np
import onnx
import onnxruntime
from onnx import parser

random = np.random.default_rng(0)
sizes = {"q": (8, 1), "k": (4, 1), "v": (4, 1), "past_k": (4, 4000), "past_v": (4, 4000)}
feeds = {name: random.standard_normal((1, *size, 128), np.float32) for name, size in sizes.items()}
mask = (np.arange(4001) > 4000 - 1024)[None]


def opened(opset, attribute, extra=""):
    text = f"""<ir_version: 11, opset_import: ["": {opset}]>
    g (float[1, 8, 1, 128] q, float[1, 4, 1, 128] k, float[1, 4, 1, 128] v,
       float[1, 4, 4000, 128] past_k, float[1, 4, 4000, 128] past_v{extra and ", bool[1, 4001] mask"})
      => (float[1, 8, 1, 128] y, float[1, 4, 4001, 128] new_k, float[1, 4, 4001, 128] new_v)
    {{ y, new_k, new_v = Attention<is_causal: int = 1{attribute}>(q, k, v, {extra}, past_k, past_v) }}"""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = os.environ["FOLDER"] + "/optimized.onnx"
    model = parser.parse_model(text).SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(options.optimized_model_filepath).graph.node
    return session, sorted({node.op_type for node in nodes}), len(nodes)


def median_time(session, feeds):
    times = []
    for _ in range(15):
        start = time.perf_counter()
        session.run(["y"], feeds)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e3


cases = {
    "opset 24 with a mask": (*opened(24, "", "mask"), feeds | {"mask": mask}),
    "opset 25 with a window": (*opened(25, ", left_window_size: int = 1023"), feeds),
    "opset 25 without": (*opened(25, ""), feeds),
}
for name, (session, operators, count, inputs) in cases.items():
    print(f"{name:23s} {count:3d} nodes, {median_time(session, inputs):6.2f} ms")
first, second, plain = cases.values()
difference = np.abs(first[0].run(["y"], first[3])[0] - second[0].run(["y"], second[3])[0]).max()
print("onnxruntime", onnxruntime.__version__, "- largest difference of the first two:", difference)
assert first[1] == ["Attention"]
assert "Attention" not in second[1] and "Attention" not in plain[1]
assert difference < 1e-6
PY
