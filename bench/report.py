"""A run as text: the machine, and a table of each case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .measure import Case
from .results import Result, Timing, ratio

# Format of the lines of a case.
_ROW = "  {:<31} {:>10} {:>6} {:>6} {:>8} {}"
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    unit = next((unit for unit, scale in _UNITS.items() if seconds >= scale), "ns")
    return f"{_three_digits(seconds / _UNITS[unit])} {unit}"


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}"


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
    names_by_problem: dict[str, list[str]] = {}
    for row in case.rows:
        if row.problem:
            names_by_problem.setdefault(row.problem, []).append(row.name)
    for problem, names in names_by_problem.items():
        yield f"  {problem} ({', '.join(names)})"


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
