#!/usr/bin/env bash
# Expected: a left window of 3 is the same set of keys wherever the number is written.
# Really: com.microsoft.GroupQueryAttention's `local_window_size` of 3, whose text calls it "left_window_size", is the token itself and 2
#   before it. ai.onnx Attention's `left_window_size` of 3 (opset 25) and the left number of JAX's `local_window_size` are the token itself
#   and 3 before it. One JAX integer with is_causal=False is 3 to each side: 7 keys.
# Who meets it: a config's sliding_window (which counts the token itself, as GroupQueryAttention does) that is written into the other two
#   attends to one key too many, at every position from the window on; short tests are right.
# Versions: onnxruntime 1.32.0, onnx 1.23.2 (its reference evaluator agrees with onnxruntime on Attention), jax 0.10.2.
# Source: docs/ContribOperators.md of onnxruntime; the text of Attention-25; the docstring of jax.nn.dot_product_attention.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 onnxruntime==1.32.0 jax==0.10.2 jaxlib==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np
import onnxruntime
from onnx import parser
from onnx.reference import ReferenceEvaluator

# Equal scores, and values that are unit vectors: a weight above 0 is a key that is attended to.
zeros, values = np.zeros((1, 8, 8), np.float32), np.eye(8, dtype=np.float32)[None]


def keys(weights):
    return (np.asarray(weights).reshape(8, 8) > 0).sum(1).tolist()


def session(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


group_query = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
g (float[1, 8, 8] q, float[1, 8, 8] k, float[1, 8, 8] v, float[1, 1, 0, 8] past_k, float[1, 1, 0, 8] past_v, int32[1] last, int32 total)
  => (float[1, 8, 8] y, float[1, 1, 8, 8] new_k, float[1, 1, 8, 8] new_v)
{ y, new_k, new_v = com.microsoft.GroupQueryAttention<num_heads: int = 1, kv_num_heads: int = 1, local_window_size: int = 3>
                    (q, k, v, past_k, past_v, last, total) }""")
past = np.zeros((1, 1, 0, 8), np.float32)
feeds = {"q": zeros, "k": zeros, "v": values, "past_k": past, "past_v": past, "last": np.array([7], np.int32), "total": np.int32(8)}
feeds["total"] = np.array(8, np.int32)
counts = {"GroupQueryAttention": keys(session(group_query).run(["y"], feeds)[0])}

attention = parser.parse_model("""<ir_version: 11, opset_import: ["": 25]>
g (float[1, 1, 8, 8] q, float[1, 1, 8, 8] k, float[1, 1, 8, 8] v) => (float[1, 1, 8, 8] y)
{ y = Attention<is_causal: int = 1, left_window_size: int = 3>(q, k, v) }""")
feeds = {"q": zeros[None], "k": zeros[None], "v": values[None]}
counts["Attention"] = keys(session(attention).run(None, feeds)[0])
counts["Attention, reference"] = keys(ReferenceEvaluator(attention).run(None, feeds)[0])

q, v = zeros[:, :, None], values[:, :, None]
counts["JAX (3, 0)"] = keys(jax.nn.dot_product_attention(q, q, v, is_causal=True, local_window_size=(3, 0)))
counts["JAX 3, not causal"] = keys(jax.nn.dot_product_attention(q, q, v, local_window_size=3))
for name, count in counts.items():
    print(f"{name:22s} keys of tokens 0 to 7: {count}")
assert counts["GroupQueryAttention"] == [1, 2, 3, 3, 3, 3, 3, 3]
assert counts["Attention"] == counts["Attention, reference"] == counts["JAX (3, 0)"] == [1, 2, 3, 4, 4, 4, 4, 4]
assert counts["JAX 3, not causal"] == [4, 5, 6, 7, 7, 6, 5, 4]
PY
