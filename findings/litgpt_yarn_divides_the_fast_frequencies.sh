#!/usr/bin/env bash
# Expected: YaRN keeps the fast frequencies, which turn more than beta_fast times in the original length, and divides the slow ones by the
#   factor; a library that names YaRN and its parameters does that.
# Really: LitGPT has the ends of the ramp exchanged: it divides the fast frequencies and keeps the slow ones. Neighbouring tokens are told
#   apart worse than in training by the factor, and positions beyond the original length are not brought back into it. Shapes, cos and sin at
#   position 0 and the attention factor are right, so nothing fails.
# Who meets it: whoever runs a checkpoint with YaRN in LitGPT, by `rope_adjustments` with beta_fast and beta_slow: its own list of models has none.
# Versions: litgpt 0.5.13, torch 2.13.0. Source: arXiv:2309.00071, section 3.2; litgpt/model.py, `build_rope_cache`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check "$@"; }
pip torch==2.13.0 lightning==2.6.6 safetensors==0.8.0 psutil==7.2.2 numpy==2.4.6
pip --no-deps litgpt==0.5.13
"$folder/venv/bin/python" - <<'PY'
from importlib.metadata import version

import numpy as np
from litgpt.model import build_rope_cache

WIDTH, BASE, FACTOR, LENGTH, FAST, SLOW = 64, 10000.0, 4.0, 4096, 32, 1
yarn = {"factor": FACTOR, "original_max_seq_len": LENGTH, "beta_fast": FAST, "beta_slow": SLOW}
cos, sin = build_rope_cache(2, WIDTH, base=int(BASE), extra_config=yarn)
found = np.arctan2(sin[1].numpy(), cos[1].numpy())[: WIDTH // 2]  # the angles of position 1

plain = BASE ** -(np.arange(0, WIDTH, 2) / WIDTH)
turns = plain * LENGTH / (2 * np.pi)
divided = plain / found
print("litgpt", version("litgpt"))
for name, some in (("more than beta_fast turns", turns > 2 * FAST), ("less than beta_slow", turns < SLOW / 2)):
    print(f"frequencies with {name}: divided by {divided[some].min():.2f} to {divided[some].max():.2f}")
assert np.allclose(divided[turns > 2 * FAST], FACTOR), "kept by now"
assert np.allclose(divided[turns < SLOW / 2], 1), "divided by now"
PY
