"""Checks of the errors that refuse an argument, also before anything is allocated."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

LONGEST_TEXT = 2000
# Bytes that a refusal may allocate, with the loading of a first kernel. The refused calls would
# allocate a gigabyte and more.
MAX_BYTES = 2**27


def check_text(error: Exception) -> None:
    """Raise unless an error is a plain TypeError, ValueError or OSError with a short, safe text."""
    assert not isinstance(error, json.JSONDecodeError | UnicodeError), (
        f"an error that Python raised: {error!r}"
    )
    assert str(error), "an error without a text"
    assert str(error).isprintable(), f"control characters in an error text: {error!r}"
    assert len(str(error)) < LONGEST_TEXT, f"an error text of {len(str(error))} characters"


def check_ours(error: Exception) -> None:
    """Raise unless the library itself raised a short error that names an argument."""
    check_text(error)
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    assert "`" in str(error), f"an error that names no argument, at {where}: {error!r}"
    assert "rope_cpu" in where or "export" in where or "bench" in where, (
        f"an error from {where}: {error!r}"
    )


def refusal(call: Callable[[], Any]) -> str:
    """Return the text of the error that a call raises before it allocates much."""
    tracemalloc.start()
    try:
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        allocated = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    check_ours(caught.value)
    assert allocated < MAX_BYTES
    return str(caught.value)


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
    assert caught.value.argument == argument


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return an array for a call that is refused."""
    return np.zeros(shape, dtype)


def read_only(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a view of an array that cannot be written."""
    frozen = x.view()
    frozen.flags.writeable = False
    return frozen
