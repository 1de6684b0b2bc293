#!/usr/bin/env bash
# Expected: get_slice(name)[...] of safetensors takes the slices that NumPy and PyTorch take: a negative start or stop counts from the end, a stop
#   beyond the end stops there, and an empty range is an empty array.
# Really: one negative integer works (slice[-1]), a negative bound of a range raises OverflowError, a stop beyond the end SafetensorError, and a
#   range whose stop lies before its start SystemError. slice[True] is row 1, where NumPy adds an axis.
# Who meets it: loading one part of the heads of a projection, the last rows of a table, or equal shards where the last one is smaller.
# Versions: safetensors 0.8.0, NumPy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import numpy as np
import safetensors
from safetensors import safe_open
from safetensors.numpy import save_file

rows = np.arange(24, dtype=np.float32).reshape(4, 6)
save_file({"q": rows}, "file.safetensors")
cases = {
    "[-1]": np.s_[-1],
    "[::2]": np.s_[::2],
    "[..., :2]": np.s_[..., :2],
    "[-2:]": np.s_[-2:],
    "[:-1]": np.s_[:-1],
    "[2:8], the last of equal shards": np.s_[2:8],
    "[2:1], none": np.s_[2:1],
    "[True]": np.s_[True],
}
outcomes = {}
with safe_open("file.safetensors", "numpy") as file:
    part = file.get_slice("q")
    for name, index in cases.items():
        try:
            found = part[index]
            outcomes[name] = "as NumPy" if np.array_equal(found, rows[index]) else f"shape {found.shape}, NumPy {rows[index].shape}"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}, NumPy has shape {rows[index].shape}"
print("safetensors", safetensors.__version__)
for name, outcome in outcomes.items():
    print(f"{name:32s}", outcome)
words = [outcome.split(",")[0] for outcome in outcomes.values()]
assert words == ["as NumPy"] * 3 + ["OverflowError"] * 2 + ["SafetensorError", "SystemError", "shape (6"], words
PY
