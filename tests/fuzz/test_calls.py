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


def test_calls(search):
    def check(call):
        calls.check(call, Memory(call.seed))

    search(check, 100, call=calls.calls())


def test_packed_calls(search):
    """Packed sequences with lengths of their own."""

    def check(call):
        calls.check(call, Memory(call.seed))

    search(check, 40, call=calls.calls(packed=True))


def test_large_calls(search):
    """Arrays from where on several threads rotate them, or compute their cos and sin."""

    def check(call):
        calls.check(call, Memory(call.seed))

    search(check, 6, call=calls.calls(large=True))


def test_appends(search):
    """Writes to caches of any dtype, paging and strides."""

    def check(call):
        appends.check(call, Memory(call.seed))

    search(check, 60, call=appends.appends())


def test_large_appends(search):
    """Steps that several threads write."""

    def check(call):
        appends.check(call, Memory(call.seed))

    search(check, 4, call=appends.appends(large=True))


def test_attentions(search):
    """Attention to caches of any dtype, paging and strides, with NaN beside their keys."""

    def check(call):
        attentions.check(call, Memory(call.seed))

    search(check, 60, call=attentions.attentions())
