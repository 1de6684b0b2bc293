"""A run as text: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from . import estimate
from .compare import Finding
from .measurement.case import Case
from .measurement.rows import Result, Row
from .measurement.statistics import Change, Estimate
from .plurals import counted
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
_LEFT_ALIGNED = ("", "interval")
_FINDING_WIDTHS = (36, 20, 11, 15, 6)
_UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
_SHOWN_PACKAGES = ("numpy", "numba", "torch", "jax", "onnxruntime")

# See `rope_cpu.warmup`.
_KERNEL_SECONDS = 3

# First calls that took longer, in seconds, were compiling; so many are listed.
_COMPILING = 0.1
_LISTED_FIRST_CALLS = 6


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
    installed = environment["versions"]
    versions = ", ".join(
        f"{name} {installed[name]}" for name in _SHOWN_PACKAGES if name in installed
    )
    yield f"Python {environment['python']}, {versions}"[:WIDTH]
    load = environment["load"]
    governor = environment["governor"]
    yield f"governor {governor}, load {load} at the start; shapes of {model}"[:WIDTH]
    if (load or 0) > environment["cores"] / 2:
        yield "The machine is busy: other processes disturb timings, most of all parallel calls."


def forecast(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the number of cases to time, and about how long they take."""
    yield (
        f"{estimate.summary(cases)}, and about {_KERNEL_SECONDS} s for each kernel that is not "
        "compiled yet"
    )


def columns() -> Iterator[str]:
    """Yield an explanation of the columns, and their header."""
    yield from textwrap.wrap(
        "q and k are strided views of one packed QKV buffer. limit: the time to scale as many "
        "bytes in place, as a percentage of the row's time. ratio: the row's time relative to the "
        "first row, with the 95 % interval of its median; if that is too wide, > and its lower "
        "end, or noise.",
        WIDTH,
    )
    yield ""
    yield from _lines(_case_table(show_header=True))


def title(case: Case | Result) -> Iterator[str]:
    """Yield the line above the table of a case."""
    yield f"{case.name}: {case.what}"[:WIDTH]


def case_lines(case: Result) -> Iterator[str]:
    """Yield the table of a case, and the reasons of missing rows."""
    table = _case_table()
    rows = case.timed("ours", "peer")
    if case.limit is not None:
        rows.append(case.limit)
    rows += case.timed("copy", "memory")
    for row in rows:
        table.add_row(*_cells(case, row))
    yield from _lines(table)
    names_by_reason: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            names_by_reason.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in names_by_reason.items():
        text = f"{reason} ({', '.join(names)})"
        yield from textwrap.wrap(
            text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )


def _case_table(show_header: bool = False) -> Table:
    table = Table(box=None, show_header=show_header, padding=(0, 1, 0, 0))
    for name, width in _COLUMNS.items():
        justify: Any = "left" if name in _LEFT_ALIGNED else "right"
        table.add_column(name, width=width, no_wrap=True, justify=justify)
    return table


def _lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table as plain text."""
    console = Console(width=WIDTH - 2, file=StringIO(), color_system=None, markup=False)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        yield f"  {line}".rstrip()


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


def saved_run(run: Run, cases: Sequence[Result]) -> Iterator[str]:
    """Yield a run that was saved, as it was printed: its facts, the tables of some cases."""
    yield f"{run.command}, {run.environment['time']}"[:WIDTH]
    yield from heading(run.environment, run.model)
    yield from columns()
    for case in cases:
        yield from title(case)
        yield from case_lines(case)
    yield from _headline(cases)
    yield from _first_calls(cases)


def closing(run: Run) -> Iterator[str]:
    """Yield the headline, the longest first calls, and the duration of the run."""
    yield from _headline(run.cases)
    yield from _first_calls(run.cases)
    yield f"{counted(len(run.cases), 'case')} in {run.seconds:.0f} s"


def _headline(cases: Sequence[Result]) -> Iterator[str]:
    compared = [
        case
        for case in cases
        if case.timed("peer") and case.base is not None and case.base.name == "plan"
    ]
    if compared:
        yield ""
        yield (
            "Headline: a plan's call on strided q and k of one packed QKV buffer; times as fast as"
        )
    for case in compared:
        ratios = [f"{row.name} {ratio_text(case.ratio(row))}" for row in case.timed("peer")]
        # Non-breaking spaces keep a name and its ratio on one line.
        text = ", ".join(ratio.replace(" ", "\xa0") for ratio in ratios)
        for line in textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"  {case.name:<21} ",
            subsequent_indent=" " * 24,
            break_on_hyphens=False,
        ):
            yield line.replace("\xa0", " ")


def _first_calls(cases: Sequence[Result]) -> Iterator[str]:
    longest: dict[str, float] = {}
    for case in cases:
        for row in case.timed("ours", "peer"):
            if row.first_call > _COMPILING:
                longest[row.name] = max(row.first_call, longest.get(row.name, 0.0))
    if not longest:
        return
    names = sorted(longest, key=longest.__getitem__, reverse=True)[:_LISTED_FIRST_CALLS]
    listed = ", ".join(f"{name} {duration(longest[name])}" for name in names)
    yield ""
    yield from textwrap.wrap(f"Slowest first calls, compiling: {listed}", WIDTH)


def findings_lines(
    findings: list[Finding], threshold: float, on_same_machine: bool
) -> Iterator[str]:
    """Yield the changes since an older run that exceed the threshold and noise."""
    yield ""
    if not on_same_machine:
        yield (
            "The older run is of another machine, or other threads: rows are compared relative to "
            "the limit."
        )
    if not findings:
        yield "Nothing was compared: no row of this run is in the older one."
        return
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    for width in _FINDING_WIDTHS:
        table.add_column(max_width=width, no_wrap=True)
    for finding in findings:
        verdict = _verdict(finding.change, threshold)
        if verdict:
            factor = f"{finding.change.factor:.2f} times"
            interval = f"{finding.change.low:.2f} … {finding.change.high:.2f}"
            table.add_row(finding.case, finding.row, factor, interval, verdict)
    if table.rows:
        yield from _lines(table)
    slower = sum(finding.change.slower(threshold) for finding in findings)
    share = f"{100 * threshold:.3g} % and beyond noise"
    yield f"{counted(len(findings), 'row')} compared, {slower} slower by more than {share}"


def _verdict(change: Change, threshold: float) -> str:
    if change.slower(threshold):
        return "slower"
    if change.faster(threshold):
        return "faster"
    return ""
