"""A run on paper: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from .compare import Finding
from .measurement.case import Case
from .measurement.measure import Result, Row
from .measurement.statistics import Estimate
from .results import Run

WIDTH = 100
# Columns of cases and their widths: tables of several cases stand under one header.
_COLUMNS = {"": 31, "median": 10, "quartiles": 15, "GB/s": 6, "limit": 6, "ratio": 8, "interval": 14}
_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    unit, scale = _unit(seconds)
    return f"{_digits(seconds / scale)} {unit}"


def _unit(seconds: float) -> tuple[str, float]:
    return next((pair for pair in _UNITS if seconds >= pair[1]), _UNITS[-1])


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of one case."""
    yield f"{case.name}: {case.what}"[:WIDTH]
    table, limit = _case_table(), [case.limit] if case.limit else []
    for row in (*case.timed("ours", "kernel", "peer"), *limit, *case.timed("copy", "memory")):
        table.add_row(*_figures(case, row))
    yield from _lines(table)
    reasons: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        text = f"{reason} ({', '.join(names)})"
        yield from textwrap.wrap(text, WIDTH - 4, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _case_table(show_header: bool = False) -> Table:
    table = Table(box=None, show_header=show_header, padding=(0, 1, 0, 0))
    for name, width in _COLUMNS.items():
        table.add_column(name, width=width, no_wrap=True, justify="right" if name not in ("", "interval") else "left")
    return table


def _lines(table: Table, width: int = WIDTH, indent: str = "  ") -> Iterator[str]:
    """Yield the lines of a table as plain text."""
    console = Console(width=width - len(indent), file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        yield f"{indent}{line}".rstrip()


def _figures(case: Result, row: Row) -> Iterator[str]:
    """Yield what stands in the columns of a row."""
    seconds = row.seconds
    scale = _unit(seconds.median)[1]
    yield row.name
    yield duration(seconds.median)
    yield " … ".join(_digits(quartile / scale) for quartile in (seconds.lower_quartile, seconds.upper_quartile))
    yield _digits(row.rate / 1e9) if row.bytes_accessed else ""
    yield f"{100 / case.ratio(row, case.limit).median:.0f} %" if row.bytes_accessed and case.limit else ""
    if row is case.base:
        yield "1"
    elif case.base and row.role in ("ours", "kernel", "peer"):
        yield from _ratio(case.ratio(row))


def _ratio(ratio: Estimate) -> tuple[str, str]:
    low, high = (ratio.low, ratio.high) if ratio.low > 0 else (ratio.lower_quartile, ratio.upper_quartile)
    return times(ratio), f"{_digits(low)} … {_digits(high)}"


def times(ratio: Estimate) -> str:
    """Return what is known of a ratio: its median, at least a bound that it lies above, or nothing."""
    if ratio.meaningless:
        return f"> {_digits(ratio.low)}" if ratio.low > 1 else "noise"
    return _digits(ratio.median)


def heading(environment: dict[str, Any], model: str) -> Iterator[str]:
    """Yield what the figures depend on, and how to read them."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in environment["caches"].items())
    counts = f"{environment['cores']} cores, {environment['threads']} in use"
    yield f"{environment['processor']}, {counts}; {caches}"[:WIDTH]
    known = environment["versions"]
    names = [name for name in ("numpy", "numba", "torch", "jax", "onnxruntime") if name in known]
    versions = ", ".join(f"{name} {known[name]}" for name in names)
    yield f"Python {environment['python']}, {versions}"[:WIDTH]
    yield f"governor {environment['governor']}, load {environment['load']} at the start; shapes of {model}"[:WIDTH]
    if (environment["load"] or 0) > environment["cores"] / 2:
        yield "The machine is busy: what is timed here competes with other processes, parallel calls most of all."


def columns() -> Iterator[str]:
    """Yield what the columns of cases are."""
    yield from textwrap.wrap(
        "q and k are strided views of one packed QKV buffer. limit: the time it takes to scale as many bytes in place, "
        "as a part of the row's time. ratio: the row's time relative to the case's first row, round by round, with the "
        "95 % interval of its median; where that is wide, >: more than its lower end, or noise: it means nothing.",
        WIDTH,
    )
    yield ""
    yield from _lines(_case_table(show_header=True))


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the names of cases and what they are, in lines as long as it takes; * marks those of a plain run."""
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for _ in range(3):
        table.add_column(no_wrap=True)
    for case in cases:
        table.add_row("*" if case.default else "", case.name, case.what)
    yield from _lines(table, width=1000, indent="")


def closing(run: Run) -> Iterator[str]:
    """Yield the headline, and how long first calls took."""
    lines = [line for case in run.cases for line in _headline(case)]
    if lines:
        yield ""
        yield "Headline: strided q and k of a packed QKV buffer rotated in place by a plan; times as fast as"
        yield from lines
    first: dict[str, float] = {}
    for case in run.cases:
        for row in case.rows:
            if row.status == "timed" and row.role in ("ours", "peer") and row.first_call > 0.1:
                first[row.name] = max(first.get(row.name, 0.0), row.first_call)
    if first:
        yield ""
        slowest = sorted(first.items(), key=lambda item: -item[1])[:6]
        listed = ", ".join(f"{name} {duration(seconds)}" for name, seconds in slowest)
        yield from textwrap.wrap(f"Slowest first calls, compiling: {listed}", WIDTH)
    yield f"{_counted(len(run.cases), 'case')} in {run.seconds:.0f} s"


LATENCY = ("callers", "p50", "p99", "p99.9", "calls", "calls a second")


def latency_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of latencies."""
    yield ""
    yield "Latency of a plan's call in bfloat16, in place, on one token unless specified otherwise"
    table = Table("", *(Column(name, justify="right") for name in LATENCY), box=None, padding=(0, 2, 0, 0))
    for row in rows:
        times = (duration(row[part]) for part in ("p50", "p99", "p999"))
        table.add_row(row["situation"], str(row["callers"]), *times, str(row["calls"]), f"{row['rate']:,.0f}")
    yield from _lines(table)


def _headline(case: Result) -> Iterator[str]:
    """Yield one case's peers in a line or two."""
    peers, text = case.timed("peer"), ""
    if case.base is None or case.base.name != "plan" or not peers:
        return
    text = f"  {case.name:<22}"
    for row in peers:
        ratio = case.ratio(row)
        part = f"{row.name} {times(ratio)}"
        if len(text) + len(part) + 2 > WIDTH:
            yield text.rstrip(", ")
            text = " " * 24
        text += part + ", "
    yield text.rstrip(", ")


def findings_lines(findings: list[Finding], threshold: float, here: bool) -> Iterator[str]:
    """Yield what changed since an older run."""
    yield ""
    if not here:
        yield "The older run is of another machine, or other threads: rows are compared relative to the limit."
    changed = [f for f in findings if f.change.slower(threshold) or f.change.faster(threshold)]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for width in (36, 20, 11, 15, 6):
        table.add_column(max_width=width, no_wrap=True)
    for finding in changed:
        change = finding.change
        verdict = "slower" if change.slower(threshold) else "faster"
        interval = f"{change.low:.2f} … {change.high:.2f}"
        table.add_row(finding.case, finding.row, f"{change.factor:.2f} times", interval, verdict)
    yield from _lines(table) if changed else ()
    if not findings:
        yield "Nothing was compared: no row of this run is in the older one."
        return
    slower = sum(f.change.slower(threshold) for f in findings)
    share = f"{100 * threshold:.3g} % and beyond noise"
    yield f"{_counted(len(findings), 'row')} compared, {slower} slower by more than {share}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s'[: number != 1]}"
