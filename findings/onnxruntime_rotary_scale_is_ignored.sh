#!/usr/bin/env bash
# Expected: the attribute `scale` of com.microsoft.RotaryEmbedding changes the result: its text says "Custom scale will be used if specified.
#   Default value is 1.0", so 0.25 gives a quarter of the rotated values, or the rotation at a quarter of the position.
# Really: onnxruntime's CPU accepts any scale and ignores it; results for 1, 0.25 and 40 have equal bits.
# Who meets it: whoever writes linear scaling of positions, or the attention factor of YaRN, into this attribute: the model runs as if unscaled.
# Versions: onnxruntime 1.32.0, onnx 1.23.2. Source: docs/ContribOperators.md of onnxruntime, com.microsoft.RotaryEmbedding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import onnxruntime
from onnx import parser

angles = np.arange(16)[:, None] / 10000 ** (np.arange(4) / 4)
feeds = {
    "x": np.random.default_rng(0).standard_normal((1, 2, 3, 8)).astype(np.float32),
    "position": np.array([2]),
    "cos": np.cos(angles).astype(np.float32),
    "sin": np.sin(angles).astype(np.float32),
}


def rotated(scale):
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[1, 2, 3, 8] x, int64[1] position, float[16, 4] cos, float[16, 4] sin) => (float[1, 2, 3, 8] y)
    {{ y = com.microsoft.RotaryEmbedding<scale: float = {scale:.2f}>(x, position, cos, sin) }}"""
    model = parser.parse_model(text)
    assert model.graph.node[0].attribute[0].f == np.float32(scale)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)[0]


half = feeds["x"][..., :4] * feeds["cos"][2:5] - feeds["x"][..., 4:] * feeds["sin"][2:5]
gaps = {scale: np.abs(rotated(scale)[..., :4] - half).max() for scale in (1, 0.25, 40)}
print("onnxruntime", onnxruntime.__version__, "- differences from the rotation without a scale:", gaps)
assert max(gaps.values()) < 1e-6, "the scale is used"
assert all(np.array_equal(rotated(1), rotated(scale)) for scale in (0.25, 40))
PY
