"""The table of results that were not measured."""

from bench_runs import timed_case

from rope_cpu.bench import report


def test_a_row_has_its_rate_share_of_the_limit_and_ratio():
    ours, peer, limit, skipped = report.case_lines(timed_case())
    # 40960 bytes in 2 µs are 20.48 GB/s, half of the limit.
    base = ["1.00", "1.00", "…", "1.00"]
    assert ours.split() == ["plan", "2.00", "µs", "20.5", "50", "%", *base]
    assert peer.split()[-4:] == ["6000", "6000", "…", "6000"]
    assert "limit, 1 thread" in limit  # the slower way is not the limit
    assert skipped == "  skipped: jax is not installed (JAX jit, another)"


def test_durations_have_three_digits():
    seconds = (2.5e-9, 9.996e-7, 1.3e-6, 0.0123)
    assert [*map(report.duration, seconds)] == ["2.50 ns", "1000 ns", "1.30 µs", "12.3 ms"]
