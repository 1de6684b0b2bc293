#!/usr/bin/env bash
# Expected: a cast to int4 is the cast to int8 with fewer bits: fractions are cut off (2.5 is 2). Beyond 7 some clip, as QuantizeLinear does.
# Really: onnxruntime's Cast cuts off for int8 and rounds half away from zero for int4 (2.5 is 3, -1.5 is -2), so that 7.5, which int4 holds
#   after cutting, becomes 8 and wraps to -8. ml_dtypes and onnx's reference evaluator cut off (7.5 is 7). All three wrap: 9 is -7, 100 is 4.
#   QuantizeLinear to int4 rounds half to even and clips. NaN is 0 after each Cast and -8, the most negative value, after QuantizeLinear.
# Who meets it: keys or values stored in 4 bits by Cast after a division by the scale, checked with NumPy or the reference and run elsewhere.
#   With a scale of max / 7.5 the largest element of each group changes its sign.
# Versions: onnxruntime 1.32.0, onnx 1.23.2, ml_dtypes 0.6.0. Source: the text of Cast-25 leaves values out of range undefined and says
#   nothing of fractions of fixed point types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0 numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import parser
from onnx.reference import ReferenceEvaluator

x = np.array([-8.5, -1.5, 0.5, 2.5, 7.5, 9, 100, np.nan], np.float32)
cast = """<ir_version: 11, opset_import: ["": 25]> g (float[8] x) => (float[8] y)
{ stored = Cast<to: int = %d>(x) y = Cast<to: int = 1>(stored) }"""
quantised = """<ir_version: 11, opset_import: ["": 25]> g (float[8] x) => (float[8] y)
{ scale = Constant<value = float {1}>() stored = QuantizeLinear<output_dtype: int = 22>(x, scale) y = DequantizeLinear(stored, scale) }"""


def both(text):
    model = parser.parse_model(text)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0].tolist(), ReferenceEvaluator(model).run(None, {"x": x})[0].tolist()


results = {}
results["int8, onnxruntime"], results["int8, reference"] = both(cast % 3)
results["int4, onnxruntime"], results["int4, reference"] = both(cast % 22)
results["int4, ml_dtypes"] = x.astype(ml_dtypes.int4).astype(np.float32).tolist()
results["QuantizeLinear, onnxruntime"], results["QuantizeLinear, reference"] = both(quantised)
print(f"{'':28s}", x.tolist())
for name, numbers in results.items():
    print(f"{name:28s}", numbers)
assert results["int8, onnxruntime"][:7] == results["int8, reference"][:7] == [-8, -1, 0, 2, 7, 9, 100]
assert results["int4, onnxruntime"] == [7, -2, 1, 3, -8, -7, 4, 0]
assert results["int4, reference"] == results["int4, ml_dtypes"] == [-8, -1, 0, 2, 7, -7, 4, 0]
assert results["QuantizeLinear, onnxruntime"] == results["QuantizeLinear, reference"] == [-8, -2, 0, 2, 7, 7, 7, -8]
PY
