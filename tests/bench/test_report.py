"""The table and the picture of results that were not measured."""

import pytest

from rope_cpu.bench import report
from rope_cpu.bench.results import Result, Timing


def timed_row(name, role, seconds, bytes_accessed=40960):
    samples = [seconds * (1 + 0.01 * (i % 5 - 2)) for i in range(15)]
    return Timing(name, role, samples=samples, bytes_accessed=bytes_accessed)


def timed_case():
    """Return a case: 2 µs of rope_cpu, limit 1 µs, a peer with 12 ms, and a peer without a time."""
    rows = [
        timed_row("plan", "ours", 2e-6),
        timed_row("NumPy", "peer", 12e-3),
        Timing("JAX jit", "peer", "skipped: jax is not installed"),
        timed_row("limit, 1 thread", "limit", 1e-6),
        timed_row("limit, 128 threads", "limit", 2e-6),
    ]
    return Result("prefill-32768/bfloat16/out", "a description", rows)


def test_a_row_has_its_rate_share_of_the_limit_and_ratio():
    ours, peer, limit, skipped = report.case_lines(timed_case())
    # 40960 bytes in 2 µs are 20.48 GB/s, half of the limit.
    base = ["1.00", "1.00", "…", "1.00"]
    assert ours.split() == ["plan", "2.00", "µs", "20.5", "50", "%", *base]
    assert peer.split()[-4:] == ["6000", "6000", "…", "6000"]
    assert "limit, 1 thread" in limit  # the slower way is not the limit
    assert skipped.split(maxsplit=2) == ["JAX", "jit", "skipped: jax is not installed"]


def test_durations_have_three_digits():
    seconds = (2.5e-9, 9.996e-7, 1.3e-6, 0.0123)
    assert [*map(report.duration, seconds)] == ["2.50 ns", "1000 ns", "1.30 µs", "12.3 ms"]


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run.{suffix}"
    report.draw([timed_case()], path)
    assert path.read_bytes().startswith(start)


def test_every_case_has_a_bar_for_each_timed_call(monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    monkeypatch.setattr(
        figure_module.Figure, "savefig", lambda figure, path: figures.append(figure)
    )
    rows = [timed_row("plan", "ours", 2e-6), timed_row("NumPy", "peer", 4e-6)]
    limit = timed_row("limit, 1 thread", "limit", 1e-6)
    report.draw([Result("a", "one token", [*rows, limit]), Result("b", "two", rows[:1])], "run.png")
    first, second = figures[0].axes
    assert first.get_title(loc="left") == "one token"
    assert [label.get_text() for label in first.get_yticklabels()] == ["plan", "NumPy"]
    assert [bar.get_width() for bar in first.patches] == pytest.approx([2e-6, 4e-6])
    assert [text.get_text() for text in first.texts] == ["2.00 µs", "4.00 µs"]
    assert len({bar.get_facecolor() for bar in first.patches}) == 2
    assert len(second.patches) == 1


def test_a_picture_of_nothing_is_refused():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="no case could be timed"):
        report.draw([Result("a", "one token")], "run.png")
