#!/usr/bin/env bash
# Expected: "ai.onnx" and "" are two names of one domain. compose.merge_models refuses models of different opsets, so it refuses opset 12 under
#   "" with opset 13 under "ai.onnx"; tools that accept a model under one name handle it under the other.
# Really: merge_models compares names. It returns a model with both opsets, the checker of onnx accepts it, onnxruntime runs the nodes with the
#   last of them, and a Softmax of opset 12 (over all axes from the second on) becomes one of opset 13 (over the last): other numbers without an
#   error. onnxslim adds opset 1 of "" to a model that names "ai.onnx", which then no longer loads.
# Who meets it: layers of one model that come from two exporters (one writes "", another "ai.onnx") and are merged, or are slimmed afterwards.
# Versions: onnx 1.23.2, onnxruntime 1.32.0, onnxslim 0.1.98. Before onnx 1.22 the checker does not know "ai.onnx".
# Source: docs/Versioning.md of onnx: the domain ai.onnx is written as the empty string, or by its name.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 onnxslim==0.1.98 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import onnx
import onnxruntime
import onnxslim
from onnx import compose, parser


def model(node, domain, opset):
    text = f'<ir_version: 8, opset_import: ["{domain}": {opset}]> g (float[2, 2, 2] a{opset}) => (float[2, 2, 2] b{opset}) {{ {node} }}'
    parsed = parser.parse_model(text)
    onnx.checker.check_model(parsed, full_check=True)
    return parsed


def run(m, x):
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


softmax = model("b12 = Softmax(a12)", "", 12)
same, named = (model("b13 = Identity(a13)", domain, 13) for domain in ("", "ai.onnx"))
x = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
one_after_the_other = run(named, run(softmax, x))
try:
    compose.merge_models(softmax, same, io_map=[("b12", "a13")])
    refused = False
except ValueError as error:
    refused = True
    print("both under one name:", str(error).split(".")[0])
merged = compose.merge_models(softmax, named, io_map=[("b12", "a13")])
onnx.checker.check_model(merged, full_check=True)
print("under two names:", [(opset.domain, opset.version) for opset in merged.opset_import], "and the checker accepts it")
print("one after the other", one_after_the_other[0].ravel(), "merged", run(merged, x)[0].ravel())
assert refused and np.abs(run(merged, x) - one_after_the_other).max() > 0.2

result = onnxslim.slim(model("b13 = Neg(a13)", "ai.onnx", 13))
opsets = [(opset.domain, opset.version) for opset in result.opset_import]
try:
    run(result, x)
    error = None
except Exception as raised:
    error = type(raised).__name__
print("onnxslim writes", opsets, "and onnxruntime raises", error)
assert opsets == [("ai.onnx", 13), ("", 1)] and error == "NotImplemented"
PY
