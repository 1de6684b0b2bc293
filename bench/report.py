"""A run as text: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .measure import Case
from .results import Result, Row, Run
from .statistics import Estimate

WIDTH = 100
# Columns of the tables of cases and of comparisons: alignment and width.
_COLUMNS = {
    "": "<31",
    "median": ">10",
    "quartiles": ">15",
    "GB/s": ">6",
    "limit": ">6",
    "ratio": ">8",
    "interval": "<14",
}
_COMPARED = {"case": "<35", "row": "<28", "older": ">10", "now": ">10", "ratio": ">8"}
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_SHOWN_PACKAGES = ("numpy", "numba", "torch", "jax", "onnxruntime")


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


def ratio_text(ratio: Estimate) -> str:
    """Return the median of a ratio; if it is too noisy, its lower bound above 1, or "noise"."""
    if not ratio.meaningless:
        return _three_digits(ratio.median)
    return f"> {_three_digits(ratio.low)}" if ratio.low > 1 else "noise"


def heading(environment: dict[str, Any], model: str) -> Iterator[str]:
    """Yield the facts that the figures depend on."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in environment["caches"].items())
    counts = f"{environment['cores']} cores, {environment['threads']} in use"
    yield f"{environment['processor']}, {counts}; {caches}"[:WIDTH]
    yield f"Python {environment['python']}, {versions(environment)}"[:WIDTH]
    load = environment["load"]
    governor = environment["governor"]
    yield f"governor {governor}, load {load} at the start; shapes of {model}"[:WIDTH]
    if (load or 0) > environment["cores"] / 2:
        yield "The machine is busy: other processes disturb timings, most of all parallel calls."


def versions(environment: dict[str, Any]) -> str:
    """Return the versions of the libraries that are compared."""
    installed = environment["versions"]
    return ", ".join(f"{name} {installed[name]}" for name in _SHOWN_PACKAGES if name in installed)


def columns() -> Iterator[str]:
    """Yield an explanation of the columns, and their header."""
    yield from textwrap.wrap(
        "limit: the time to scale as many "
        "bytes in place, as a percentage of the row's time. ratio: the row's time relative to the "
        "first row, with the 95 % interval of its median; if that is too wide, > and its lower "
        "end, or noise.",
        WIDTH,
    )
    yield ""
    yield _line(_COLUMNS, list(_COLUMNS))


def title(case: Case | Result) -> Iterator[str]:
    """Yield the line above the table of a case."""
    yield f"{case.name}: {case.what}"[:WIDTH]


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of a case, and the reasons of missing rows."""
    rows = case.timed("ours", "peer")
    if case.limit is not None:
        rows.append(case.limit)
    for row in rows:
        yield _line(_COLUMNS, _cells(case, row))
    names_by_reason: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            names_by_reason.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in names_by_reason.items():
        text = f"{reason} ({', '.join(names)})"
        yield from textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )


def _line(columns: Mapping[str, str], cells: Sequence[str]) -> str:
    """Return a line of a table; cells: of the first columns."""
    cut = (f"{cell:{layout}}" for cell, layout in zip(cells, columns.values(), strict=False))
    return f"  {' '.join(cut)}".rstrip()[:WIDTH]


def _cells(case: Result, row: Row) -> list[str]:
    """Return the columns of a row."""
    seconds = row.seconds
    scale = _UNITS[_unit(seconds.median)]
    rate = ""
    share_of_limit = ""
    if row.bytes_accessed:
        rate = _three_digits(row.rate / 1e9)
        if case.limit is not None:
            share_of_limit = f"{100 / case.ratio(row, case.limit).median:.0f} %"
    return [
        row.name,
        duration(seconds.median),
        _interval_text(seconds.lower_quartile / scale, seconds.upper_quartile / scale),
        rate,
        share_of_limit,
        *_ratio_cells(case, row),
    ]


def _ratio_cells(case: Result, row: Row) -> list[str]:
    if row is case.base:
        return ["1"]
    if case.base is None or row.role not in ("ours", "peer"):
        return []
    ratio = case.ratio(row)
    if ratio.low > 0:
        return [ratio_text(ratio), _interval_text(ratio.low, ratio.high)]
    # Few rounds have no interval: show quartiles.
    return [ratio_text(ratio), _interval_text(ratio.lower_quartile, ratio.upper_quartile)]


def _interval_text(low: float, high: float) -> str:
    return f"{_three_digits(low)} … {_three_digits(high)}"


def comparison(run: Run, older: Mapping[tuple[str, str], float]) -> Iterator[str]:
    """Yield the medians of rows of rope_cpu in an older run and in this one, and their ratio.

    older: median seconds by case and row.
    """
    lines = []
    for case in run.cases:
        for row in case.timed("ours"):
            before = older.get((case.name, row.name))
            if before is not None:
                now = row.seconds.median
                times = [duration(before), duration(now), _three_digits(now / before)]
                lines.append(_line(_COMPARED, [case.name, row.name, *times]))
    yield ""
    if lines:
        yield _line(_COMPARED, list(_COMPARED))
        yield from lines
    else:
        yield "Nothing was compared: no row of this run is in the older one."


def closing(run: Run) -> str:
    """Return the duration of the run."""
    count = "1 case" if len(run.cases) == 1 else f"{len(run.cases)} cases"
    return f"{count} in {run.seconds:.0f} s"


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the name and the description of each case; * marks the default ones."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        mark = "*" if case.default else " "
        yield f"{mark} {case.name:<{width}} {case.what}"
