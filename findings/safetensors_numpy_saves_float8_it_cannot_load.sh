#!/usr/bin/env bash
# Expected: safetensors.numpy loads what it saves. bfloat16 arrays of ml_dtypes come back, so float8 ones do as well, or are refused on saving.
# Really: save_file writes ml_dtypes' float8_e4m3fn, float8_e5m2 and float8_e8m0fnu under their right names (F8_E4M3, …), and load_file ends
#   in AttributeError: numpy has no attribute 'float8_e4m3fn'. One such tensor makes the whole file unreadable from NumPy; safe_open reads
#   the others. int4 and float4_e2m1fn are refused on saving, with the list of dtypes.
# Who meets it: float8 caches and weights kept between runs of a NumPy server: saving succeeds, and the loss shows at the next start.
# Versions: safetensors 0.8.0, ml_dtypes 0.6.0, NumPy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import json

import ml_dtypes
import numpy as np
import safetensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

print("safetensors", safetensors.__version__)
outcomes = {}
for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn", "int4"):
    array = np.ones((2, 4), getattr(ml_dtypes, name))
    try:
        save_file({"cache": array, "other": np.arange(3)}, "file.safetensors")
    except safetensors.SafetensorError as error:
        outcomes[name] = "refused on saving: " + str(error).split(".")[0]
        continue
    with open("file.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    try:
        same = load_file("file.safetensors")["cache"].dtype == array.dtype
        outcomes[name] = f"written as {header['cache']['dtype']}, loaded as the same dtype: {same}"
    except AttributeError as error:
        with safe_open("file.safetensors", "numpy") as file:
            assert file.get_tensor("other").tolist() == [0, 1, 2]
        outcomes[name] = f"written as {header['cache']['dtype']}, not loaded: {error}"
for name, outcome in outcomes.items():
    print(f"{name:16s}", outcome)
kinds = [outcome.split()[0] + (" not" if "not loaded" in outcome else "") for outcome in outcomes.values()]
assert kinds == ["written", *["written not"] * 3, "refused", "refused"]
PY
