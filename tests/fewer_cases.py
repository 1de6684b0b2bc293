"""Fewer cases than all: those of every two values, and those that need not wait for `.ci/run`."""

from itertools import combinations, product

import pytest


def pairwise(*values, allowed=lambda *row: True):
    """Return rows, of one value for each parameter, in which every two values meet.

    allowed: whether there is such a row. Pairs of values that are in no row do not meet.
    """
    rows = [row for row in product(*values) if allowed(*row)]
    left = set().union(*map(_pairs, rows))
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(_pairs(row) & left)))
        left -= _pairs(chosen[-1])
    return chosen


def _pairs(row):
    """Return every two values of a row, with their places."""
    return set(combinations(enumerate(row), 2))


def sample(cases, *kept, others="processes"):
    """Return cases as parameters, all but a few with a marker."""
    marker = getattr(pytest.mark, others)
    return [pytest.param(case, marks=() if case in kept else marker) for case in cases]
