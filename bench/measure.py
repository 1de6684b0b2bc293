"""A case, and its measurement: every call is checked, then all that are right are timed in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numba import njit, prange

import rope_cpu
from rope_cpu.arguments.texts import first_line
from rope_cpu.array_types import Array
from rope_cpu.kernels.threads import load_tbb

from .results import Result, Row
from .timing import Call, Effort, interleave
from .workload import allocate

_FLOAT_BYTES = 4
_ONE = np.float32(1)  # an argument, since LLVM would drop a multiplication by a constant 1

load_tbb()  # Numba's threads start with the first parallel call, which may be one of this module

# Prepares a call, or raises UnavailableError.
Prepare = Callable[[], Call]


class UnavailableError(Exception):
    """A call that cannot be timed here; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """Contenders that are timed together; what: one line of description.

    ours, peers: contenders of rope_cpu and of other libraries. Ratios are relative to the first.
    bytes_accessed: by a call; as many bytes are scaled as the limit of the machine. 0: no limit.
    copies: allocations of the scaled bytes. cold: see `Call`.
    default: whether a run without patterns includes the case.
    memory: upper bound of the bytes needed, 0 if small. budget: seconds of all rounds.
    """

    name: str
    what: str
    ours: Mapping[str, Prepare]
    peers: Mapping[str, Prepare] = field(default_factory=dict)
    bytes_accessed: int = 0
    copies: int = 1
    cold: bool = False
    default: bool = False
    memory: int = 0
    budget: float = 1.0


def measure(case: Case, effort: Effort | None = None) -> Result:
    """Measure a case, with its own budget or the given effort."""
    result = Result(case.name, case.what)
    calls = []
    roles = {"ours": case.ours, "peer": case.peers, "limit": _limits(case)}
    for role, contenders in roles.items():
        for name, prepare in contenders.items():
            row = Row(name, role)
            result.rows.append(row)
            call = _checked_call(row, prepare)
            if call is not None:
                calls.append(replace(call, cold=case.cold))
    if calls:
        samples_of_calls = interleave(calls, effort or Effort(budget=case.budget))
        for row, samples in zip(result.timed(), samples_of_calls, strict=True):
            row.samples = samples
    return result


def on_threads(case: Case, counts: Sequence[int]) -> Case:
    """Return a case whose first contender is timed on each of several numbers of threads."""
    name, prepare = next(iter(case.ours.items()))

    def prepare_on(count: int) -> Call:
        return replace(prepare(), before_sample=partial(rope_cpu.set_num_threads, count))

    ours = {f"{name}, {_threads(count)}": partial(prepare_on, count) for count in counts}
    return replace(case, ours=ours, peers={})


def _limits(case: Case) -> dict[str, Prepare]:
    """Return the scaling of as many bytes in place: on one thread, and on the number in use."""
    if not case.bytes_accessed:
        return {}
    arrays = _arrays(case.bytes_accessed, case.copies)

    def limit(count: int) -> Call:
        return Call(scale, [(x, count) for x in arrays], case.bytes_accessed)

    counts = sorted({1, rope_cpu.get_num_threads()})
    return {f"limit, {_threads(count)}": partial(limit, count) for count in counts}


@njit(error_model="numpy")
def _scale_block(x, factor):  # type: ignore[no-untyped-def]
    for i in range(x.size):
        x[i] *= factor


@njit(parallel=True, nogil=True, error_model="numpy")
def _scale(x, factor, threads):  # type: ignore[no-untyped-def]
    if threads > 1:
        for n in prange(threads):
            start = x.size * n // threads
            stop = x.size * (n + 1) // threads
            _scale_block(x[start:stop], factor)
    else:
        _scale_block(x, factor)


def scale(x: Array, threads: int, factor: Any = _ONE) -> None:
    """Multiply float32 `x` by a factor in place."""
    _scale(x, factor, threads)


def _arrays(bytes_accessed: int, copies: int) -> list[Array]:
    """Return float32 arrays; scaling one reads and writes `bytes_accessed` bytes together."""
    floats = max(1, bytes_accessed // (2 * _FLOAT_BYTES))
    return [allocate(_FLOAT_BYTES * floats).view(np.float32) for _ in range(copies)]


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _checked_call(row: Row, prepare: Prepare) -> Call | None:
    """Prepare a call, call it once, and check the result if there is a check.

    Returns None if it cannot be timed, with the reason in `row`.
    """
    try:
        call = prepare()
        call.before_sample()
        returned = call.function(*call.argument_sets[0])
        row.bytes_accessed = call.bytes_accessed
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
