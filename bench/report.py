"""A run as text: tables of at most 100 columns, and tables in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from typing import Any

from .measure import Case
from .results import MedianEstimate, Result, Timing, machine, ratio

WIDTH = 100
# Format of the lines of a case.
_ROW = "  {:<31} {:>10} {:>15} {:>6} {:>6} {:>8} {}"
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    unit = _unit(seconds)
    return f"{_three_digits(seconds / _UNITS[unit])} {unit}"


def _unit(seconds: float) -> str:
    return next((unit for unit, scale in _UNITS.items() if seconds >= scale), "ns")


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


def ratio_text(ratio: MedianEstimate) -> str:
    """Return the median of a ratio; if it is too noisy, its lower bound above 1, or "noise"."""
    if not ratio.meaningless:
        return _three_digits(ratio.median)
    return f"> {_three_digits(ratio.low)}" if ratio.low > 1 else "noise"


def heading(environment: dict[str, Any], model: str) -> Iterator[str]:
    """Yield the facts that the figures depend on, and the header of all tables."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in environment["caches"].items())
    load = environment["load"]
    yield f"{machine(environment)}; {caches}"[:WIDTH]
    yield f"Python {environment['python']}, {versions(environment)}"[:WIDTH]
    yield f"load {load} at the start; shapes of {model}"[:WIDTH]
    if (load or 0) > environment["cores"] / 2:
        yield "The machine is busy: other processes disturb timings, most of all parallel calls."
    yield "limit: the time to scale as many bytes in place, as a percentage of the row's time."
    yield "ratio: the row's time relative to the first row, with the 95 % interval of its median;"
    yield "if that is too wide, > and its lower end, or noise."
    yield ""
    yield _ROW.format("", "median", "quartiles", "GB/s", "limit", "ratio", "interval")


def versions(environment: dict[str, Any]) -> str:
    """Return the versions of the libraries that are compared."""
    return ", ".join(f"{name} {version}" for name, version in environment["versions"].items())


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of a case, and the reasons of missing rows."""
    limits = [] if case.limit is None else [case.limit]
    for row in case.timed("ours", "peer") + limits:
        yield _ROW.format(*_cells(case, row)).rstrip()[:WIDTH]
    names_by_reason: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            names_by_reason.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in names_by_reason.items():
        text = f"  {reason} ({', '.join(names)})"
        yield from textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _cells(case: Result, row: Timing) -> list[str]:
    """Return the columns of a row."""
    seconds = row.seconds
    scale = _UNITS[_unit(seconds.median)]
    quartiles = _interval_text(seconds.lower_quartile / scale, seconds.upper_quartile / scale)
    rate = ""
    share_of_limit = ""
    if row.bytes_accessed:
        rate = _three_digits(row.bytes_accessed / seconds.median / 1e9)
        if case.limit is not None:
            share_of_limit = f"{100 * ratio(case.limit, row).median:.0f} %"
    cells = [row.name, duration(seconds.median), quartiles, rate, share_of_limit]
    return [*cells, *_ratio_cells(case, row)]


def _ratio_cells(case: Result, row: Timing) -> list[str]:
    if row is case.base:
        return ["1", ""]
    if case.base is None or row.role == "limit":
        return ["", ""]
    to_base = ratio(row, case.base)
    if to_base.low > 0:
        return [ratio_text(to_base), _interval_text(to_base.low, to_base.high)]
    # Few rounds have no interval: show quartiles.
    return [ratio_text(to_base), _interval_text(to_base.lower_quartile, to_base.upper_quartile)]


def _interval_text(low: float, high: float) -> str:
    return f"{_three_digits(low)} … {_three_digits(high)}"


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the name and the description of each case; * marks the default ones."""
    width = max(len(case.name) for case in cases)
    columns = min(WIDTH, get_terminal_size((WIDTH, 0)).columns)
    for case in cases:
        mark = "*" if case.default else " "
        text = f"{mark} {case.name:<{width}} {case.what}"
        yield from textwrap.wrap(text, columns, subsequent_indent=" " * (width + 3))
