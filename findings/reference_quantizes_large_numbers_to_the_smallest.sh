#!/usr/bin/env bash
# Expected: QuantizeLinear saturates: what is larger than the integers of its output becomes the largest, 127 in int8.
# Really: onnx's reference evaluator converts the rounded quotient to int32 before it clips, so a quotient of 2^31 or more, and infinity, becomes
#   the most negative number: -128 in int8, 0 in uint8. onnxruntime gives 127 and 255. Quotients between are right in both.
# Who meets it: caches in int8 or int4 whose scale is tiny beside one outlier (a scale for each tensor or channel, taken from other data), when
#   the reference is the judge: the largest key of a group has the wrong sign, and the runtime looks wrong.
# Versions: onnx 1.23.2, onnxruntime 1.32.0, NumPy 2.4.6 on x86-64. Source: the text of QuantizeLinear-25 ("saturate", for all integers).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import numpy as np
import onnxruntime
from onnx import parser
from onnx.reference import ReferenceEvaluator

x = np.array([1, 300, 2e9, 3e9, np.inf, -3e9], np.float32) * np.float32(2.0**-40)
text = """<ir_version: 11, opset_import: ["": 25]> g (float[6] x, float scale) => (int32[6] y)
{ stored = QuantizeLinear<output_dtype: int = %d>(x, scale) y = Cast<to: int = 6>(stored) }"""
feeds = {"x": x, "scale": np.array(2.0**-40, np.float32)}
results = {}
for name, number in {"int8": 3, "uint8": 2, "int4": 22, "int16": 5}.items():
    model = parser.parse_model(text % number)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results[name] = session.run(None, feeds)[0].tolist(), ReferenceEvaluator(model).run(None, feeds)[0].tolist()
    print(f"{name:6s} onnxruntime {results[name][0]}  reference {results[name][1]}")
assert results["int8"] == ([1, 127, 127, 127, 127, -128], [1, 127, 127, -128, -128, -128])
assert results["uint8"] == ([1, 255, 255, 255, 255, 0], [1, 255, 255, 0, 0, 0])
assert results["int4"] == ([1, 7, 7, 7, 7, -8], [1, 7, 7, -8, -8, -8])
assert results["int16"] == ([1, 300, 32767, 32767, 32767, -32768], [1, 300, 32767, -32768, -32768, -32768])
PY
