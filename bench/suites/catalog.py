"""The named cases, and their selection by patterns."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..measurement.case import Case
from ..models import Model
from . import attention_steps, components, rotations, server_steps


def catalog(model: Model, peers: bool | None = None, threads: Sequence[int] = ()) -> list[Case]:
    """Return every case; rotations have the heads and frequencies of a model.

    peers: time peers in all decode and prefill cases, in none, or (None) in the headline cases
        and in those of caches.
    threads: numbers of threads to compare; only rotations are then timed.
    """
    cases = [*rotations.decode_and_prefill(model, peers, threads), *rotations.other_kinds(threads)]
    if threads:
        return cases
    servers = [*server_steps.cases(peers), *attention_steps.cases(peers)]
    return [*cases, rotations.layouts(model), *servers, *components.cases()]


def select(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Return the cases that match a pattern; without patterns, the default cases.

    Raises ValueError if a pattern matches none.
    """
    if not patterns:
        return [case for case in cases if case.default]
    names = [case.name for case in cases]
    default_names = [case.name for case in cases if case.default]
    try:
        selected = matching(names, default_names, patterns)
    except ValueError as error:
        raise ValueError(f"{error}; `--list '*'` shows all") from None
    return [case for case in cases if case.name in selected]


def matching(names: Sequence[str], default_names: Sequence[str], patterns: list[str]) -> set[str]:
    """Return the names of cases that any of some patterns matches.

    A pattern is a whole name, a pattern with * and ?, or a part of a name; a part matches default
    names, or if there are none any name. Raises ValueError if a pattern matches none.
    """
    return {name for pattern in patterns for name in _matching(names, default_names, pattern)}


def _matching(names: Sequence[str], default_names: Sequence[str], pattern: str) -> list[str]:
    whole = [name for name in names if fnmatchcase(name, pattern)]
    in_default = [name for name in default_names if pattern in name]
    anywhere = [name for name in names if pattern in name]
    found = whole or in_default or anywhere
    if not found:
        raise ValueError(f"`pattern` is {pattern!r}, which matches no case")
    return found
