"""Outcomes of a run, and its environment: rows, results of cases, medians with intervals."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from math import comb, inf
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np

import rope_cpu
from rope_cpu.array_types import Float64
from rope_cpu.machine import caches

CONFIDENCE = 0.95

_PACKAGES = ("rope-cpu", "numpy", "numba", "torch", "jax", "onnx", "onnxruntime")


class Median(NamedTuple):
    """A median, and the interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float


def estimate(values: list[float] | Float64) -> Median:
    """Return the median of noisy values and an interval of 95 % confidence or more.

    The number of values below the true median is binomial(n, ½) for any continuous distribution, so
    order statistics bound it. Fewer than six values leave both sides unbounded.

    Source: H. A. David and H. N. Nagaraja, Order Statistics, 2003, section 7.1.
    """
    ordered = np.sort(values).tolist()
    count = len(ordered)
    outside = 0  # values outside the interval, on either side
    probability = 0.5**count  # that at most `outside` values lie below the true median
    while probability <= (1 - CONFIDENCE) / 2:
        outside += 1
        probability += comb(count, outside) / 2**count
    median = float(np.median(ordered))
    if not outside:
        return Median(median, -inf, inf)
    return Median(median, ordered[outside - 1], ordered[count - outside])


@dataclass
class Timing:
    """The outcome of one call: its samples, or the reason why there are none.

    role: "ours", "peer" or "limit" (of the machine).
    problem: why it was not timed: "skipped" (not available here), "wrong" (not the rotation) or
        "failed", with the reason; "" for a call that was timed.
    samples: seconds per call, round by round. bytes_accessed: 0 where the number means nothing.
    error: largest error / tolerance, None if the result is not checked.
    """

    name: str
    role: str
    problem: str = ""
    samples: list[float] = field(default_factory=list)
    bytes_accessed: int = 0
    error: float | None = None

    @property
    def seconds(self) -> Median:
        """Seconds of a call."""
        return estimate(self.samples)


@dataclass
class Result:
    """The outcome of a case; what: its description."""

    name: str
    what: str
    rows: list[Timing] = field(default_factory=list)

    def timed(self, *roles: str) -> list[Timing]:
        """Return the timed rows of these roles."""
        return [row for row in self.rows if not row.problem and row.role in roles]

    @property
    def base(self) -> Timing | None:
        """The row that ratios are relative to: the first timed row of rope_cpu."""
        return next(iter(self.timed("ours")), None)

    @property
    def limit(self) -> Timing | None:
        """The limit of the machine: the fastest scaling of as many bytes."""
        return min(self.timed("limit"), key=lambda row: row.seconds.median, default=None)

    @property
    def broken(self) -> bool:
        """Whether a row of rope_cpu is wrong or failed."""
        return any(row.role == "ours" and row.problem for row in self.rows)


def ratio(row: Timing, base: Timing) -> Median:
    """Return the time of a row relative to another one of its case.

    Ratios are taken round by round, so that what disturbs a whole round cancels.
    """
    return estimate(np.divide(row.samples, base.samples))


def environment() -> dict[str, Any]:
    """Return the facts that the figures of a run depend on, in types of JSON."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _system_value("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": numba.config.NUMBA_DEFAULT_NUM_THREADS,
        "caches": caches(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "threads": rope_cpu.get_num_threads(),
        "versions": _versions(),
    }


def available_memory() -> float:
    """Return the available memory in bytes, infinity if it is unknown."""
    available = _system_value("/proc/meminfo", "MemAvailable")
    return 1024 * int(available.removesuffix(" kB")) if available else inf


def _system_value(path: str, name: str) -> str:
    """Return the first value of a name in a file of lines `name: value`; "" if there is none."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
