"""Runs of the benchmarks with given times, for tests of what is printed, saved and drawn."""

from rope_cpu.bench.cases import PEERS
from rope_cpu.bench.results import Result, Run, Timing

ENVIRONMENT = {
    "processor": "A processor with a name as long as processors' names are, 64-core, 3.5 GHz",
    "cores": 128,
    "threads": 128,
    "load": 0.5,
    "caches": {"L1": 49152, "L2": 1048576, "L3": 33554432},
    "python": "3.11.7",
    "versions": dict.fromkeys(("numpy", "numba", "torch", "jax", "onnxruntime"), "12.13.0+cpu"),
    "time": "2026-01-01T00:00:00+00:00",
}


def timed_row(name, role, seconds, bytes_accessed=40960, wobble=0.01):
    samples = [seconds * (1 + wobble * (i % 5 - 2)) for i in range(15)]
    return Timing(name, role, samples=samples, bytes_accessed=bytes_accessed)


def timed_case(ours=2e-6, name="prefill-32768/bfloat16/out", wobble=0.01):
    """Return a case with as many rows as there are, 2 µs of rope_cpu, limit 1 µs, peers 12 ms."""
    plan = timed_row("plan", "ours", ours, wobble=wobble)
    limits = [timed_row("limit, 1 thread", "limit", 1e-6)]
    limits.append(timed_row("limit, 128 threads", "limit", 2e-6))
    peers = [timed_row(name, "peer", 3e-3 * (i + 4)) for i, name in enumerate(PEERS)]
    skipped = Timing(
        "a peer", "peer", "skipped", "a_package_with_a_long_name is not installed " * 2
    )
    wrong = Timing("another", "peer", "wrong", "its error is 1e+09 times the tolerance; not timed")
    rows = [plan, timed_row("call", "ours", 2 * ours), *peers, skipped, wrong, *limits]
    return Result(name, "a description " * 20, rows=rows)


def timed_run(*cases):
    return Run("llama3-8b", ENVIRONMENT, list(cases))
