"""A run as a picture: for each case, bars as long as the median times of all contenders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import duration
from .results import Result

_COLORS = {"ours": "C3", "peer": "C0"}
# Inches: width of the picture, height of a case without rows, and of a row.
_WIDTH = 8
_CASE_HEIGHT = 1
_ROW_HEIGHT = 0.25


def save(results: Sequence[Result], path: str | Path) -> None:
    """Draw the results of a run into a file; raise ValueError if nothing was timed."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    timed = {case.what: case.timed(*_COLORS) for case in results if case.timed(*_COLORS)}
    if not timed:
        raise ValueError(f"`--plot` is {str(path)!r}, but no case could be timed")
    heights = [_CASE_HEIGHT + _ROW_HEIGHT * len(rows) for rows in timed.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(timed), squeeze=False, height_ratios=heights)[:, 0]
    for panel, (what, rows) in zip(panels, timed.items(), strict=True):
        medians = [row.seconds.median for row in rows]
        colors = [_COLORS[row.role] for row in rows]
        bars = panel.barh([row.name for row in rows], medians, color=colors)
        panel.bar_label(bars, [duration(median) for median in medians], padding=3)
        panel.set_xscale("log")
        panel.margins(x=0.2)
        panel.xaxis.set_major_formatter(EngFormatter("s"))
        panel.invert_yaxis()
        panel.set_title(what, loc="left")
    figure.savefig(path)
