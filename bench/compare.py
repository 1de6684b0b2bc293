"""A run against an older one: what got slower, beyond noise."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from .measurement.measure import Result, Row
from .measurement.statistics import Change, change, lesser, relative
from .results import Run

# Seconds before each new attempt at what looks slower.
_ATTEMPTS = (0.0, 2.0, 5.0, 10.0, 20.0, 40.0)


@dataclass(frozen=True)
class Finding:
    """One row of ours in both runs."""

    case: str
    row: str
    change: Change


def same_machine(new: Run, old: Run) -> bool:
    """Return True if two runs are of the same kind of machine with the same number of threads."""
    return all(
        new.environment[fact] == old.environment[fact] for fact in ("processor", "cores", "threads")
    )


def compare(new: Run, old: Run) -> list[Finding]:
    """Return how each row of ours changed."""
    return _compare_cases(new.cases, old, same_machine(new, old))


def confirm(
    findings: list[Finding],
    new: Run,
    old: Run,
    threshold: float,
    measure_again: Callable[[str], Result],
    pause: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    """Return the findings after measuring those that are slower again: what is not slower each time was noise.

    measure_again: measures the case of this name. pause: waits before a new attempt, since what disturbed the last one
    may go on for seconds.
    """
    for seconds in _ATTEMPTS:
        suspects = {finding.case for finding in findings if finding.change.slower(threshold)}
        if not suspects:
            break
        pause(seconds)
        again = _compare_cases(
            [measure_again(name) for name in sorted(suspects)], old, same_machine(new, old)
        )
        latest = {(finding.case, finding.row): finding for finding in again}
        findings = [
            min(f, latest.get((f.case, f.row), f), key=lambda finding: finding.change.factor)
            if f.change.slower(threshold)
            else f
            for f in findings
        ]
    return findings


def _compare_cases(cases: list[Result], old: Run, here: bool) -> list[Finding]:
    before = {case.name: case for case in old.cases}
    return [
        finding
        for case in cases
        if case.name in before
        for finding in _compare(case, before[case.name], here)
    ]


def _compare(new: Result, old: Result, here: bool) -> list[Finding]:
    """Return how each row of ours in one case changed; here: both were measured on the same machine.

    A machine is not as fast today as it was then; so a row must have changed in seconds and relative to its baselines,
    which were measured in the same rounds: the limit (without one, the first peer), what cores do in their first caches
    (two processors of a virtual machine may share one core for a minute), the same as the limit from one array to
    another where results go elsewhere, and what new memory costs where the row returns such. On another machine only
    the limit means something.
    """
    rows_before, found = {row.name: row for row in old.timed("ours")}, []
    for row in new.timed("ours"):
        if row.name not in rows_before:
            continue
        seconds, before = change(row.samples, rows_before[row.name].samples), _baselines(old, row)
        relatives = [
            relative(seconds, change(baseline.samples, before[role].samples))
            for role, baseline in _baselines(new, row).items()
            if role in before
        ]
        changed = reduce(lesser, relatives, seconds) if here or not relatives else relatives[0]
        found.append(Finding(new.name, row.name, changed))
    return found


def _baselines(case: Result, row: Row) -> dict[str, Row]:
    """Return the baselines of a row by role, the limit (or the peer in its place) first."""
    # The limit on the most threads, which is the last, even where one is faster: what slows threads slows it as well.
    first = [*case.timed("limit")[::-1], *case.timed("peer")][:1]
    others = case.timed("core", "copy", *["memory"] * row.new)
    return {baseline.role: baseline for baseline in first + others}
