#!/usr/bin/env bash
# Expected: onnx.utils.extract_model keeps every node that the wanted outputs depend on.
# Really: it follows the inputs of nodes and not what their subgraphs read from outside, so the node that computes a value for the branches of an
#   If is left out; the call ends in a ValidationError about an order of nodes that the valid source model has.
# Who meets it: cutting one layer out of a decoder whose rotation chooses between short and long frequencies by If, as longrope models do.
# Versions: onnx 1.23.2. Source: the docstring of extract_model, which asks for a path from the inputs to the outputs.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check onnx==1.23.2 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import onnx
from onnx import parser, utils

WITH_IF = """<ir_version: 10, opset_import: ["": 21]> layer (float[2] x, bool is_long) => (float[2] y, float[2] other)
{ scaled = Neg(x)
  y = If(is_long) <then_branch = long () => (float[2] a) { a = Abs(scaled) }, else_branch = short () => (float[2] b) { b = Exp(scaled) }>
  other = Sqrt(x) }"""
WITHOUT_IF = """<ir_version: 10, opset_import: ["": 21]> layer (float[2] x, bool is_long) => (float[2] y, float[2] other)
{ scaled = Neg(x)  a = Abs(scaled)  b = Exp(scaled)  y = Where(is_long, a, b)  other = Sqrt(x) }"""

outcomes = {}
for name, text in {"Where": WITHOUT_IF, "If": WITH_IF}.items():
    model = parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "model.onnx")
    try:
        utils.extract_model("model.onnx", "part.onnx", ["x", "is_long"], ["y"])
        outcomes[name] = [node.op_type for node in onnx.load("part.onnx").graph.node]
    except onnx.checker.ValidationError as error:
        outcomes[name] = str(error).splitlines()[0]
    print(f"{name:6s}", outcomes[name])
assert outcomes["Where"] == ["Neg", "Abs", "Exp", "Where"]
assert "topologically sorted" in outcomes["If"]
PY
