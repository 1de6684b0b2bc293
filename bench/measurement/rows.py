"""Outcomes: the row of one call, and the result of a case with all its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from . import statistics
from .statistics import Estimate


@dataclass
class Row:
    """The outcome of one call: its samples, or the reason why there are none.

    role: "ours", "peer", "limit" (of the machine), or a baseline that tells a slow machine from
        slow code: "copy" (the limit from one array to another), "core" (work in the first cache)
        or "memory" (allocation).
    status: "timed", "skipped" (not available here), "wrong" (not the rotation) or "failed".
    samples: seconds per call, round by round. bytes_accessed, new: see bytes_accessed and allocates
        of `Call`. first_call: seconds of the first call, compilation included.
    error: largest error / tolerance, None if the result is not checked.
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
    """The outcome of a case; what: its description."""

    name: str
    what: str
    rows: list[Row] = field(default_factory=list)

    def timed(self, *roles: str) -> list[Row]:
        """Return the timed rows of these roles; without roles, all timed rows."""
        return [
            row for row in self.rows if row.status == "timed" and (not roles or row.role in roles)
        ]

    @property
    def base(self) -> Row | None:
        """The row that ratios are relative to: the first timed row of rope_cpu."""
        return next(iter(self.timed("ours")), None)

    @property
    def limit(self) -> Row | None:
        """The limit of the machine: the fastest scaling of as many bytes."""
        return min(self.timed("limit"), key=lambda row: row.seconds.median, default=None)

    @property
    def broken(self) -> bool:
        """Whether a row of rope_cpu is wrong or failed."""
        return any(row.role == "ours" and row.status in ("wrong", "failed") for row in self.rows)

    def ratio(self, row: Row, base: Row | None = None) -> Estimate:
        """Return the time of `row` relative to `base` (default: `self.base`).

        It is per byte if both rows access memory. Ratios are taken round by round, so that what
        disturbs a whole round cancels.
        """
        divisor = base or self.base
        if divisor is None:
            raise ValueError(f"`row` is {row.name!r} of {self.name}, which has no timed base row")
        scale = 1.0
        if row.bytes_accessed and divisor.bytes_accessed:
            scale = divisor.bytes_accessed / row.bytes_accessed
        return statistics.estimate(scale * np.divide(row.samples, divisor.samples))
