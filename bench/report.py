"""A run as text: the machine, and a table of each case; and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .measure import Case
from .results import Result, Timing, ratio

# Format of the lines of a case.
_ROW = "  {:<31} {:>10} {:>6} {:>6} {:>8} {}"
_COLORS = {"ours": "C3", "peer": "C0"}
# Inches: width of a picture, height of a case without rows, and of a row.
_WIDTH = 8
_CASE_HEIGHT = 1
_ROW_HEIGHT = 0.25
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    unit = next((unit for unit, scale in _UNITS.items() if seconds >= scale), "ns")
    return f"{_three_digits(seconds / _UNITS[unit])} {unit}"


def _three_digits(value: float) -> str:
    digits = np.format_float_positional(value, 3, unique=False, fractional=False)
    return digits.removesuffix(".")


def heading(environment: dict[str, Any], model: str) -> Iterator[str]:
    """Yield the facts that the figures depend on, and the header of all tables."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in environment["caches"].items())
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    used = f"{environment['threads']} of {environment['cores']} cores in use"
    yield f"{environment['processor']}; {used}; {caches}"
    yield f"Python {environment['python']}, {versions}"
    yield f"load {environment['load']} at the start; shapes of {model}"
    yield "limit: the time to scale as many bytes in place, as a percentage of the row's time."
    yield "ratio: the row's time relative to the first row, with the 95 % interval of its median."
    yield ""
    yield _ROW.format("", "median", "GB/s", "limit", "ratio", "interval")


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of a case, and the reasons of missing rows."""
    limits = [] if case.limit is None else [case.limit]
    for row in case.timed("ours", "peer") + limits:
        yield _ROW.format(*_cells(case, row)).rstrip()
    for row in case.rows:
        if row.problem:
            yield f"  {row.name:<31} {row.problem}"


def _cells(case: Result, row: Timing) -> list[str]:
    """Return the columns of a row."""
    median = row.seconds.median
    cells = [row.name, duration(median), "", "", "", ""]
    if row.bytes_accessed:
        cells[2] = _three_digits(row.bytes_accessed / median / 1e9)
        if case.limit is not None:
            cells[3] = f"{100 * ratio(case.limit, row).median:.0f} %"
    if case.base is not None:
        to_base, low, high = ratio(row, case.base)
        cells[4:] = [_three_digits(to_base), f"{_three_digits(low)} … {_three_digits(high)}"]
    return cells


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the name and the description of each case; * marks the default ones."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        mark = "*" if case.default else " "
        yield f"{mark} {case.name:<{width}} {case.what}"


def draw(results: Sequence[Result], path: str | Path) -> None:
    """Draw the results of a run into a file; raise ValueError if nothing was timed."""
    from matplotlib.figure import Figure

    drawn = [case for case in results if case.timed(*_COLORS)]
    if not drawn:
        raise ValueError(f"`--plot` is {str(path)!r}, but no case could be timed")
    heights = [_CASE_HEIGHT + _ROW_HEIGHT * len(case.timed(*_COLORS)) for case in drawn]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(drawn), squeeze=False, height_ratios=heights)[:, 0]
    for panel, case in zip(panels, drawn, strict=True):
        rows = case.timed(*_COLORS)
        medians = [row.seconds.median for row in rows]
        colors = [_COLORS[row.role] for row in rows]
        bars = panel.barh([row.name for row in rows], medians, color=colors)
        panel.bar_label(bars, [duration(median) for median in medians], padding=3)
        panel.set_xscale("log")
        panel.margins(x=0.2)
        panel.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
        panel.invert_yaxis()
        panel.set_title(case.what, loc="left")
    figure.savefig(path)
