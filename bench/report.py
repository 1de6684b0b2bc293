"""A run as text: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from .compare import Finding
from .latency import Latency
from .measurement.case import Case
from .measurement.measure import Result, Row
from .measurement.statistics import Estimate
from .results import Run

WIDTH = 100
# Columns of cases and their widths: tables of several cases stand under one header.
_COLUMNS = {
    "": 31,
    "median": 10,
    "quartiles": 15,
    "GB/s": 6,
    "limit": 6,
    "ratio": 8,
    "interval": 14,
}
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def duration(seconds: float) -> str:
    """Return a time with three digits and its unit."""
    unit = _unit(seconds)
    return f"{_digits(seconds / _UNITS[unit])} {unit}"


def _unit(seconds: float) -> str:
    return next((unit for unit, scale in _UNITS.items() if seconds >= scale), "ns")


def _digits(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def ratio_text(ratio: Estimate) -> str:
    """Return what is known of a ratio: its median, the lower end of its interval where that is above 1, or "noise"."""
    if ratio.meaningless:
        return f"> {_digits(ratio.low)}" if ratio.low > 1 else "noise"
    return _digits(ratio.median)


def heading(environment: dict[str, Any], model: str) -> Iterator[str]:
    """Yield what the figures depend on."""
    caches = ", ".join(f"{name} {size // 1024} KiB" for name, size in environment["caches"].items())
    counts = f"{environment['cores']} cores, {environment['threads']} in use"
    yield f"{environment['processor']}, {counts}; {caches}"[:WIDTH]
    installed = environment["versions"]
    names = [
        name for name in ("numpy", "numba", "torch", "jax", "onnxruntime") if name in installed
    ]
    versions = ", ".join(f"{name} {installed[name]}" for name in names)
    yield f"Python {environment['python']}, {versions}"[:WIDTH]
    yield f"governor {environment['governor']}, load {environment['load']} at the start; shapes of {model}"[
        :WIDTH
    ]
    if (environment["load"] or 0) > environment["cores"] / 2:
        yield "The machine is busy: what is timed here competes with other processes, parallel calls most of all."


def columns() -> Iterator[str]:
    """Yield what the columns of cases are."""
    yield from textwrap.wrap(
        "q and k are strided views of one packed QKV buffer. limit: the time it takes to scale as many bytes in place, "
        "as a percentage of the row's time. ratio: the row's time relative to the first row, with the 95 % interval of "
        "its median; where that is too wide, > and its lower end, or noise.",
        WIDTH,
    )
    yield ""
    yield from _lines(_case_table(show_header=True))


def title(case: Case) -> Iterator[str]:
    """Yield the line above the table of a case."""
    yield f"{case.name}: {case.what}"[:WIDTH]


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of one case, and why rows are missing."""
    table, limit = _case_table(), [case.limit] if case.limit else []
    for row in (*case.timed("ours", "peer"), *limit, *case.timed("copy", "memory")):
        table.add_row(*_figures(case, row))
    yield from _lines(table)
    reasons: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        text = f"{reason} ({', '.join(names)})"
        yield from textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )


def _case_table(show_header: bool = False) -> Table:
    table = Table(box=None, show_header=show_header, padding=(0, 1, 0, 0))
    for name, width in _COLUMNS.items():
        table.add_column(
            name,
            width=width,
            no_wrap=True,
            justify="right" if name not in ("", "interval") else "left",
        )
    return table


def _lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table as plain text."""
    console = Console(width=WIDTH - 2, file=StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        yield f"  {line}".rstrip()


def _figures(case: Result, row: Row) -> Iterator[str]:
    """Yield the columns of a row."""
    seconds = row.seconds
    scale = _UNITS[_unit(seconds.median)]
    yield row.name
    yield duration(seconds.median)
    yield _range(seconds.lower_quartile / scale, seconds.upper_quartile / scale)
    yield _digits(row.rate / 1e9) if row.bytes_accessed else ""
    yield (
        f"{100 / case.ratio(row, case.limit).median:.0f} %"
        if row.bytes_accessed and case.limit
        else ""
    )
    if row is case.base:
        yield "1"
    elif case.base and row.role in ("ours", "peer"):
        ratio = case.ratio(row)
        yield ratio_text(ratio)
        bounded = ratio.low > 0  # of few rounds there are quartiles only
        yield (
            _range(ratio.low, ratio.high)
            if bounded
            else _range(ratio.lower_quartile, ratio.upper_quartile)
        )


def _range(low: float, high: float) -> str:
    return f"{_digits(low)} … {_digits(high)}"


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the names of cases and what they are, in lines as long as it takes; * marks those of a plain run."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        yield f"{'*' if case.default else ' '} {case.name:<{width}} {case.what}"


def closing(run: Run) -> Iterator[str]:
    """Yield the headline, and how long first calls took."""
    compared = [
        case for case in run.cases if case.timed("peer") and case.base and case.base.name == "plan"
    ]
    if compared:
        yield ""
        yield "Headline: a plan's call on strided q and k of one packed QKV buffer; times as fast as"
    for case in compared:
        peers = (f"{row.name} {ratio_text(case.ratio(row))}" for row in case.timed("peer"))
        # A name and its ratio stay on one line.
        text = ", ".join(peer.replace(" ", "\xa0") for peer in peers)
        wrapper = textwrap.TextWrapper(
            WIDTH, f"  {case.name:<21} ", " " * 24, break_on_hyphens=False
        )
        for line in wrapper.wrap(text):
            yield line.replace("\xa0", " ")
    slowest: dict[str, float] = {}
    rows = [row for case in run.cases for row in case.timed("ours", "peer") if row.first_call > 0.1]
    for row in sorted(rows, key=lambda row: row.first_call, reverse=True):
        slowest.setdefault(row.name, row.first_call)
    if slowest:
        listed = ", ".join(
            f"{name} {duration(seconds)}" for name, seconds in list(slowest.items())[:6]
        )
        yield ""
        yield from textwrap.wrap(f"Slowest first calls, compiling: {listed}", WIDTH)
    yield f"{_counted(len(run.cases), 'case')} in {run.seconds:.0f} s"


def latency_lines(rows: Sequence[Latency]) -> Iterator[str]:
    """Yield the table of latencies."""
    yield ""
    yield "Latency of a plan's call in bfloat16, in place, on one token unless specified otherwise"
    names = "callers", "p50", "p99", "p99.9", "calls", "calls per second"
    table = Table(
        "", *(Column(name, justify="right") for name in names), box=None, padding=(0, 2, 0, 0)
    )
    for row in rows:
        times = (duration(seconds) for seconds in (row.p50, row.p99, row.p999))
        table.add_row(row.situation, str(row.callers), *times, str(row.calls), f"{row.rate:,.0f}")
    yield from _lines(table)


def findings_lines(findings: list[Finding], threshold: float, here: bool) -> Iterator[str]:
    """Yield what changed since an older run; here: it is of the same machine."""
    yield ""
    if not here:
        yield "The older run is of another machine, or other threads: rows are compared relative to the limit."
    if not findings:
        yield "Nothing was compared: no row of this run is in the older one."
        return
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for width in (36, 20, 11, 15, 6):
        table.add_column(max_width=width, no_wrap=True)
    for finding in findings:
        change = finding.change
        verdict = (
            "slower" if change.slower(threshold) else "faster" if change.faster(threshold) else ""
        )
        if verdict:
            figures = f"{change.factor:.2f} times", f"{change.low:.2f} … {change.high:.2f}"
            table.add_row(finding.case, finding.row, *figures, verdict)
    yield from _lines(table) if table.rows else ()
    slower = sum(finding.change.slower(threshold) for finding in findings)
    share = f"{100 * threshold:.3g} % and beyond noise"
    yield f"{_counted(len(findings), 'row')} compared, {slower} slower by more than {share}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s'[: number != 1]}"
