"""The named cases, and how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from rope_cpu.bench import others, rotations
from rope_cpu.bench.contender import Case
from rope_cpu.bench.models import Model


def catalog(model: Model, peers: bool | None = None, threads: Sequence[int] = ()) -> list[Case]:
    """Return every case, rotations with a model's heads and frequencies.

    peers: time other implementations in all decode and prefill cases, in none, or (None) in the headline.
    threads: several numbers of threads to time rotations at; other cases are then left out.
    """
    cases = [*rotations.decode_and_prefill(model, peers, threads), *rotations.other_kinds(threads)]
    return cases if threads else [*cases, rotations.layouts(model), *others.cases()]


def select(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Return the cases of these names; without any, those of a plain run.

    patterns: a whole name, a pattern with * and ?, or a part of names.

    Raises ValueError where a pattern matches none.
    """
    chosen = [case.name for case in cases if case.default and not patterns]
    for pattern in patterns:
        wild = pattern if any(mark in pattern for mark in "*?[") else f"*{pattern}*"
        names = [case.name for case in cases]
        found = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, wild)]
        if not found:
            raise ValueError(f"`pattern` is {pattern!r}, which matches no case; `--list` shows them")
        chosen.extend(found)
    return [case for case in cases if case.name in chosen]
