"""Compare the times of `rope-cpu bench` with those of `timeit` in processes without rope_cpu.bench.

    python tools/outside_timer.py [ROUNDS]

Both are run alternately, ROUNDS times (8) for each case, since the speed of a machine changes from
minute to minute. Prints the median ratio of a pair of runs. Exit code 1 if it is off by more than
5 % in a case.

Calls are timed as in the benchmark: with other work in between, which takes a share of the caches.
A second figure is for calls without other work, which are a few per cent faster if q and k take a
good part of the last-level cache.
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
# Allocations of q and k: the speed depends on the address. SAMPLES: of each.
ALLOCATIONS = 5
SAMPLES = 40
SAMPLE_SECONDS = 0.002
WARM_UP_SECONDS = 0.006
TOLERANCE = 0.05


def outside(name: str) -> tuple[float, float]:
    """Return median seconds of a plan's call, alternating with other work and alone.

    It rotates views of a packed buffer of Llama 3.1 8B's shape.
    """
    import ml_dtypes
    import numpy as np

    import rope_cpu

    batch, tokens, dtype_name = CASES[name]
    dtype = ml_dtypes.bfloat16 if dtype_name == "bfloat16" else np.float32
    rope = rope_cpu.RotaryEmbedding(128, rope_theta=500000.0)
    decode_ids = 4096 + 17 * np.arange(batch)[:, None]
    plan = rope.plan(decode_ids if tokens == 1 else np.arange(tokens))
    normal = np.random.default_rng(0).standard_normal((batch, tokens, 48, 128))
    other = np.ones(normal.nbytes * np.dtype(dtype).itemsize // 8, np.uint8)
    in_turn = []
    alone = []
    for qkv in [normal.astype(dtype) for _ in range(ALLOCATIONS)]:
        q = qkv[:, :, :32]
        k = qkv[:, :, 32:40]
        # A statement: a lambda around the call would add a tenth of a decode step.
        names = {"plan": plan, "q": q, "k": k, "out": (q, k)}
        timer = timeit.Timer("plan(q, k, out)", globals=names)
        calls, seconds = timer.autorange()
        loops = max(1, round(calls * SAMPLE_SECONDS / seconds))
        warm_up = max(8, round(calls * WARM_UP_SECONDS / seconds))
        for _ in range(SAMPLES):
            np.add(other, 0, out=other)
            timer.timeit(warm_up)
            in_turn.append(timer.timeit(loops) / loops)
        alone += [total / loops for total in timer.repeat(SAMPLES, loops)]
    return statistics.median(in_turn), statistics.median(alone)


def inside(name: str) -> float:
    """Return the median seconds that `rope-cpu bench` reports for a plan's call."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "rope_cpu", "bench", name, "--no-peers"]
        command += ["--json", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run: dict[str, Any] = json.loads(path.read_text())
    return statistics.median(run["cases"][0]["rows"][0]["samples"])


def outside_in_new_process(name: str) -> list[float]:
    """Return what `outside` returns, measured in a new process."""
    command = [sys.executable, __file__, "--one", name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(seconds) for seconds in output.split()]


def compare(name: str, rounds: int) -> float:
    """Print a line for a case; return the median ratio of calls in turn."""
    ratios = []
    for number in range(rounds):
        if number % 2:
            reported = inside(name)
            in_turn, alone = outside_in_new_process(name)
        else:
            in_turn, alone = outside_in_new_process(name)
            reported = inside(name)
        ratios.append((in_turn / reported, alone / reported))
    in_turn, alone = (statistics.median(column) for column in zip(*ratios, strict=True))
    listed = ", ".join(f"{ratio:.2f}" for ratio, _ in sorted(ratios))
    print(f"{name:24} {in_turn:.3f}   ({listed})   alone {alone:.3f}", flush=True)
    return in_turn


def main(rounds: int = 8) -> int:
    """Print a line for each case; return the exit code."""
    ratios = [compare(name, rounds) for name in CASES]
    return int(any(abs(ratio - 1) > TOLERANCE for ratio in ratios))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(*outside(sys.argv[2]))
    else:
        raise SystemExit(main(*map(int, sys.argv[1:])))
