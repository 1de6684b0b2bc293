"""The picture of a run: the names and the lengths of its bars."""

import pytest
from bench_runs import timed_case, timed_row

from rope_cpu.bench.results import Result

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from rope_cpu.bench import plot


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path, suffix, start):
    path = tmp_path / f"run.{suffix}"
    plot.save([timed_case()], path)
    assert path.read_bytes().startswith(start)


def test_every_case_has_a_bar_for_each_timed_call(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    rows = [timed_row("plan", "ours", 2e-6), timed_row("NumPy", "peer", 4e-6)]
    limit = timed_row("limit, 1 thread", "limit", 1e-6)
    plot.save([Result("a", "one token", [*rows, limit]), Result("b", "two", rows[:1])], "run.png")
    first, second = figures[0].axes
    assert first.get_title(loc="left") == "one token"
    assert [label.get_text() for label in first.get_yticklabels()] == ["plan", "NumPy"]
    assert [bar.get_width() for bar in first.patches] == pytest.approx([2e-6, 4e-6])
    assert [text.get_text() for text in first.texts] == ["2.00 µs", "4.00 µs"]
    assert len({bar.get_facecolor() for bar in first.patches}) == 2
    assert len(second.patches) == 1


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no case could be timed"):
        plot.save([Result("a", "one token")], "run.png")
