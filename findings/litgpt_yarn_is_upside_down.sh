#!/usr/bin/env bash
# Expected: rope_adjustments with beta_fast and beta_slow is YaRN: pairs with more than 32 revolutions in the original length keep their
#   frequency, those with less than one are divided by the factor, as in the paper (arXiv:2309.00071) and in transformers.
# Really: LitGPT's ramp runs the other way: the fast pairs are divided by the factor, and the slow ones keep their frequency. A comment beside
#   the line has the same order. Only pairs in the middle of the ramp turn as they should.
# Who meets it: a YaRN checkpoint (Qwen 2.5 and 3 at 128k, DeepSeek, gpt-oss) in LitGPT by a config of one's own: it loads and runs.
# Versions: litgpt 0.5.13, torch 2.13.0. Source: build_rope_cache in litgpt/model.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check)
"${pip[@]}" torch==2.13.0
"${pip[@]}" numpy==2.4.6 fsspec lightning-utilities packaging psutil pyyaml safetensors tokenizers tqdm huggingface_hub jsonargparse
"${pip[@]}" --no-deps litgpt==0.5.13 lightning==2.6.6 torchmetrics==1.9.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import math

import numpy as np
from litgpt.model import build_rope_cache

FACTOR, ORIGINAL, WIDTH, BASE = 4.0, 4096, 128, 10000.0
YARN = {"factor": FACTOR, "beta_fast": 32, "beta_slow": 1, "original_max_seq_len": ORIGINAL}


def frequencies(**options):
    cos, sin = build_rope_cache(2, WIDTH, base=BASE, **options)
    return np.arctan2(sin[1], cos[1])[: WIDTH // 2].double().numpy()  # angles of position 1


divisors = frequencies() / frequencies(extra_config=YARN)
revolutions = ORIGINAL * BASE ** (-np.arange(0, WIDTH, 2) / WIDTH) / (2 * math.pi)
fast, slow = revolutions > 40, revolutions < 0.8
for name, pairs in ("fast", fast), ("slow", slow):
    print(f"litgpt 0.5.13, YaRN by 4: {pairs.sum()} {name} pairs are divided by", sorted(set(divisors[pairs].round(3).tolist())))
assert np.allclose(divisors[fast], FACTOR, rtol=1e-4) and np.allclose(divisors[slow], 1, rtol=1e-4)
PY
