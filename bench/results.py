"""Outcomes of a run, with its environment: rows, results of cases, the run, and its JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from math import comb, inf
from pathlib import Path
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.array_types import Float64
from rope_cpu.machine import caches

FORMAT = 3

CONFIDENCE = 0.95

# A median is meaningless if the upper end of its interval exceeds so many times the lower end.
MEANINGLESS = 1.5

_PACKAGES = ("rope-cpu", "numpy", "numba", "torch", "jax", "onnxruntime")


@dataclass(frozen=True)
class MedianEstimate:
    """A median with its quartiles, and with an interval of 95 % confidence."""

    median: float
    lower_quartile: float
    upper_quartile: float
    low: float
    high: float

    @property
    def meaningless(self) -> bool:
        """Whether noise leaves the median undetermined."""
        return self.low <= 0 or self.high > MEANINGLESS * self.low


def estimate(values: list[float] | Float64) -> MedianEstimate:
    """Return the median of noisy values, its quartiles and its interval."""
    lower_quartile, median, upper_quartile = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return MedianEstimate(median, lower_quartile, upper_quartile, *interval(values))


def interval(values: list[float] | Float64) -> tuple[float, float]:
    """Return an interval that holds the median of the distribution with 95 % confidence or more.

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
    if not outside:
        return -inf, inf
    return ordered[outside - 1], ordered[count - outside]


@dataclass
class Timing:
    """The outcome of one call: its samples, or the reason why there are none.

    role: "ours", "peer" or "limit" (of the machine).
    status: "timed", "skipped" (not available here), "wrong" (not the rotation) or "failed".
    samples: seconds per call, round by round. bytes_accessed: see `Call`.
    error: largest error / tolerance, None if the result is not checked.
    """

    name: str
    role: str
    status: str = "timed"
    reason: str = ""
    samples: list[float] = field(default_factory=list)
    bytes_accessed: int = 0
    error: float | None = None

    @property
    def seconds(self) -> MedianEstimate:
        """Seconds of a call."""
        return estimate(self.samples)


@dataclass
class Result:
    """The outcome of a case; what: its description."""

    name: str
    what: str
    rows: list[Timing] = field(default_factory=list)

    def timed(self, *roles: str) -> list[Timing]:
        """Return the timed rows of these roles; without roles, all timed rows."""
        return [
            row for row in self.rows if row.status == "timed" and (not roles or row.role in roles)
        ]

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
        return any(row.role == "ours" and row.status in ("wrong", "failed") for row in self.rows)


def ratio(row: Timing, base: Timing) -> MedianEstimate:
    """Return the time of a row relative to another one of its case.

    Ratios are taken round by round, so that what disturbs a whole round cancels.
    """
    return estimate(np.divide(row.samples, base.samples))


@dataclass
class Run:
    """One run of the benchmarks. model: whose shapes were timed."""

    model: str
    environment: dict[str, Any]
    cases: list[Result] = field(default_factory=list)


def environment() -> dict[str, Any]:
    """Return the facts that the figures of a run depend on, in types of JSON."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": _cores(),
        "caches": caches(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "threads": rope_cpu.get_num_threads(),
        "versions": _versions(),
    }


def _cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine(environment: Mapping[str, Any]) -> str:
    """Return the machine of an environment in words."""
    cores = "1 core" if environment["cores"] == 1 else f"{environment['cores']} cores"
    return f"{environment['processor']}, {cores}, {environment['threads']} in use"


def available_memory() -> float:
    """Return the available memory in bytes, infinity if it is unknown."""
    available = _system_value("/proc/meminfo", "MemAvailable")
    return 1024 * int(available.removesuffix(" kB")) if available else inf


def _processor() -> str:
    name = _system_value("/proc/cpuinfo", "model name")
    return name or platform.processor() or platform.machine()


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


def save(run: Run, path: str | Path) -> None:
    """Write a run with every sample as JSON."""
    text = json.dumps({"format": FORMAT, **asdict(run)}, indent=1, allow_nan=False)
    Path(path).write_text(f"{text}\n", "utf-8")
