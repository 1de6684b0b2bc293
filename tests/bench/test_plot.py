"""Pictures of runs: what is drawn where, and that no text covers another."""

from itertools import combinations

import pytest
from bench_runs import timed_case, timed_row, timed_run

from rope_cpu.bench.results import Result, Row

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from rope_cpu.bench import plot

README_CASES = [
    f"{shape}/{dtype}"
    for shape in ("decode-1", "prefill-512", "prefill-4096")
    for dtype in ("bfloat16", "float32")
]


@pytest.fixture
def drawn(monkeypatch):
    """Return a function that draws a run and returns the figure."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **more: figures.append(figure))

    def draw(run):
        plot.save(run, "run.png")
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
    return [
        tuple(segment[:, 0])
        for lines in ax.collections
        if hasattr(lines, "get_segments")
        for segment in lines.get_segments()
    ]


def visible_texts(figure):
    """Return all texts but those of ticks outside their axis, which matplotlib does not draw."""
    texts = {text for text in figure.findobj(Text) if text.get_text() and text.get_visible()}
    for ax in figure.axes:
        low, high = ax.get_xlim()
        for label in ax.get_xticklabels():
            if not low <= label.get_position()[0] <= high:
                texts.discard(label)
    return texts


def two_rows(name, limit=1e-6):
    call = timed_row("call", "ours", 4e-6)
    rows = [timed_row("plan", "ours", 2e-6), call, timed_row("limit, 1 thread", "limit", limit)]
    return Result(name, name.replace("/", ", "), rows=rows)


def readme_case(name):
    """Return a case with as many rows as those of the README's picture, some with wide whiskers."""
    case = timed_case(name=name)
    case.what = name.replace("/", " tokens, q and k apart, ")
    names = [row.name for row in case.rows]
    del case.rows[names.index("NumPy complex")]
    case.rows[1:1] = [timed_row("plan, new arrays", "ours", 3e-6), timed_row("call", "ours", 4e-6)]
    if name.endswith("bfloat16"):
        for index, row in enumerate(case.rows):
            if row.name.startswith("ORT"):
                case.rows[index] = Row(row.name, "peer", "skipped", "has no bfloat16")
    else:
        case.rows[5] = timed_row(case.rows[5].name, "peer", 0.02, wobble=0.45)
    return case


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path, suffix):
    path = tmp_path / f"run.{suffix}"
    plot.save(timed_run(timed_case(name="decode-1/float32"), two_rows("layouts")), path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start


def test_every_case_with_several_implementations_has_dots_whiskers_and_texts(drawn):
    alone = Result("shift/float32", "", rows=[timed_row("shift", "ours", 2e-6)])
    figure = drawn(timed_run(two_rows("decode-1/float32"), two_rows("decode-8/x"), alone))
    shown = panels(figure)
    assert list(shown) == ["decode-1, float32", "decode-8, x"]
    ax = shown["decode-8, x"]
    assert dots(ax) == [pytest.approx((2e-6, 0)), pytest.approx((4e-6, 1))]
    assert whiskers(ax) == [pytest.approx((1.98e-6, 2.02e-6)), pytest.approx((3.96e-6, 4.04e-6))]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rope_cpu plan",
        "rope_cpu call",
    ]
    assert [text.get_text() for text in ax.texts] == ["2.00 µs", "4.00 µs (2.00\u00d7)"]
    assert ax.get_xscale() == "log"
    assert not ax.patches


def test_cases_of_a_family_stand_side_by_side_with_common_rows(drawn):
    """The labels of rows stand on the left; a row that was not timed in any case has none."""
    left = two_rows("separate-512/float32")
    left.rows.insert(2, Row("JAX jit", "peer", "skipped", "jax is not installed"))
    right = two_rows("separate-512/float32/out")
    right.rows.insert(2, timed_row("ORT run", "peer", 9e-6))
    shown = panels(drawn(timed_run(left, two_rows("decode-1/float32"), right)))
    in_place, out = (shown[f"separate-512, float32{end}"] for end in ("", ", out"))
    assert in_place.get_subplotspec().rowspan == out.get_subplotspec().rowspan
    labels = [label.get_text() for label in in_place.get_yticklabels()]
    assert labels == ["rope_cpu plan", "rope_cpu call", "ORT run"]
    assert not any(label.get_text() for label in out.get_yticklabels())
    assert len(dots(in_place)) == 2
    assert dots(out)[2] == pytest.approx((9e-6, 2))


def test_the_limit_is_a_line(drawn):
    without = Result("b", "b", rows=[timed_row(x, "ours", 1e-6) for x in "ab"])
    shown = panels(drawn(timed_run(two_rows("a", limit=1e-6), without)))
    limits = {name: [float(line.get_xdata()[0]) for line in ax.lines] for name, ax in shown.items()}
    assert limits == {"a": [pytest.approx(1e-6)], "b": []}


def check_texts(figure):
    """Check that texts are inside, apart, and 10 pixels high where the picture is 850 wide."""
    FigureCanvasAgg(figure).draw()
    texts = visible_texts(figure)
    assert min(text.get_fontsize() for text in texts) / 72 * 850 / figure.get_figwidth() >= 10
    boxes = {text: text.get_window_extent() for text in texts}
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
    for ax in panels(figure).values():
        assert all(boxes[text].x1 <= ax.bbox.x1 for text in ax.texts)
    for (text, box), (other, other_box) in combinations(boxes.items(), 2):
        assert not box.overlaps(other_box), (text, other)


def test_the_picture_of_the_readme_is_readable_at_its_width(drawn):
    figure = drawn(timed_run(*(readme_case(name) for name in README_CASES)))
    assert figure.get_figheight() <= 1.3 * figure.get_figwidth()
    assert len(visible_texts(figure)) > 100
    check_texts(figure)


def test_long_titles_and_facts_are_readable(drawn):
    names = [f"decode-64/{dtype}/interleaved/out/cold" for dtype in ("bfloat16", "float32")]
    run = timed_run(*map(two_rows, [*names, "angles-axes", "import"]))
    run.model = "a model with a long name, " * 8
    check_texts(drawn(run))


@pytest.mark.parametrize("span", [1.01, 3.0, 40.0, 1e6])
def test_an_axis_has_at_least_two_labelled_times(drawn, span):
    rows = [timed_row("plan", "ours", 2e-6), timed_row("call", "ours", 2e-6 * span)]
    (ax,) = panels(drawn(timed_run(Result("layouts", "", rows=rows)))).values()
    low, high = ax.get_xlim()
    times = [time for time in ax.get_xticks() if low <= time <= high]
    assert 2 <= len(times) <= 10
    assert high / low > 4  # small differences are not drawn large


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing that can be drawn"):
        plot.save(timed_run(), "run.png")
