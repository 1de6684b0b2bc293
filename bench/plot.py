"""A run as a picture: bars against others, our points under the machine's limit, and scaling over threads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from .measurement.measure import Result, Row
from .report import duration, ratio_text
from .results import Run

_COLORS = {"ours": "#c8372d", "peer": "#8a9ba8"}
_MARKERS = {
    "bfloat16": ("o", "#c8372d"),
    "float32": ("s", "#2f6db0"),
    "float16": ("^", "#d99b1c"),
    "float64": ("D", "#5a9e4b"),
}
_TITLE = {"fontsize": 11, "weight": "bold"}
_BESIDE = {"fontsize": 7, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}


def save(run: Run, path: str | Path) -> None:
    """Draw a run.

    Raises ValueError where nothing that can be drawn was timed.
    """
    from matplotlib.figure import Figure

    plain = [
        case for case in run.cases if case.name.startswith(("decode-", "prefill-")) and case.base
    ]
    bars = [case for case in plain if case.timed("peer")]
    points = [case for case in plain if case.limit]
    scaling = [case for case in plain if case.name.count("/") == 1 and len(_by_threads(case)) > 1]
    rows = -(-len(bars) // 2)
    most_bars = max((len(case.timed("ours", "peer")) for case in bars), default=0)
    panels = [
        (draw, cases, height)
        for draw, cases, height in (
            (_bars, bars, rows * (0.6 + 0.24 * most_bars)),
            (_roofline, points, 4.5),
            (_scaling, scaling, 4.5),
        )
        if cases
    ]
    if not panels:
        raise ValueError(f"`--plot` is {str(path)!r}, but nothing that can be drawn was timed")
    heights = [height for _, _, height in panels]
    figure = Figure(figsize=(11, sum(heights) + 0.6), layout="constrained")
    figure.suptitle(_title(run), fontsize=10)
    parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (draw, cases, _) in zip(parts, panels, strict=True):
        draw(part, cases)
    figure.savefig(path, dpi=130)


def _title(run: Run) -> str:
    facts = run.environment
    versions = ", ".join(
        f"{n} {v}"
        for n, v in facts["versions"].items()
        if n in ("rope-cpu", "numba", "torch", "onnxruntime")
    )
    counts = f"{facts['cores']} cores, {facts['threads']} in use"
    return f"{run.model} on {facts['processor']}, {counts}\n{versions}; {facts['time']}"


def _bars(figure: Any, cases: list[Result]) -> None:
    """Draw, for each case, the time of every implementation, with its quartiles, and relative to the first."""
    from matplotlib.ticker import EngFormatter

    figure.suptitle(
        "Time of one call, logarithmic: shorter is better. In brackets: relative to the plan",
        **_TITLE,
    )
    axes = figure.subplots(-(-len(cases) // 2), 2, squeeze=False).ravel()
    for ax in axes[len(cases) :]:
        ax.set_visible(False)
    for ax, case in zip(axes, cases, strict=False):
        rows = case.timed("ours", "peer")
        medians = np.array([row.seconds.median for row in rows])
        lower, upper = np.transpose(
            [(row.seconds.lower_quartile, row.seconds.upper_quartile) for row in rows]
        )
        names = [f"rope_cpu {row.name}" if row.role == "ours" else row.name for row in rows]
        bars = ax.barh(
            names,
            medians,
            color=[_COLORS[row.role] for row in rows],
            xerr=(medians - lower, upper - medians),
            error_kw={"lw": 0.8},
        )
        ax.bar_label(bars, [_bar_text(case, row) for row in rows], padding=4, fontsize=7)
        ax.set_xscale("log")
        least, most = medians.min() / 2, upper.max()
        ax.set_xlim(least, most * (most / least) ** 0.7)  # room for the text after the longest bar
        ax.invert_yaxis()
        ax.tick_params(labelsize=7)
        ax.xaxis.set_major_formatter(EngFormatter("s"))
        ax.set_title(case.name, fontsize=9, loc="left")


def _bar_text(case: Result, row: Row) -> str:
    text = duration(row.seconds.median)
    if row is case.base:
        return text
    ratio = ratio_text(case.ratio(row))
    return f"{text} ({ratio})" if ratio == "noise" else f"{text} ({ratio} times)"


def _roofline(figure: Any, cases: list[Result]) -> None:
    """Draw bytes per second over bytes: our plans, each under the limit that was measured with it, a dash."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, ScalarFormatter

    ax = figure.subplots()
    for dtype, (marker, color) in _MARKERS.items():
        for cold in ([], ["cold"]):
            found = [case for case in cases if case.name.split("/")[1:] == [dtype, *cold]]
            if not found:
                continue
            sizes = [_fastest(case).bytes_accessed for case in found]
            rates = [_fastest(case).rate / 1e9 for case in found]
            limits = [case.limit.rate / 1e9 for case in found if case.limit]
            face, label = "none" if cold else color, ", ".join([dtype, *cold])
            ax.scatter(
                sizes,
                rates,
                marker=marker,
                s=36,
                facecolors=face,
                edgecolors=color,
                label=label,
                zorder=3,
            )
            ax.scatter(sizes, limits, marker="_", s=90, color=color, zorder=2)
            ax.vlines(sizes, rates, limits, color=color, lw=0.8, ls=":" if cold else "-", alpha=0.6)
    ax.scatter(
        [],
        [],
        marker="_",
        s=90,
        color="black",
        label="limit of the case:\nas many bytes\nscaled in place",
    )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.xaxis.set_major_formatter(EngFormatter("B"))
    ax.yaxis.set_major_formatter(ScalarFormatter())
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
    _name_sizes(ax, cases)
    ax.tick_params(axis="x", labelsize=7)
    ax.set_xlabel("bytes that one call reads and writes")
    ax.set_ylabel("GB/s")
    ax.grid(True, which="major", alpha=0.3)
    ax.legend(**_BESIDE)
    ax.set_title("How close to the limit of this machine: calls of a plan, in place", **_TITLE)


def _name_sizes(ax: Any, cases: list[Result]) -> None:
    """Write the names of shapes above their sizes in the first dtype that was timed."""
    names = [case.name.split("/") for case in cases]
    dtype = next((dtype for dtype in _MARKERS if any(name[1:] == [dtype] for name in names)), None)
    found = {name[0]: case for name, case in zip(names, cases, strict=True) if name[1:] == [dtype]}
    sizes = [_fastest(case).bytes_accessed for case in found.values()]
    top = ax.secondary_xaxis("top")
    top.set_xticks(sizes, found, rotation=25, ha="left", fontsize=7)
    top.set_xlabel(f"cases in {dtype}", fontsize=7)
    top.minorticks_off()


def _fastest(case: Result) -> Row:
    """Return the fastest row of ours, as the limit is the fastest of its rows."""
    return min(case.timed("ours"), key=lambda row: row.seconds.median)


def _by_threads(case: Result) -> dict[int, Row]:
    """Return the rows of ours that differ in their number of threads, by that number."""
    found = ((re.search(r", (\d+) threads?$", row.name), row) for row in case.timed("ours"))
    return {int(match[1]): row for match, row in found if match}


def _scaling(figure: Any, cases: list[Result]) -> None:
    """Draw the speed of each case relative to that on the fewest threads."""
    from matplotlib import colormaps

    ax = figure.subplots()
    ax.set_prop_cycle(color=colormaps["tab20"](range(20)))
    counts = sorted({count for case in cases for count in _by_threads(case)})
    ax.plot(
        [counts[0], counts[-1]],
        [1, counts[-1] / counts[0]],
        color="black",
        lw=0.8,
        ls="--",
        label="in proportion",
    )
    for case in cases:
        rows = _by_threads(case)
        speed = [1 / case.ratio(rows[count], rows[min(rows)]).median for count in sorted(rows)]
        ax.plot(
            sorted(rows), speed, marker="o", ms=4, lw=1.2, label=f"{case.name}: {speed[-1]:.2f}"
        )
    ax.set_xticks(counts)
    ax.set_xlabel("threads")
    ax.set_ylabel("speed relative to the fewest threads")
    ax.grid(True, alpha=0.3)
    ax.legend(**_BESIDE)
    ax.set_title("Scaling over threads, and the speed on the most", **_TITLE)
