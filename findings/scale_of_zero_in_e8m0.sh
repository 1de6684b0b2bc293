#!/usr/bin/env bash
# Expected: float8_e8m0fnu, the scale of the MX formats, holds powers of two from 2^-127 on; a scale of 0 (a group of zeros) becomes the
#   smallest, 2^-127, as smaller numbers do. Zero times it stays zero.
# Really: ml_dtypes makes NaN of 0, though 1e-45 becomes 2^-127, so a whole group of zeros decodes to NaN. PyTorch and ONNX's Cast in
#   onnxruntime (saturate, round up: the defaults) make 2^-127 of 0. A half-way 3 goes up to 4 everywhere, and so does 1.5 to 2; 1.25 is 1 in
#   ml_dtypes and PyTorch, and 2 in onnxruntime, whose default rounds every scale up.
# Who meets it: caches and weights in blocks (mxfp8, mxfp4) that NumPy fills: padding, unused pages and pruned rows are groups of zeros.
# Versions: ml_dtypes 0.6.0, torch 2.13.0, onnxruntime 1.32.0, onnx 1.23.2. Source: the table of FLOAT8E8M0 in the text of Cast-25.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 onnx==1.23.2 onnxruntime==1.32.0 ml_dtypes==0.6.0 \
    numpy==2.4.6
"$folder/venv/bin/python" -W ignore - <<'PY'
import ml_dtypes
import numpy as np
import onnxruntime
import torch
from onnx import parser

x = np.array([0, 1e-45, 1, 1.25, 1.5, 3], np.float32)
model = parser.parse_model("""<ir_version: 12, opset_import: ["": 25]> g (float[6] x) => (float[6] y)
{ stored = Cast<to: int = 24>(x) y = Cast<to: int = 1>(stored) }""")
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
results = {
    "ml_dtypes": x.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32),
    "torch": torch.tensor(x).to(torch.float8_e8m0fnu).float().numpy(),
    "onnxruntime": session.run(None, {"x": x})[0],
}
smallest = np.float32(2.0**-127)
for name, numbers in results.items():
    print(f"{name:12s}", dict(zip(x.tolist(), numbers.tolist(), strict=True)))
assert np.isnan(results["ml_dtypes"][0]) and results["torch"][0] == results["onnxruntime"][0] == smallest
assert all(numbers[1] == smallest for numbers in results.values())
assert results["ml_dtypes"][2:].tolist() == results["torch"][2:].tolist() == [1, 1, 2, 4]
assert results["onnxruntime"][2:].tolist() == [1, 2, 2, 4]
PY
