"""A run as a picture: for each case, dots at the times of all contenders."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .report import duration, ratio_text, versions
from .results import Result, Run, Timing, machine, ratio

_ROLES = {"ours": "rope_cpu", "peer": "other libraries"}
_COLORS = {"ours": "#c8372d", "peer": "#4f6272", "limit": "#2f7d4f"}
_TIMES = "\N{MULTIPLICATION SIGN}"
_TITLE = "Time of one call with quartiles, and its multiple of the first row's; left is faster"

# Most cases side by side.
_COLUMNS = 2
# Inches: width of the picture, its height without cases, the height of a case without rows, and of
# a row. At 850 pixels for this width, text of this size (in points) is 10 pixels high.
_WIDTH = 9
_HEAD_HEIGHT = 1.1
_CASE_HEIGHT = 0.55
_ROW_HEIGHT = 0.21
_TEXT_SIZE = 8
_DOTS_PER_INCH = 200
# Most characters of a line of a title, and of a line of facts.
_TITLE_LENGTH = 44
_FACTS_LENGTH = 140
# Factor of an axis of times below the least one, the least ratio of the greatest one to its begin,
# and the power of this ratio at its end, with space for the text of the last dot.
_MARGIN = 1.25
_LEAST_SPAN = 4.0
_SPAN_OF_TEXT = 1.6
# Axes with fewer decades have ticks at 1, 2 and 5.
_FEW_DECADES = 2.5


def save(run: Run, path: str | Path) -> None:
    """Draw a run into a file; raise ValueError if there is nothing to compare."""
    from matplotlib.figure import Figure

    drawn = [case for case in run.cases if case.base is not None and len(case.timed(*_ROLES)) > 1]
    if not drawn:
        raise ValueError(
            f"`--plot` is {str(path)!r}, but no case with several contenders was timed"
        )
    bands = list(_bands(drawn))
    heights = [_CASE_HEIGHT + _ROW_HEIGHT * len(_labels(band)) for band in bands]
    figure = Figure(figsize=(_WIDTH, sum(heights) + _HEAD_HEIGHT), layout="constrained")
    columns = max(map(len, bands))
    all_axes = figure.subplots(len(bands), columns, squeeze=False, height_ratios=heights)
    for band, axes in zip(bands, all_axes, strict=True):
        labels = _labels(band)
        for ax, case in zip(axes, band, strict=False):
            _draw_case(ax, case, labels)
            if case is not band[0]:
                ax.tick_params(axis="y", labelleft=False)
        for ax in axes[len(band) :]:
            ax.set_visible(False)
    _draw_legend(figure, run)
    figure.savefig(path, dpi=_DOTS_PER_INCH)


def _bands(cases: Iterable[Result]) -> Iterable[list[Result]]:
    """Yield cases that are drawn side by side: those of one family, the first part of a name."""
    families: dict[str, list[Result]] = {}
    for case in cases:
        families.setdefault(case.name.partition("/")[0], []).append(case)
    for family in families.values():
        for first in range(0, len(family), _COLUMNS):
            yield family[first : first + _COLUMNS]


def _labels(band: Sequence[Result]) -> list[str]:
    """Return the labels of the rows that were timed in any of some cases."""
    return list(dict.fromkeys(_label(row) for case in band for row in case.timed(*_ROLES)))


def _label(row: Timing) -> str:
    return f"rope_cpu {row.name}" if row.role == "ours" else row.name


def _draw_case(ax: Any, case: Result, labels: Sequence[str]) -> None:
    """Draw the median of every contender as a dot, with its quartiles, and the limit as a line."""
    if case.limit is not None:
        ax.axvline(case.limit.seconds.median, zorder=1, color=_COLORS["limit"], linestyle="--")
    for row in case.timed(*_ROLES):
        place = labels.index(_label(row))
        seconds = row.seconds
        color = _COLORS[row.role]
        ax.hlines(place, seconds.lower_quartile, seconds.upper_quartile, color=color, lw=1.5)
        ax.scatter(seconds.median, place, color=color, s=18, zorder=3)
        ax.annotate(
            _dot_text(case, row),
            (seconds.upper_quartile, place),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=_TEXT_SIZE,
            va="center_baseline",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    title = textwrap.fill(case.what, _TITLE_LENGTH)
    ax.set_title(title, fontsize=_TEXT_SIZE + 1, fontweight="bold", loc="left")
    _draw_time_axis(ax, case)
    ax.set_yticks(range(len(labels)), labels, fontsize=_TEXT_SIZE)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(color="#e8e8e8", lw=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _dot_text(case: Result, row: Timing) -> str:
    text = duration(row.seconds.median)
    if case.base is None or row is case.base:
        return text
    multiple = ratio_text(ratio(row, case.base))
    unit = "" if multiple == "noise" else _TIMES
    return f"{text} ({multiple}{unit})"


def _draw_time_axis(ax: Any, case: Result) -> None:
    """Scale the axis of times, with space for the text beside the last dot."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    estimates = [row.seconds for row in case.timed(*_ROLES)]
    limits = [] if case.limit is None else [case.limit.seconds.median]
    least = min([seconds.lower_quartile for seconds in estimates] + limits) / _MARGIN
    most = max([seconds.upper_quartile for seconds in estimates] + limits)
    span = max(most / least, _LEAST_SPAN) ** _SPAN_OF_TEXT
    ax.set_xscale("log")
    ax.set_xlim(least, least * span)
    steps = (1.0, 2.0, 5.0) if span < 10**_FEW_DECADES else (1.0,)
    ax.xaxis.set_major_locator(LogLocator(subs=steps))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(EngFormatter("s"))
    ax.tick_params(axis="x", labelsize=_TEXT_SIZE)


def _draw_legend(figure: Any, run: Run) -> None:
    """Explain the colors, the whiskers and the lines, and name the machine."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=_COLORS[role], label=label, marker="o", markersize=4.5, linestyle="")
        for role, label in _ROLES.items()
    ]
    label = "limit: the time to scale as many bytes"
    handles.append(Line2D([], [], color=_COLORS["limit"], linestyle="--", label=label))
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=len(handles),
        fontsize=_TEXT_SIZE,
        title=_TITLE,
        title_fontproperties={"size": _TEXT_SIZE + 2, "weight": "bold"},
        frameon=False,
    )
    date = run.environment["time"].partition("T")[0]
    facts = (f"{run.model} on {machine(run.environment)}, {date}", versions(run.environment))
    lines = [textwrap.fill(fact, _FACTS_LENGTH) for fact in facts]
    figure.supxlabel("\n".join(lines), fontsize=_TEXT_SIZE)
