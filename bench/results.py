"""A run as data: its environment and its cases, to and from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .latency import Latency
from .measurement.measure import Result, Row

FORMAT = 2


@dataclass
class Run:
    """One run of the benchmarks."""

    command: str
    model: str
    environment: dict[str, Any]
    cases: list[Result] = field(default_factory=list)
    latency: list[Latency] = field(default_factory=list)
    seconds: float = 0.0


def save(run: Run, path: str | Path) -> None:
    """Write a run as JSON: every sample, and the figures computed from them."""
    cases = [asdict(case) | {"rows": [asdict(row) | _figures(case, row) for row in case.rows]} for case in run.cases]
    text = json.dumps({"format": FORMAT, **asdict(run), "cases": cases}, indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", "utf-8")


def load(path: str | Path) -> Run:
    """Return the run of a file that `save` wrote.

    Raises ValueError where the file holds no such run; OSError where it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {data['format']!r}")
        return _run(data)
    except (ValueError, TypeError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} holds no run of `rope-cpu bench` in format {FORMAT}: {reason}") from error


def _run(data: dict[str, Any]) -> Run:
    stored = {field.name for field in fields(Row)}  # `save` adds figures to them
    cases = []
    for case in data["cases"]:
        rows = [Row(**{name: value for name, value in row.items() if name in stored}) for row in case["rows"]]
        cases.append(Result(case["name"], case["what"], rows))
    latency = [Latency(**row) for row in data["latency"]]
    return Run(data["command"], data["model"], data["environment"], cases, latency, data["seconds"])


def _figures(case: Result, row: Row) -> dict[str, Any]:
    """Return what is computed from the samples, for readers of the file without rope_cpu."""
    if row.status != "timed":
        return {}
    seconds = row.seconds
    figures: dict[str, Any] = {
        "seconds": {"median": seconds.median, "quartiles": [seconds.lower_quartile, seconds.upper_quartile]},
    }
    if row.bytes_accessed:
        figures["gb_per_s"] = row.rate / 1e9
        if case.limit:
            figures["of_limit"] = 1 / case.ratio(row, case.limit).median
    if case.base and row.role in ("ours", "peer"):
        ratio = case.ratio(row)
        bounded = [ratio.low, ratio.high] if ratio.low > 0 else None
        figures["ratio"] = {"median": ratio.median, "interval": bounded, "meaningless": ratio.meaningless}
    return figures
