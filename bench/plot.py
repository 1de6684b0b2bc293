"""A run as a picture: for each case, bars of the times of all implementations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .measurement.rows import Result, Row
from .report import duration, ratio_text
from .results import Run

_COLORS = {"ours": "#c8372d", "peer": "#8a9ba8"}
_SHOWN_PACKAGES = ("rope-cpu", "numba", "torch", "onnxruntime")
_TITLE = "Time of one call, logarithmic: shorter is better. In brackets: relative to the first bar"

# Cases side by side, and inches: width of the picture, height of a case without and for each bar.
_CASES_PER_ROW = 2
_WIDTH = 11
_CASE_HEIGHT = 0.6
_BAR_HEIGHT = 0.24


def save(run: Run, path: str | Path) -> None:
    """Draw a run into a file; raise ValueError if there is nothing to compare."""
    from matplotlib.figure import Figure

    cases = [case for case in run.cases if case.base is not None and len(_bar_rows(case)) > 1]
    if not cases:
        raise ValueError(
            f"`--plot` is {str(path)!r}, but nothing that can be drawn was timed; "
            "choose cases with several implementations, or add --peers"
        )
    rows = [cases[n : n + _CASES_PER_ROW] for n in range(0, len(cases), _CASES_PER_ROW)]
    heights = [
        _CASE_HEIGHT + _BAR_HEIGHT * max(len(_bar_rows(case)) for case in row) for row in rows
    ]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 1), layout="constrained")
    figure.suptitle(f"{_facts(run)}\n{_TITLE}", fontsize=10)
    axes = figure.subplots(len(rows), _CASES_PER_ROW, squeeze=False, height_ratios=heights).ravel()
    for ax in axes[len(cases) :]:
        ax.set_visible(False)
    for ax, case in zip(axes, cases, strict=False):
        _draw_bars(ax, case)
    figure.savefig(path, dpi=130)


def _bar_rows(case: Result) -> list[Row]:
    return case.timed("ours", "peer")


def _facts(run: Run) -> str:
    facts = run.environment
    versions = ", ".join(
        f"{name} {version}"
        for name, version in facts["versions"].items()
        if name in _SHOWN_PACKAGES
    )
    counts = f"{facts['cores']} cores, {facts['threads']} in use"
    return f"{run.model} on {facts['processor']}, {counts}\n{versions}; {facts['time']}"


def _draw_bars(ax: Any, case: Result) -> None:
    """Draw the median of every implementation, with its quartiles."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    rows = _bar_rows(case)
    medians = np.array([row.seconds.median for row in rows])
    lower = np.array([row.seconds.lower_quartile for row in rows])
    upper = np.array([row.seconds.upper_quartile for row in rows])
    bars = ax.barh(
        [f"rope_cpu {row.name}" if row.role == "ours" else row.name for row in rows],
        medians,
        color=[_COLORS[row.role] for row in rows],
        xerr=(medians - lower, upper - medians),
        error_kw={"lw": 0.8},
    )
    ax.bar_label(bars, [_bar_text(case, row) for row in rows], padding=4, fontsize=7)
    ax.set_xscale("log")
    least = medians.min() / 2
    most = upper.max()
    ax.set_xlim(least, most * (most / least) ** 0.7)  # space for the text after the longest bar
    ax.invert_yaxis()
    ax.tick_params(labelsize=7)
    ax.xaxis.set_major_formatter(EngFormatter("s"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.set_title(case.name, fontsize=9, loc="left")


def _bar_text(case: Result, row: Row) -> str:
    text = duration(row.seconds.median)
    if row is case.base:
        return text
    ratio = ratio_text(case.ratio(row))
    unit = "" if ratio == "noise" else " times"
    return f"{text} ({ratio}{unit})"
