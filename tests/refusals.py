"""How tests see that absurd input is refused: by name, in a short text, before anything is allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

# Bytes that a refusal may take at most, with the loading of a first kernel. What is refused takes a gigabyte and more.
MOST_BYTES = 2**27


def refusal(call: Callable[[], Any]) -> str:
    """Return the text of the error that a call raises."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert len(text) < 2000
    assert "`" in text
    assert taken < MOST_BYTES
    return text


def nested(depth: int) -> list[Any]:
    """Return a list in a list, so many times."""
    inner: list[Any] = []
    for _ in range(depth):
        inner = [inner]
    return inner
