"""Compare what `rope-cpu bench` reports with timings taken by `timeit` in processes that do not import rope_cpu.bench.

    python tests/tools/outside_timer.py [ROUNDS]

Both are run in turn, ROUNDS times (4), as a machine is not as fast in one minute as in the next; printed is the ratio
of the medians of each pair of runs. Exit code 1 where the median ratio of a case is off by more than 5 %.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from typing import Any

# Case of the benchmark → batch, tokens, name of the dtype.
CASES = {
    "decode-1/float32": (1, 1, "float32"),
    "decode-1/bfloat16": (1, 1, "bfloat16"),
    "decode-64/float32": (64, 1, "float32"),
    "prefill-128/float32": (1, 128, "float32"),
    "prefill-512/bfloat16": (1, 512, "bfloat16"),
    "prefill-512/float32": (1, 512, "float32"),
    "prefill-4096/bfloat16": (1, 4096, "bfloat16"),
}
PLACES = 5  # arrays in different places of memory, as some are slower than others
TOLERANCE = 0.05


def outside(name: str) -> float:
    """Return the median seconds of a plan's call on views of a packed buffer of Llama 3.1 8B's shape, by timeit."""
    import ml_dtypes
    import numpy as np

    import rope_cpu

    batch, tokens, kind = CASES[name]
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
    rope = rope_cpu.RotaryEmbedding(128, rope_theta=500000.0)
    plan = rope.plan(4096 + 17 * np.arange(batch)[:, None] if tokens == 1 else np.arange(tokens))
    taken = []
    for _ in range(PLACES):
        raw = np.random.default_rng(0).standard_normal((batch, tokens, 48, 128)).astype(dtype)
        q, k = raw[:, :, :32], raw[:, :, 32:40]
        # A statement, as a lambda around the call would be a tenth of a decode step.
        timer = timeit.Timer("plan(q, k, out)", globals={"plan": plan, "q": q, "k": k, "out": (q, k)})
        loops = max(1, timer.autorange()[0] // 100)  # samples of about 2 ms
        taken += [seconds / loops for seconds in timer.repeat(60, loops)]
    return statistics.median(taken)


def inside() -> dict[str, float]:
    """Return the median seconds that `rope-cpu bench` reports for a plan's call in each case."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "rope_cpu.cli", "bench", *CASES, "--no-peers", "--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run: dict[str, Any] = json.loads(path.read_text())
    return {case["name"]: statistics.median(case["rows"][0]["samples"]) for case in run["cases"]}


def main(rounds: int = 4) -> int:
    """Print a line for each case; return the exit code."""
    ratios: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(rounds):
        reported = inside()
        for name in CASES:
            command = [sys.executable, __file__, "--one", name]
            seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            ratios[name].append(seconds / reported[name])
    off = [name for name, taken in ratios.items() if abs(statistics.median(taken) - 1) > TOLERANCE]
    for name, taken in ratios.items():
        print(f"{name:24} {statistics.median(taken):.3f}   ({', '.join(f'{ratio:.3f}' for ratio in sorted(taken))})")
    return 1 if off else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(outside(sys.argv[2]))
    else:
        raise SystemExit(main(*map(int, sys.argv[1:])))
