"""A run against an older one: what got slower, beyond noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rope_cpu.bench.measure import Result, Row
from rope_cpu.bench.results import Run
from rope_cpu.bench.statistics import Change, Estimate, change


@dataclass(frozen=True)
class Finding:
    """One row of ours in both runs."""

    case: str
    row: str
    change: Change


def compare(new: Run, old: Run) -> list[Finding]:
    """Return how each row of ours changed.

    A machine is not as fast today as it was then; so what is compared is each row's time in times of the limit, which
    was measured in the same rounds, or of the first peer where a case has no limit.
    """
    before = {case.name: case for case in old.cases}
    return [finding for case in new.cases if case.name in before for finding in compare_case(case, before[case.name])]


def compare_case(new: Result, old: Result) -> list[Finding]:
    """Return how each row of ours in one case changed."""
    olds = {row.name: row for row in old.timed("ours")}
    found = []
    for row in new.timed("ours"):
        if row.name in olds:
            yards = _yardstick(new), _yardstick(old)
            common = yards[0] is not None and yards[1] is not None and yards[0].role == yards[1].role
            then, now = ((old, olds[row.name], yards[1]), (new, row, yards[0]))
            found.append(Finding(new.name, row.name, change(_cost(*now, common), _cost(*then, common))))
    return found


def _yardstick(case: Result) -> Row | None:
    return case.limit or next(iter(case.timed("peer")), None)


def _cost(case: Result, row: Row, yardstick: Row | None, common: bool) -> Estimate:
    return case.ratio(row, yardstick) if common and yardstick else row.seconds


def confirm(
    findings: list[Finding], old: Run, threshold: float, again: Callable[[str], Result], times: int = 2
) -> list[Finding]:
    """Return the findings, those that say slower measured anew: what is slower only once was noise.

    again: measures the case of this name. times: how often at the most.
    """
    before = {case.name: case for case in old.cases}
    for _ in range(times):
        suspects = {f.case for f in findings if f.change.slower(threshold)}
        anew = {name: compare_case(again(name), before[name]) for name in suspects}
        best = {(f.case, f.row): f for fresh in anew.values() for f in fresh}
        findings = [
            min(f, best.get((f.case, f.row), f), key=lambda g: g.change.factor) if f.change.slower(threshold) else f
            for f in findings
        ]
    return findings
