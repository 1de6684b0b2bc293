"""The named cases, and their selection by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..measurement.case import Case
from ..models import Model
from . import components, rotations


def catalog(model: Model, peers: bool | None = None, threads: Sequence[int] = ()) -> list[Case]:
    """Return every case; rotations have the heads and frequencies of a model.

    peers: time peers in all decode and prefill cases, in none, or (None) in the headline cases.
    threads: numbers of threads to compare; only rotations are then timed.
    """
    cases = [*rotations.decode_and_prefill(model, peers, threads), *rotations.other_kinds(threads)]
    if threads:
        return cases
    return [*cases, rotations.layouts(model), *components.cases()]


def select(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Return the cases that match a pattern; without patterns, the default cases.

    Raises ValueError if a pattern matches none.
    """
    if not patterns:
        return [case for case in cases if case.default]
    names: set[str] = set()
    for pattern in patterns:
        names |= _matching_names(cases, pattern)
    return [case for case in cases if case.name in names]


def _matching_names(cases: list[Case], pattern: str) -> set[str]:
    """Return the names that a pattern matches.

    A pattern is a whole name, a pattern with * and ?, or a part of a name; a part matches default
    cases, or if there are none any case.
    """
    names = [case.name for case in cases]
    whole = {name for name in names if fnmatchcase(name, pattern)}
    if whole:
        return whole
    in_default = {case.name for case in cases if case.default and pattern in case.name}
    if in_default:
        return in_default
    anywhere = {name for name in names if pattern in name}
    if anywhere:
        return anywhere
    raise ValueError(f"`pattern` is {pattern!r}, which matches no case; `--list` shows them")
