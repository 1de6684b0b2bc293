"""Comparison of a run with an older one: rows that got slower by more than noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from .measurement.rows import Result, Row
from .measurement.statistics import Change, change, lesser, relative
from .results import FACTS_OF_MACHINE, Run


@dataclass(frozen=True)
class Finding:
    """The change of a row of rope_cpu that both runs have."""

    case: str
    row: str
    change: Change


def same_machine(new: Run, old: Run) -> bool:
    """Whether two runs are of the same kind of machine, with the same number of threads."""
    return all(new.environment[fact] == old.environment[fact] for fact in FACTS_OF_MACHINE)


def compare(new: Run, old: Run) -> list[Finding]:
    """Return the change of each row of rope_cpu."""
    on_same_machine = same_machine(new, old)
    old_cases = {case.name: case for case in old.cases}
    findings = []
    for case in new.cases:
        if case.name in old_cases:
            findings += _compare_rows(case, old_cases[case.name], on_same_machine)
    return findings


def _compare_rows(new: Result, old: Result, on_same_machine: bool) -> list[Finding]:
    """Return the change of each row of rope_cpu in one case.

    The speed of a machine changes from day to day. So a row must have changed in seconds and also
    relative to its baselines, which were measured in the same rounds: the limit (without one, the
    first peer); work in the first caches (two processors of a virtual machine may share one core
    for a minute); the limit from one array to another, if results go elsewhere; allocation, if the
    row allocates. On another machine only the first of them is meaningful.
    """
    old_rows = {row.name: row for row in old.timed("ours")}
    findings = []
    for row in new.timed("ours"):
        if row.name not in old_rows:
            continue
        in_seconds = change(row.samples, old_rows[row.name].samples)
        old_baselines = _baselines(old, row)
        relative_changes = [
            relative(in_seconds, change(baseline.samples, old_baselines[role].samples))
            for role, baseline in _baselines(new, row).items()
            if role in old_baselines
        ]
        if on_same_machine or not relative_changes:
            changed = reduce(lesser, relative_changes, in_seconds)
        else:
            changed = relative_changes[0]
        findings.append(Finding(new.name, row.name, changed))
    return findings


def _baselines(case: Result, row: Row) -> dict[str, Row]:
    """Return the baselines of a row by role, the limit (or the peer in its place) first."""
    # The limit on the most threads is the last one. It is used even if another one is faster, since
    # what slows threads slows it as well.
    baselines = case.timed("limit")[-1:] or case.timed("peer")[:1]
    baselines += case.timed("core", "copy")
    if row.new:
        baselines += case.timed("memory")
    return {baseline.role: baseline for baseline in baselines}
