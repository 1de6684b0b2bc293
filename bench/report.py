"""A run on paper: tables of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rope_cpu.bench.compare import Finding
from rope_cpu.bench.contender import Case
from rope_cpu.bench.measure import Result, Row
from rope_cpu.bench.results import Run
from rope_cpu.bench.statistics import Estimate

WIDTH = 100
_HEADER = f"  {'':<31}{'median':>10}  {'quartiles':>13}  {'GB/s':>6} {'limit':>6}  {'ratio':>6}  interval"
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
    for row in case.timed("ours", "floor", "peer"):
        yield _row(case, row)
    if case.limit:
        yield _row(case, case.limit)
    for row in case.timed("copy", "memory"):
        yield _row(case, row)
    reasons: dict[str, list[str]] = {}
    for row in case.rows:
        if row.status != "timed":
            reasons.setdefault(f"{row.status}: {row.reason}", []).append(row.name)
    for reason, names in reasons.items():
        yield from textwrap.wrap(
            f"{reason} ({', '.join(names)})",
            WIDTH - 4,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )


def _row(case: Result, row: Row) -> str:
    seconds = row.seconds
    scale = _unit(seconds.median)[1]
    quartiles = " … ".join(_digits(quartile / scale) for quartile in (seconds.lower_quartile, seconds.upper_quartile))
    rate = _digits(row.rate / 1e9) if row.moved else ""
    share = f"{100 / case.ratio(row, case.limit).median:.0f} %" if row.moved and case.limit else ""
    ratio = interval = ""
    if case.base and row.role in ("ours", "floor", "peer"):
        ratio, interval = ("1", "") if row is case.base else _ratio(case.ratio(row))
    times = f"  {row.name:<31}{duration(seconds.median):>10}  {quartiles:>13}"
    return f"{times}  {rate:>6} {share:>6}  {ratio:>6}  {interval}".rstrip()


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
    yield "q and k are strided views of one packed QKV buffer. limit: the time it takes to scale as many bytes"
    yield "in place, as a part of the row's time. ratio: the row's time in times of the case's first row, round"
    yield "by round, with the 95 % interval of its median; where that is wide, >: more than its lower end, or"
    yield "noise: it means nothing."
    yield ""
    yield _HEADER


def listing(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the names of cases and what they are, in lines as long as it takes; * marks those of a plain run."""
    width = max(len(case.name) for case in cases)
    for case in cases:
        yield f"{'*' if case.default else ' '} {case.name:<{width}} {case.what}"


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


def latency_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of latencies."""
    yield ""
    yield "Latency of a plan's call in bfloat16, in place, on one token where not said otherwise"
    yield f"  {'':<28}{'callers':>8}{'p50':>11}{'p99':>11}{'p99.9':>11}{'calls':>10}{'calls a second':>17}"
    for row in rows:
        times = "".join(f"{duration(row[part]):>11}" for part in ("p50", "p99", "p999"))
        yield f"  {row['situation']:<28}{row['callers']:>8}{times}{row['calls']:>10}{row['rate']:>17,.0f}"


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
        yield "The older run is of another machine, or other threads: rows are compared in times of the limit."
    changed = [f for f in findings if f.change.slower(threshold) or f.change.faster(threshold)]
    for finding in changed:
        change = finding.change
        verdict = "slower" if change.slower(threshold) else "faster"
        interval = f"{change.low:.2f} … {change.high:.2f}"
        yield f"  {finding.case:<36.36} {finding.row:<20.20} {change.factor:>5.2f} times ({interval}), {verdict}"
    if not findings:
        yield "Nothing was compared: no row of this run is in the older one."
        return
    slower = sum(f.change.slower(threshold) for f in findings)
    share = f"{100 * threshold:.3g} % and beyond noise"
    yield f"{_counted(len(findings), 'row')} compared, {slower} slower by more than {share}"


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'s'[: number != 1]}"
