"""Results of the benchmarks with given times, for tests of what is printed and drawn."""

from rope_cpu.bench.results import Result, Timing


def timed_row(name, role, seconds, bytes_accessed=40960):
    samples = [seconds * (1 + 0.01 * (i % 5 - 2)) for i in range(15)]
    return Timing(name, role, samples=samples, bytes_accessed=bytes_accessed)


def timed_case():
    """Return a case: 2 µs of rope_cpu, limit 1 µs, a peer with 12 ms, and two without a time."""
    rows = [
        timed_row("plan", "ours", 2e-6),
        timed_row("NumPy", "peer", 12e-3),
        Timing("JAX jit", "peer", "skipped: jax is not installed"),
        Timing("another", "peer", "skipped: jax is not installed"),
        timed_row("limit, 1 thread", "limit", 1e-6),
        timed_row("limit, 128 threads", "limit", 2e-6),
    ]
    return Result("prefill-32768/bfloat16/out", "a description", rows)
