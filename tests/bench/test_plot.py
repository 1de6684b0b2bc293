"""Pictures of runs: the place of each thing drawn."""

import pytest
from bench_runs import timed_row, timed_run

from rope_cpu.bench.results import Result, Timing

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from rope_cpu.bench import plot


@pytest.fixture
def drawn(monkeypatch):
    """Return a function that draws a run and returns the figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: figures.append(figure))

    def draw(*cases):
        plot.save(timed_run(*cases), "run.png")
        return figures[-1]

    return draw


def panels(figure):
    """Return the panels of a figure by title, with lines of a title joined."""
    shown = [ax for ax in figure.axes if ax.get_visible()]
    return {ax.get_title(loc="left").replace("\n", " "): ax for ax in shown}


def dots(ax):
    """Return (time, row) of each dot of a panel."""
    offsets = [collection.get_offsets() for collection in ax.collections]
    return [tuple(map(float, place[0])) for place in offsets if place.any()]


def whiskers(ax):
    lines = [lines for lines in ax.collections if hasattr(lines, "get_segments")]
    return [tuple(segment[:, 0]) for several in lines for segment in several.get_segments()]


def labels(ax):
    return [label.get_text() for label in ax.get_yticklabels() if label.get_visible()]


def two_rows(name, limit=1e-6):
    call = timed_row("call", "ours", 4e-6)
    rows = [timed_row("plan", "ours", 2e-6), call, timed_row("limit, 1 thread", "limit", limit)]
    return Result(name, name.replace("/", ", "), rows=rows)


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_a_picture_is_drawn(tmp_path, suffix, start):
    path = tmp_path / f"run.{suffix}"
    plot.save(timed_run(two_rows("decode-1/float32")), path)
    assert path.read_bytes().startswith(start)


def test_every_case_with_several_implementations_has_dots_whiskers_and_texts(drawn):
    alone = Result("shift/float32", "", rows=[timed_row("shift", "ours", 2e-6)])
    shown = panels(drawn(two_rows("decode-1/float32"), two_rows("decode-8/x"), alone))
    assert list(shown) == ["decode-1, float32", "decode-8, x"]
    ax = shown["decode-8, x"]
    assert dots(ax) == [pytest.approx((2e-6, 0)), pytest.approx((4e-6, 1))]
    assert whiskers(ax) == [pytest.approx((1.98e-6, 2.02e-6)), pytest.approx((3.96e-6, 4.04e-6))]
    assert [float(line.get_xdata()[0]) for line in ax.lines] == [pytest.approx(1e-6)]
    assert labels(ax) == ["rope_cpu plan", "rope_cpu call"]
    assert [text.get_text() for text in ax.texts] == ["2.00 µs", "4.00 µs (2.00\u00d7)"]


def test_cases_of_a_family_stand_side_by_side_with_common_rows(drawn):
    """The labels of rows stand on the left; a row that was not timed in any case has none."""
    left = two_rows("separate-512/float32")
    left.rows.insert(2, Timing("JAX jit", "peer", "skipped", "jax is not installed"))
    right = two_rows("separate-512/float32/out")
    right.rows.insert(2, timed_row("ORT run", "peer", 9e-6))
    shown = panels(drawn(left, two_rows("decode-1/float32"), right))
    in_place, out = (shown[f"separate-512, float32{end}"] for end in ("", ", out"))
    assert in_place.get_subplotspec().rowspan == out.get_subplotspec().rowspan
    assert labels(in_place) == ["rope_cpu plan", "rope_cpu call", "ORT run"]
    assert not labels(out)
    assert len(dots(in_place)) == 2
    assert dots(out)[2] == pytest.approx((9e-6, 2))


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no case with several"):
        plot.save(timed_run(), "run.png")
