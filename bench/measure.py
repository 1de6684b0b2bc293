"""A case, and its measurement: every call is checked, then all that are right are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit, prange

import rope_cpu
from rope_cpu.arguments.texts import first_line

from .results import Result, Timing, available_memory
from .rotations import UnavailableError
from .timing import Call, Effort, interleave
from .workloads import allocate

_ONE = np.float32(1)  # an argument, since LLVM would drop a multiplication by a constant 1

# Seconds of all rounds for each call.
_BUDGET = 0.4
# The most bytes of arrays that a contender allocates, as a multiple of those accessed.
_ALLOCATED = 2

# Contenders by name: functions that prepare the call of a workload, or raise UnavailableError.
Contenders = Mapping[str, Callable[[Any], Call]]


@dataclass(frozen=True)
class Case:
    """Contenders that are timed together; what: one line of description.

    workload: their argument. Its method `error` checks results. As many bytes as a call accesses,
        its `bytes_accessed`, are scaled as the limit of the machine.
    ours, peers: contenders of rope_cpu and of other libraries. Ratios are relative to the first.
    default: whether a run without patterns includes the case.
    """

    name: str
    what: str
    workload: Any
    ours: Contenders
    peers: Contenders = field(default_factory=dict)
    default: bool = False


def measure(case: Case, effort: Effort | None = None) -> Result:
    """Measure a case, with a budget for its calls or with the given effort."""
    result = Result(case.name, case.what)
    bytes_of_row = _ALLOCATED * case.workload.bytes_accessed
    needed = bytes_of_row * (len(case.ours) + len(case.peers))
    if needed > available_memory():
        problem = f"skipped: needs {needed / 2**30:.1f} GiB of memory, more than is free"
        result.rows.append(Timing("all rows", "", problem))
        return result
    calls = []
    for role, contenders in {"ours": case.ours, "peer": case.peers}.items():
        for name, prepare in contenders.items():
            row = Timing(name, role)
            result.rows.append(row)
            call = _checked_call(row, prepare, case.workload)
            if call is not None:
                calls.append(call)
    # The limit comes last: kernels of rope_cpu choose the threading layer of Numba.
    for threads in sorted({1, rope_cpu.get_num_threads()}):
        size = case.workload.bytes_accessed
        row = Timing(f"limit, threads: {threads}", "limit", bytes_accessed=size)
        result.rows.append(row)
        calls.append(_limit(threads, case.workload))
    samples_of_calls = interleave(calls, effort or Effort(budget=_BUDGET * len(calls)))
    for row, samples in zip(result.timed("ours", "peer", "limit"), samples_of_calls, strict=True):
        row.samples = samples
    return result


def _limit(threads: int, workload: Any) -> Call:
    """Return the scaling of an array, which reads and writes as many bytes as a call."""
    size = workload.bytes_accessed // 8 * 4  # bytes of whole floats
    return Call(scale, (allocate(size).view(np.float32), _ONE, threads))


@njit(error_model="numpy")
def _scale_block(x, factor):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] *= factor


@njit(parallel=True, nogil=True, error_model="numpy")
def scale(x, factor, threads):  # type: ignore[no-untyped-def]
    """Multiply float32 `x` by a factor in place."""
    if threads > 1:
        for n in prange(threads):
            start = x.size * n // threads
            stop = x.size * (n + 1) // threads
            _scale_block(x[start:stop], factor)
    else:
        _scale_block(x, factor)


def _checked_call(row: Timing, prepare: Callable[[Any], Call], workload: Any) -> Call | None:
    """Prepare a call, call it once, and check its results.

    Returns None if it cannot be timed, with the reason in `row`.
    """
    try:
        call = prepare(workload)
        returned = call.function(*call.arguments)
        if call.results is not None:
            row.bytes_accessed = workload.bytes_accessed
            row.error = workload.error(call.results(returned))
    except (ImportError, UnavailableError) as reason:
        row.problem = f"skipped: {first_line(reason)}"
        return None
    except Exception as error:  # a peer that fails here must not end the run of the others
        row.problem = f"failed: {type(error).__name__}: {first_line(error)}"
        return None
    if row.error is not None and not row.error <= 1:  # NaN is an error, too
        row.problem = f"wrong: its error is {row.error:.3g} times the tolerance; not timed"
        return None
    return call
