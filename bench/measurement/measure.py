"""Measuring a case: prepare and check every call, then time all that are not wrong together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from rope_cpu.arguments.texts import first_line

from .case import Case, UnavailableError
from .rows import Result, Row
from .timing import Call, Effort, interleave


def measure(case: Case, effort: Effort | None = None) -> Result:
    """Measure a case, with its own effort or the given one."""
    result = Result(case.name, case.what)
    timed_rows = []
    calls = []
    for row, prepare in case.contenders():
        result.rows.append(row)
        call = _checked_call(row, prepare)
        if call is not None:
            timed_rows.append(row)
            calls.append(replace(call, cold=case.cold))
    if calls:
        samples_of_calls = interleave(calls, effort or case.effort)
        for row, samples in zip(timed_rows, samples_of_calls, strict=True):
            row.samples = samples
    return result


def _checked_call(row: Row, prepare: Callable[[], Call]) -> Call | None:
    """Prepare a call, call it once, and check the result if there is a check.

    Returns None if it cannot be timed, with the reason in `row`.
    """
    try:
        call = prepare()
        call.before_sample()
        start = time.perf_counter()
        returned = call.function(*call.argument_sets[0])
        row.first_call = time.perf_counter() - start
        row.bytes_accessed = call.bytes_accessed
        row.new = call.allocates
        if call.error is not None:
            row.error = call.error(returned)
    except UnavailableError as reason:
        row.status = "skipped"
        row.reason = str(reason)
        return None
    except Exception as error:  # a peer that fails here must not end the run of the others
        row.status = "failed"
        row.reason = f"{type(error).__name__}: {first_line(error)}"
        return None
    if row.error is not None and not row.error <= 1:  # NaN is an error, too
        row.status = "wrong"
        row.reason = f"its error is {row.error:.3g} times the tolerance; not timed"
        return None
    return call
