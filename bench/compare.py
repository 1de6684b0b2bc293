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


def compare(new: Run, old: Run) -> list[Finding]:
    """Return how each row of ours changed."""
    before = {case.name: case for case in old.cases}
    here = same_machine(new, old)
    return [f for case in new.cases if case.name in before for f in compare_case(case, before[case.name], here)]


def same_machine(new: Run, old: Run) -> bool:
    """Return True if two runs are of the same kind of machine, in use alike."""
    return all(new.environment[fact] == old.environment[fact] for fact in ("processor", "cores", "threads"))


def compare_case(new: Result, old: Result, here: bool = True) -> list[Finding]:
    """Return how each row of ours in one case changed; here: both were measured on the same machine.

    A machine is not as fast today as it was then; so a row must have changed in seconds and in times of its baselines,
    which were measured in the same rounds: the limit (without one, the first peer), what cores do in their first caches
    (two processors of a virtual machine may share one core for a minute), the same as the limit from one array to
    another where results go elsewhere, and what new memory costs where the row returns such. On another machine only
    the limit means something.
    """
    olds, found = {row.name: row for row in old.timed("ours")}, []
    for row in new.timed("ours"):
        if row.name not in olds:
            continue
        seconds = change(row.samples, olds[row.name].samples)
        others = [
            relative(seconds, change(baseline.samples, old_baseline.samples))
            for baseline, old_baseline in zip(_baselines(new, row), _baselines(old, row), strict=False)
            if baseline.role == old_baseline.role
        ]
        changed = reduce(lesser, others, seconds) if here or not others else others[0]
        found.append(Finding(new.name, row.name, changed))
    return found


def _baselines(case: Result, row: Row) -> list[Row]:
    # The limit on the most threads, even where one is faster: what slows threads down slows it as well.
    baselines = [*case.timed("limit")[::-1], *case.timed("peer")][:1]
    return baselines + case.timed("core", "copy") + (case.timed("memory") if row.new else [])


def confirm(
    findings: list[Finding],
    old: Run,
    threshold: float,
    again: Callable[[str], Result],
    here: bool,
    pause: Callable[[float], object] = time.sleep,
) -> list[Finding]:
    """Return the findings, those that say slower measured anew: what is not slower each time was noise.

    again: measures the case of this name. here: as in compare_case. pause: waits before a new attempt, since what
    disturbed the last one may go on for seconds.
    """
    before = {case.name: case for case in old.cases}
    for seconds in _ATTEMPTS:
        suspects = {finding.case for finding in findings if finding.change.slower(threshold)}
        if not suspects:
            break
        pause(seconds)
        anew = {(f.case, f.row): f for name in suspects for f in compare_case(again(name), before[name], here)}
        findings = [_milder(finding, anew.get((finding.case, finding.row)), threshold) for finding in findings]
    return findings


def _milder(first: Finding, second: Finding | None, threshold: float) -> Finding:
    if second is None or not first.change.slower(threshold):
        return first
    return min(first, second, key=lambda finding: finding.change.factor)
