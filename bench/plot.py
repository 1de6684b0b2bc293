"""A run as a picture: bars against others, our points under the machine's limit, and scaling over threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .measurement.measure import Result, Row
from .report import duration, times
from .results import Run

_OURS, _PEER, _KERNEL, _LIMIT = "#c8372d", "#8a9ba8", "#4b6a88", "#222222"
_DTYPE = {
    "bfloat16": ("o", "#c8372d"),
    "float32": ("s", "#2f6db0"),
    "float16": ("^", "#d99b1c"),
    "float64": ("D", "#5a9e4b"),
}


def save(run: Run, path: str | Path) -> None:
    """Draw a run.

    Raises ValueError where nothing that can be drawn was timed.
    """
    from matplotlib.figure import Figure

    plain = [case for case in run.cases if case.name.startswith(("decode-", "prefill-"))]
    bars = [case for case in plain if case.timed("peer") and case.base and case.base.name == "plan"]
    points = [case for case in plain if case.limit and case.timed("ours")]
    scaling = [case for case in plain if case.name.count("/") == 1 and len(_by_threads(case)) > 1]
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
    counts = f"{facts['cores']} cores, {facts['threads']} in use"
    return f"{run.model} on {facts['processor']}, {counts}\n{versions}; {facts['time']}"


def _bar_rows(case: Result) -> list[Row]:
    return case.timed("ours", "kernel", "peer")


def _bars(figure: Any, cases: list[Result]) -> None:
    """Draw, for each case, the time of every implementation, with its quartiles and how many times as long it is."""
    figure.suptitle(
        "Time of one call, logarithmic: shorter is better. In brackets: as many times as long as our plan",
        fontsize=11,
        weight="bold",
    )
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).ravel()
    for ax in axes[len(cases) :]:
        ax.set_visible(False)
    colors = {"ours": _OURS, "peer": _PEER, "kernel": _KERNEL}
    for ax, case in zip(axes, cases, strict=False):
        rows = _bar_rows(case)
        medians = [row.seconds.median for row in rows]
        spread = [[row.seconds.median - row.seconds.lower_quartile for row in rows], []]
        spread[1] = [row.seconds.upper_quartile - row.seconds.median for row in rows]
        names = [f"rope_cpu {row.name}" if row.role == "ours" else row.name for row in rows]
        ax.barh(names, medians, color=[colors[row.role] for row in rows], xerr=spread, error_kw={"lw": 0.8})
        for place, row in enumerate(rows):
            ratio = "" if row is case.base else f" ({_times(case, row)})"
            ax.text(
                row.seconds.upper_quartile * 1.15, place, duration(row.seconds.median) + ratio, va="center", fontsize=7
            )
        ax.set_xscale("log")
        least, most = min(medians) / 2, max(medians)
        ax.set_xlim(least, most * (most / least) ** 0.7)  # room for the words after the longest bar
        ax.invert_yaxis()
        ax.tick_params(labelsize=7)
        ax.xaxis.set_major_formatter(EngFormatter("s"))
        ax.set_title(case.name, fontsize=9, loc="left")


def _times(case: Result, row: Row) -> str:
    known = times(case.ratio(row))
    return known if known == "noise" else f"{known} times"


def _roofline(figure: Any, cases: list[Result]) -> None:
    """Draw bytes per second over bytes: our plans, each under the limit that was measured with it, a dash."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, ScalarFormatter

    ax = figure.subplots()
    for dtype, (marker, color) in _DTYPE.items():
        for cold in (False, True):
            form = [dtype, "cold"] if cold else [dtype]
            found = [
                (row, case.limit)
                for case in cases
                if case.name.split("/")[1:] == form and case.limit and (row := _on_most_threads(case))
            ]
            if not found:
                continue
            sizes, rates, most = zip(*((r.bytes_accessed, r.rate / 1e9, of.rate / 1e9) for r, of in found), strict=True)
            face, label = "none" if cold else color, ", ".join(form)
            ax.scatter(sizes, rates, marker=marker, s=36, facecolors=face, edgecolors=color, label=label, zorder=3)
            ax.scatter(sizes, most, marker="_", s=90, color=color, zorder=2)
            ax.vlines(sizes, rates, most, color=color, lw=0.8, ls=":" if cold else "-", alpha=0.6)
    ax.scatter([], [], marker="_", s=90, color=_LIMIT, label="limit of the case:\nas many bytes\nscaled in place")
    _name_sizes(ax, cases)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.margins(y=0.1)  # room for the names
    ax.xaxis.set_major_formatter(EngFormatter("B"))
    ax.yaxis.set_major_formatter(ScalarFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    ax.tick_params(axis="x", labelsize=7)
    ax.set_xlabel("bytes that one call reads and writes")
    ax.set_ylabel("GB/s")
    ax.grid(True, which="major", alpha=0.3)
    ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set_title("How close to the limit of this machine: calls of a plan, in place", fontsize=11, weight="bold")


def _name_sizes(ax: Any, cases: list[Result]) -> None:
    """Write each shape's name under its point, in the first dtype that was timed."""
    forms = [case.name.split("/")[1:] for case in cases]
    first = next(([dtype] for dtype in _DTYPE if [dtype] in forms), None)
    for case in cases:
        shape, *form = case.name.split("/")
        if form == first and (row := _on_most_threads(case)):
            at = row.bytes_accessed, row.rate / 1e9
            ax.annotate(shape, at, xytext=(0, -13), textcoords="offset points", ha="center", fontsize=7)


def _by_threads(case: Result) -> dict[int, Row]:
    """Return the rows of ours that differ in their number of threads, by that number."""
    counts = {row.name.rpartition(", ")[2].split()[0]: row for row in case.timed("ours") if ", " in row.name}
    return {int(count): row for count, row in counts.items() if count.isdigit()}


def _on_most_threads(case: Result) -> Row | None:
    """Return the row of ours that the limit, which is that of all threads, is a limit of."""
    rows = _by_threads(case)
    return rows[max(rows)] if rows else case.base


def _scaling(figure: Any, cases: list[Result]) -> None:
    """Draw how many times as fast as on the fewest threads each case is."""
    from matplotlib import colormaps

    ax = figure.subplots()
    ax.set_prop_cycle(color=colormaps["tab20"](range(20)))
    counts = sorted({count for case in cases for count in _by_threads(case)})
    ax.plot([counts[0], counts[-1]], [1, counts[-1] / counts[0]], color=_LIMIT, lw=0.8, ls="--", label="in proportion")
    for case in cases:
        rows = _by_threads(case)
        speed = [1 / case.ratio(rows[count], rows[min(rows)]).median for count in sorted(rows)]
        ax.plot(sorted(rows), speed, marker="o", ms=4, lw=1.2, label=f"{case.name}: {speed[-1]:.2f}")
    ax.set_xticks(counts)
    ax.set_xlabel("threads")
    ax.set_ylabel("times as fast as on the fewest")
    ax.grid(True, alpha=0.3)
    ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    ax.set_title("Scaling over threads, and what the most threads bring", fontsize=11, weight="bold")
