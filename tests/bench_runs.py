"""Runs of the benchmarks with given times, for tests of what is printed, saved and drawn."""

from rope_cpu.bench import results
from rope_cpu.bench.cases import PEERS
from rope_cpu.bench.results import Result, Row

ENVIRONMENT = {
    "processor": "A processor with a name as long as processors' names are, 64-core, 3.5 GHz",
    "cores": 128,
    "threads": 128,
    "governor": "performance",
    "load": 0.5,
    "caches": {"L1": 49152, "L2": 1048576, "L3": 33554432},
    "python": "3.11.7",
    "versions": {
        "numpy": "2.4.6",
        "numba": "0.68.1",
        "torch": "2.13.0+cpu",
        "jax": "0.10.2",
        "onnxruntime": "1.31.1",
    },
    "time": "2026-01-01T00:00:00+00:00",
}


def timed_row(name, role, seconds, bytes_accessed=40960, wobble=0.01, **more):
    samples = [seconds * (1 + wobble * (i % 5 - 2)) for i in range(15)]
    return Row(name, role, samples=samples, bytes_accessed=bytes_accessed, **more)


def timed_case(ours=2e-6, limit=1e-6, name="prefill-32768/bfloat16/interleaved/out/cold", **more):
    plan = timed_row("plan", "ours", ours, **more)
    fast_limit = timed_row("limit, 1 thread", "limit", limit)
    slow_limit = timed_row("limit, 128 threads", "limit", 2 * limit)
    peers = [timed_row(name, "peer", 3e-3 * (i + 4)) for i, name in enumerate(PEERS)]
    skipped = Row(
        "a peer",
        "peer",
        "skipped",
        "a_package_with_a_long_name is not installed, and neither is another one",
    )
    wrong = Row("another", "peer", "wrong", "its error is 1e+09 times the tolerance; not timed")
    rows = [plan, *peers, skipped, wrong, fast_limit, slow_limit]
    return Result(name, "a description " * 20, rows=rows)


def timed_run(*cases):
    return results.Run("rope-cpu bench", "llama3-8b", ENVIRONMENT, list(cases))
