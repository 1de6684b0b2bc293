"""Checks of the errors that refuse an argument."""

from __future__ import annotations

import json

LONGEST_TEXT = 2000


def check_text(error):
    """Raise unless an error is a plain TypeError, ValueError or OSError with a short, safe text."""
    assert not isinstance(error, json.JSONDecodeError | UnicodeError), (
        f"an error that Python raised: {error!r}"
    )
    assert str(error), "an error without a text"
    assert str(error).isprintable(), f"control characters in an error text: {error!r}"
    assert len(str(error)) < LONGEST_TEXT, f"an error text of {len(str(error))} characters"


def check_ours(error):
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
