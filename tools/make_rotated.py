"""Write tests/data/rotated_by_transformers.json: a fixed input, rotated by a few models' own code.

python tools/make_rotated.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS / "peers"))
from test_rotated_values import CASES, theirs  # noqa: E402

TARGET = TESTS / "data" / "rotated_by_transformers.json"
NAMES = (
    *(
        "llama",
        "llama dynamic long",
        "llama yarn",
        "llama llama3",
        "llama proportional",
        "gpt_neox",
        "glm4",
    ),
    *(
        "llama yarn past the last pair",
        "llama yarn cut off",
        "llama yarn from the first pair",
        "llama yarn mscale",
    ),
    *(
        "cohere2",
        "phi3 short",
        "phi3 long",
        "deepseek_v3",
        "gemma3 full",
        "gemma3 sliding",
        "gpt_oss",
        "esm",
    ),
)


def fixed_input(tokens: int) -> np.ndarray:
    """Return (1, 1, tokens, 64) multiples of 1/16 from -1 to 1: exact in every format."""
    return (
        ((np.arange(tokens * 64) * 7 % 33 - 16) / 16).astype(np.float32).reshape(1, 1, tokens, 64)
    )


def main() -> None:
    """Write the file."""
    table = {}
    for name in NAMES:
        case = CASES[name]
        ids = np.array([0, 1, 1000, case.length - 1])
        rotated, inv_freq, config = theirs(case, ids, fixed_input(len(ids)))
        table[name] = {
            "config": {"model_type": config["model_type"], **case.keys},
            "layer_type": case.layer_type,
            "length": case.length,
            "ids": ids.tolist(),
            "halves_out": case.apply.endswith("interleave"),
            "inv_freq": [float(f"{value:.9g}") for value in inv_freq],
            "rotated": [float(f"{value:.9g}") for value in rotated.reshape(-1)],
        }
    rows = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items()]
    TARGET.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{len(table)} cases, {TARGET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
