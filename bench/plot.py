"""A run as a picture: bars against others, our points under the machine's limit, and scaling over threads."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rope_cpu.bench.measure import Result, Row
from rope_cpu.bench.report import duration
from rope_cpu.bench.results import Run

FORMATS = (".png", ".svg")
_OURS, _PEER, _FLOOR, _LIMIT = "#c8372d", "#8a9ba8", "#4b6a88", "#222222"
_DTYPE = {
    "bfloat16": ("o", "#c8372d"),
    "float32": ("s", "#2f6db0"),
    "float16": ("^", "#d99b1c"),
    "float64": ("D", "#5a9e4b"),
}


def check(path: str | Path) -> None:
    """Raise ValueError unless a picture can be written to `path`."""
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"`--plot` is {str(path)!r}; the name must end in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ValueError("`--plot` needs matplotlib, which is not installed")


def save(run: Run, path: str | Path) -> None:
    """Draw a run.

    Raises ValueError where nothing that can be drawn was timed.
    """
    from matplotlib.figure import Figure

    bars = [case for case in run.cases if case.timed("peer") and case.base and case.base.name == "plan"]
    points = [case for case in run.cases if case.limit and case.timed("ours")]
    scaling = [case for case in run.cases if len(_by_threads(case, "ours")) > 1]
    panels = [(draw, of) for draw, of in ((_bars, bars), (_roofline, points), (_scaling, scaling)) if of]
    if not panels:
        raise ValueError(f"`--plot` is {str(path)!r}, but nothing that can be drawn was timed")
    heights = [_height(draw, of) for draw, of in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(_title(run), fontsize=10)
    for part, (draw, of) in zip(_parts(figure, heights), panels, strict=True):
        draw(part, of)
    figure.savefig(path, dpi=130)


def _parts(figure: Any, heights: list[float]) -> list[Any]:
    parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    return [row[0] for row in parts]


def _height(draw: Any, cases: list[Result]) -> float:
    if draw is not _bars:
        return 4.5
    rows = -(-len(cases) // 2)
    return rows * (0.6 + 0.24 * max(len(_bar_rows(case)) for case in cases))


def _title(run: Run) -> str:
    facts = run.environment
    versions = ", ".join(
        f"{n} {v}" for n, v in facts["versions"].items() if n in ("rope-cpu", "numba", "torch", "onnxruntime")
    )
    counts = f"{facts['cores']} cores, {facts['threads']} threads"
    return f"{run.model} on {facts['processor']}, {counts}\n{versions}; {facts['time']}"


def _bar_rows(case: Result) -> list[Row]:
    return case.timed("ours", "floor", "peer")


def _bars(figure: Any, cases: list[Result]) -> None:
    """Draw, for each case, the time of every implementation, with its quartiles and how many times as long it is."""
    figure.suptitle("Time of one call (shorter is better; times as long as our plan)", fontsize=11, weight="bold")
    axes = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).ravel()
    for ax in axes[len(cases) :]:
        ax.set_visible(False)
    colors = {"ours": _OURS, "peer": _PEER, "floor": _FLOOR}
    for ax, case in zip(axes, cases, strict=False):
        rows = _bar_rows(case)
        medians = [row.seconds.median for row in rows]
        spread = [[row.seconds.median - row.seconds.lower_quartile for row in rows], []]
        spread[1] = [row.seconds.upper_quartile - row.seconds.median for row in rows]
        names = [f"rope_cpu {row.name}" if row.role == "ours" else row.name for row in rows]
        ax.barh(names, medians, color=[colors[row.role] for row in rows], xerr=spread, error_kw={"lw": 0.8})
        for place, row in enumerate(rows):
            ratio = "" if row is case.base else f"  {_times(case, row)}"
            ax.text(
                row.seconds.upper_quartile * 1.15, place, duration(row.seconds.median) + ratio, va="center", fontsize=7
            )
        ax.set_xscale("log")
        ax.set_xlim(min(medians) / 2, max(medians) * 14)
        ax.invert_yaxis()
        ax.tick_params(labelsize=7)
        ax.set_xlabel("seconds (logarithmic)", fontsize=7)
        ax.set_title(case.name, fontsize=9, loc="left")


def _times(case: Result, row: Row) -> str:
    ratio = case.ratio(row)
    return "noise" if ratio.meaningless else f"{ratio.median:.{1 if ratio.median < 10 else 0}f} times"


def _roofline(figure: Any, cases: list[Result]) -> None:
    """Draw bytes per second over bytes: the limit of the machine, warm and cold, and our rows under it."""
    ax = figure.subplots()
    for cold, style in ((False, "-"), (True, ":")):
        limits = {case.limit.moved: case.limit.rate for case in cases if case.limit and case.cold == cold}
        if limits:
            x = sorted(limits)
            label = "limit, cold" if cold else "limit: scaled in place"
            ax.plot([b / 1e6 for b in x], [limits[b] / 1e9 for b in x], style, color=_LIMIT, marker=".", label=label)
    for dtype, (marker, color) in _DTYPE.items():
        for cold in (False, True):
            found = [case.base for case in cases if dtype in case.name.split("/") and case.cold == cold and case.base]
            face = "none" if cold else color
            label = f"{dtype}{', cold' if cold else ''}"
            if found:
                where = [row.moved / 1e6 for row in found], [row.rate / 1e9 for row in found]
                ax.scatter(*where, marker=marker, s=36, facecolors=face, edgecolors=color, label=label, zorder=3)
    _name_sizes(ax, cases)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("MB read and written by one call")
    ax.set_ylabel("GB/s")
    ax.grid(True, which="major", alpha=0.3)
    ax.legend(fontsize=7, ncols=2, loc="lower right")
    ax.set_title("How close to the limit of this machine: a plan's calls", fontsize=11, weight="bold")


def _name_sizes(ax: Any, cases: list[Result]) -> None:
    """Write the shape's name over the points of its headline, in bfloat16."""
    for case in cases:
        shape, *form = case.name.split("/")
        if form == ["bfloat16"] and case.limit and case.base:
            ax.annotate(
                shape,
                (case.base.moved / 1e6, case.limit.rate / 1e9),
                xytext=(0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )


def _by_threads(case: Result, role: str) -> dict[int, Row]:
    """Return the rows that differ in their number of threads, by that number."""
    found = {}
    for row in case.timed(role):
        name, _, count = row.name.rpartition(", ")
        if name and count.split()[0].isdigit():
            found[int(count.split()[0])] = row
    return found


def _scaling(figure: Any, cases: list[Result]) -> None:
    """Draw how many times as fast as on one thread each case is, ours and the limit."""
    ax = figure.subplots()
    most = max(count for case in cases for count in _by_threads(case, "ours"))
    ax.plot([1, most], [1, most], color=_LIMIT, lw=0.8, ls="--", label="in proportion")
    for case in cases:
        rows = _by_threads(case, "ours")
        least = rows[min(rows)]
        speed = [1 / case.ratio(rows[count], least).median for count in sorted(rows)]
        line = ax.plot(sorted(rows), speed, marker="o", ms=4, lw=1.2)[0]
        ax.annotate(
            case.name,
            (most, speed[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=7,
            va="center",
            color=line.get_color(),
        )
    ax.set_xticks(range(1, most + 1) if most <= 16 else sorted({n for c in cases for n in _by_threads(c, "ours")}))
    ax.margins(x=0.25)
    ax.set_xlabel("threads")
    ax.set_ylabel("times as fast as on the fewest")
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=7)
    ax.set_title("Scaling over threads", fontsize=11, weight="bold")
