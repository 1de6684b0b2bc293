"""Rotations of all kinds of arrays by all kinds of rotary embeddings, against exact ones.

Writes to caches are compared with separate steps.
"""

from __future__ import annotations

import pytest
from fuzz import appends, attentions, calls
from fuzz.placed import Memory

from rope_cpu.kernels import threads


@pytest.fixture(autouse=True)
def _same_threads(monkeypatch):
    monkeypatch.setattr(threads, "limit", threads.limit)


# Checks, numbers of examples and draws. Packed: sequences with lengths of their own. Large: arrays
# that several threads rotate or write, or compute cos and sin of. Attention is to caches with NaN
# beside their keys.
KINDS = {
    "calls": (calls.check, 100, calls.calls()),
    "packed calls": (calls.check, 40, calls.calls(packed=True)),
    "large calls": (calls.check, 6, calls.calls(large=True)),
    "appends": (appends.check, 60, appends.appends()),
    "large appends": (appends.check, 4, appends.appends(large=True)),
    "attentions": (attentions.check, 60, attentions.attentions()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_results(search, kind):
    check, examples, drawn = KINDS[kind]
    search(lambda case: check(case, Memory(case.seed)), examples, case=drawn)
