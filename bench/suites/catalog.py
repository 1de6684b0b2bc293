"""The named cases, and how they are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from ..measurement.case import Case
from ..models import Model
from . import components, rotations


def catalog(model: Model, peers: bool | None = None, threads: Sequence[int] = ()) -> list[Case]:
    """Return every case, rotations with a model's heads and frequencies.

    peers: time other implementations in all decode and prefill cases, in none, or (None) in the headline.
    threads: several numbers of threads to time rotations at; other cases are then left out.
    """
    cases = [*rotations.decode_and_prefill(model, peers, threads), *rotations.other_kinds(threads)]
    return cases if threads else [*cases, rotations.layouts(model), *components.cases()]


def select(cases: list[Case], patterns: list[str]) -> list[Case]:
    """Return the cases of these names; without any, those of a plain run.

    patterns: a whole name, a pattern with * and ?, or a part of names: of those in a plain run if it is in any.

    Raises ValueError where a pattern matches none.
    """
    names, plain = [case.name for case in cases], [case.name for case in cases if case.default]
    chosen = set() if patterns else set(plain)
    for pattern in patterns:
        found = (
            [name for name in names if fnmatchcase(name, pattern)]
            or [name for name in plain if pattern in name]
            or [name for name in names if pattern in name]
        )
        if not found:
            raise ValueError(
                f"`pattern` is {pattern!r}, which matches no case; `--list` shows them"
            )
        chosen.update(found)
    return [case for case in cases if case.name in chosen]
