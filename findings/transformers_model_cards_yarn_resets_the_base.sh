#!/usr/bin/env bash
# Expected: a model card says to add "rope_scaling": {"rope_type": "yarn", "factor": 4.0, ...} to config.json for long texts. In a file that
#   transformers 5 has saved, whose base is in `rope_parameters`, the new section extends that one, or one of the two is refused.
# Really: `rope_scaling` replaces `rope_parameters`, base included: Qwen 3's 1,000,000 becomes 10,000, without a word. The model runs, and all
#   but its fastest pairs turn at other angles. The same by `config.rope_scaling = {...}` in Python leaves a base of null, which
#   save_pretrained writes and with which no model can be built. The card's own form, an old file with `rope_theta` beside the section, is right.
# Who meets it: whoever fine-tunes or quantises a Qwen, saves it with transformers 5, and then follows the card of the original.
# Versions: transformers 5.24.0. Source: convert_rope_params_to_dict and standardize_rope_params in modeling_rope_utils.py.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile --disable-pip-version-check transformers==5.24.0
FOLDER="$folder" TRANSFORMERS_VERBOSITY=critical "$folder/venv/bin/python" -W ignore - <<'PY'
import json
import os
from pathlib import Path

import transformers
from transformers import Qwen3Config

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
path = Path(os.environ["FOLDER"], "config.json")


def base_of(keys):
    path.write_text(json.dumps(keys))
    return Qwen3Config.from_pretrained(path.parent).rope_parameters["rope_theta"]


Qwen3Config(rope_theta=1e6).save_pretrained(path.parent)
saved = json.loads(path.read_text())
assigned = Qwen3Config(rope_theta=1e6)
assigned.rope_scaling = dict(YARN)
assigned.save_pretrained(path.parent)
written = json.loads(path.read_text())["rope_parameters"]
bases = {
    "as transformers 5 saved it": base_of(saved),
    "with the card's rope_scaling": base_of(saved | {"rope_scaling": YARN}),
    "an old file with the card's rope_scaling": base_of({"model_type": "qwen3", "rope_theta": 1e6, "rope_scaling": YARN}),
    "after config.rope_scaling = {...}": written["rope_theta"],
}
print("transformers", transformers.__version__, "- the base of Qwen 3 in a config.json:")
for name, base in bases.items():
    print(f"  {name:42s} {base}")
assert list(bases.values()) == [1e6, 1e4, 1e6, None]
PY
