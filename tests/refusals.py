"""Check that oversized input is refused by name, in a short line, before allocation."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

# Bytes that a refusal may allocate, with the loading of a first kernel. The refused calls would
# allocate a gigabyte and more.
MAX_BYTES = 2**27


def refusal(call: Callable[[], Any]) -> str:
    """Return the text of the error that a call raises."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert len(text) < 2000
    assert text.isprintable()
    assert "`" in text
    assert allocated < MAX_BYTES
    return text


def nested(depth: int) -> list[Any]:
    """Return a list nested to this depth."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner


def assert_refused(call: Callable[[], Any], error: Any, argument: str) -> None:
    """Assert that a call raises an error of this class, about this argument."""
    with pytest.raises(error) as caught:
        call()
    assert f"`{argument}`" in str(caught.value)
