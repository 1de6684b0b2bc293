"""A case measured: every contender made ready and checked, then all timed together."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..implementations.base import UnavailableError
from . import statistics
from .case import Case, Contender, Ready
from .statistics import Estimate
from .timing import Effort, Timed, interleave


@dataclass
class Row:
    """One contender's outcome: its samples, or why there are none.

    status: "timed", "skipped" (it cannot run here), "wrong" (it does not compute the rotation) or "failed".
    samples: seconds per call, round by round. first_call: seconds of the first call, compilation included.
    error: largest error / tolerance. bytes_accessed: bytes a call reads and writes. new: whether it returns new memory.
    """

    name: str
    role: str
    status: str = "timed"
    reason: str = ""
    samples: list[float] = field(default_factory=list)
    bytes_accessed: int = 0
    new: bool = False
    first_call: float = 0.0
    error: float | None = None

    @property
    def seconds(self) -> Estimate:
        """Seconds of a call."""
        return statistics.estimate(self.samples)

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes_accessed / self.seconds.median


@dataclass
class Result:
    """A case and what was measured of it."""

    name: str
    what: str
    rows: list[Row] = field(default_factory=list)

    def timed(self, *roles: str) -> list[Row]:
        """Return the rows that were timed, of these roles or of all."""
        return [
            row for row in self.rows if row.status == "timed" and (not roles or row.role in roles)
        ]

    @property
    def base(self) -> Row | None:
        """The row that others are relative to: the first of ours."""
        return next(iter(self.timed("ours")), None)

    @property
    def limit(self) -> Row | None:
        """The limit of the machine: the faster of the ways to scale as many bytes."""
        return min(self.timed("limit"), key=lambda row: row.seconds.median, default=None)

    @property
    def broken(self) -> bool:
        """Whether something of ours is wrong or failed."""
        return any(row.role == "ours" and row.status in ("wrong", "failed") for row in self.rows)

    def ratio(self, row: Row, base: Row | None = None) -> Estimate:
        """Return the time of `row` relative to the base, per byte where both access memory."""
        other = base or self.base
        if other is None:
            raise ValueError(
                f"`row` is {row.name!r} of {self.name}, where nothing of ours was timed"
            )
        scale = (
            other.bytes_accessed / row.bytes_accessed
            if row.bytes_accessed and other.bytes_accessed
            else 1.0
        )
        # Round by round: what disturbs a whole round cancels.
        return statistics.estimate(scale * np.divide(row.samples, other.samples))


def measure(case: Case, effort: Effort | None = None) -> Result:
    """Make a case's contenders ready, check what they compute, time those that are right, and return all of it."""
    result, running = Result(case.name, case.what), []
    for contender in case.contenders():
        row, ready = _first_call(contender)
        result.rows.append(row)
        if ready is not None:
            running.append((row, Timed(ready.function, ready.sets, case.cold, ready.enter)))
    if running:
        samples = interleave([timed for _, timed in running], effort or case.effort)
        for (row, _), taken in zip(running, samples, strict=True):
            row.samples = taken
    return result


def _first_call(contender: Contender) -> tuple[Row, Ready | None]:
    row = Row(contender.name, contender.role)
    try:
        ready = contender.bind()
        start = time.perf_counter()
        ready.enter()
        returned: Any = ready.function(*ready.sets[0])
        row.first_call, row.bytes_accessed, row.new = (
            time.perf_counter() - start,
            ready.bytes_accessed,
            ready.new,
        )
        row.error = None if ready.error is None else ready.error(returned)
    except UnavailableError as reason:
        row.status, row.reason = "skipped", str(reason)
        return row, None
    except Exception as error:  # whatever breaks in a peer must not end the run of the others
        lines = str(error).strip().splitlines()
        row.status, row.reason = "failed", f"{type(error).__name__}: {lines[0] if lines else ''}"
        return row, None
    if row.error is not None and not row.error <= 1:
        row.status, row.reason = (
            "wrong",
            f"its error is {row.error:.3g} times the tolerance; not timed",
        )
        return row, None
    return row, ready
