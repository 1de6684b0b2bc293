"""Compare what `rope-cpu bench` reports with timings taken by `timeit` in processes that do not import rope_cpu.bench.

    python tests/tools/outside_timer.py [ROUNDS]

Both are run alternately, ROUNDS times (8) for each case, as a machine is not as fast in one minute as in the next;
printed is the median ratio of a pair of runs. Exit code 1 where it is off by more than 5 % in a case.

Calls are timed as the benchmark times them: with other work in between, which takes its share of the caches.
A second figure is for calls that have the machine to themselves, which are a few per cent faster where q and k take
a good part of the last-level cache.
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
PLACES, SAMPLES = (
    5,
    40,
)  # arrays in different places of memory, as some are slower than others; samples of each
SAMPLE, WARM_UP = 0.002, 0.006  # seconds
TOLERANCE = 0.05


def outside(name: str) -> tuple[float, float]:
    """Return median seconds of a plan's call, alternating with other work and alone.

    It rotates views of a packed buffer of Llama 3.1 8B's shape.
    """
    import ml_dtypes
    import numpy as np

    import rope_cpu

    batch, tokens, kind = CASES[name]
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32
    rope = rope_cpu.RotaryEmbedding(128, rope_theta=500000.0)
    plan = rope.plan(4096 + 17 * np.arange(batch)[:, None] if tokens == 1 else np.arange(tokens))
    normal = np.random.default_rng(0).standard_normal((batch, tokens, 48, 128))
    other = np.ones(normal.nbytes * np.dtype(dtype).itemsize // 8, np.uint8)
    in_turn, alone = [], []
    for raw in [normal.astype(dtype) for _ in range(PLACES)]:
        q, k = raw[:, :, :32], raw[:, :, 32:40]
        # A statement, as a lambda around the call would be a tenth of a decode step.
        timer = timeit.Timer(
            "plan(q, k, out)", globals={"plan": plan, "q": q, "k": k, "out": (q, k)}
        )
        loops, seconds = timer.autorange()
        loops, warm = (
            max(1, round(loops * SAMPLE / seconds)),
            max(8, round(loops * WARM_UP / seconds)),
        )
        for _ in range(SAMPLES):
            np.add(other, 0, out=other)
            timer.timeit(warm)
            in_turn.append(timer.timeit(loops) / loops)
        alone += [seconds / loops for seconds in timer.repeat(SAMPLES, loops)]
    return statistics.median(in_turn), statistics.median(alone)


def inside(name: str) -> float:
    """Return the median seconds that `rope-cpu bench` reports for a plan's call."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [
            sys.executable,
            "-m",
            "rope_cpu",
            "bench",
            name,
            "--no-peers",
            "--json",
            str(path),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run: dict[str, Any] = json.loads(path.read_text())
    return statistics.median(run["cases"][0]["rows"][0]["samples"])


def compare(name: str, rounds: int) -> float:
    """Print a line for a case; return the median ratio of calls in turn."""
    pairs = []
    for count in range(rounds):
        reported = inside(name) if count % 2 else None
        taken = subprocess.run(
            [sys.executable, __file__, "--one", name], check=True, capture_output=True, text=True
        )
        reported = reported or inside(name)
        pairs.append([float(seconds) / reported for seconds in taken.stdout.split()])
    in_turn, alone = (statistics.median(ratios) for ratios in zip(*pairs, strict=True))
    listed = ", ".join(f"{ratio:.2f}" for ratio, _ in sorted(pairs))
    print(f"{name:24} {in_turn:.3f}   ({listed})   alone {alone:.3f}", flush=True)
    return in_turn


def main(rounds: int = 8) -> int:
    """Print a line for each case; return the exit code."""
    ratios = [compare(name, rounds) for name in CASES]
    return 1 if any(abs(ratio - 1) > TOLERANCE for ratio in ratios) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(*outside(sys.argv[2]))
    else:
        raise SystemExit(main(*map(int, sys.argv[1:])))
