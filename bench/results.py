"""Outcomes of a run: the row of a call, the result of a case, the run; to and from JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import statistics
from .statistics import Estimate

FORMAT = 2


@dataclass
class Row:
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


@dataclass
class Run:
    """One run of the benchmarks; seconds: how long it took."""

    command: str
    model: str
    environment: dict[str, Any]
    cases: list[Result] = field(default_factory=list)
    seconds: float = 0.0


def save(run: Run, path: str | Path) -> None:
    """Write a run as JSON: every sample, and the figures computed from them."""
    data = {"format": FORMAT, **asdict(run)}
    data["cases"] = [_case_data(case) for case in run.cases]
    text = json.dumps(data, indent=1, allow_nan=False)
    Path(path).write_text(f"{text}\n", "utf-8")


def _case_data(case: Result) -> dict[str, Any]:
    data = asdict(case)
    data["rows"] = [{**asdict(row), **_figures(case, row)} for row in case.rows]
    return data


def _figures(case: Result, row: Row) -> dict[str, Any]:
    """Return figures computed from the samples, for readers of the file without rope_cpu."""
    if row.status != "timed":
        return {}
    seconds = row.seconds
    figures: dict[str, Any] = {
        "seconds": {
            "median": seconds.median,
            "quartiles": [seconds.lower_quartile, seconds.upper_quartile],
        },
    }
    if row.bytes_accessed:
        figures["gb_per_s"] = row.rate / 1e9
        if case.limit is not None:
            figures["of_limit"] = 1 / case.ratio(row, case.limit).median
    if case.base is not None and row.role in ("ours", "peer"):
        ratio = case.ratio(row)
        figures["ratio"] = {
            "median": ratio.median,
            "interval": [ratio.low, ratio.high] if ratio.low > 0 else None,
            "meaningless": ratio.meaningless,
        }
    return figures


def load_medians(path: str | Path) -> dict[tuple[str, str], float]:
    """Return the median seconds of each timed case and row in a file written by `save`.

    Raises ValueError if the file holds no such run, OSError if it cannot be read.
    """
    text = Path(path).read_bytes()
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError("its format is another one")
        medians = {
            (case["name"], row["name"]): float(row["seconds"]["median"])
            for case in data["cases"]
            for row in case["rows"]
            if row["status"] == "timed"
        }
        if not all(0 < seconds < math.inf for seconds in medians.values()):
            raise ValueError("a median is not a number of seconds above 0")
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a file of `rope-cpu bench --json` in format {FORMAT}: "
            f"{type(error).__name__}"
        ) from error
    return medians
