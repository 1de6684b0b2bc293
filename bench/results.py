"""A run as data: its environment and its cases, to and from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rope_cpu.arguments.texts import shown

from .latency import Latency
from .measurement.measure import Result, Row

FORMAT = 2

# The keys that are read of each object, and the type of their values; other keys are ignored.
_NUMBER = int, float
_Kinds = Mapping[str, type | tuple[type, ...]]
_RUN: _Kinds = {
    "command": str,
    "model": str,
    "environment": dict,
    "cases": list,
    "latency": list,
    "seconds": _NUMBER,
}
_CASE: _Kinds = {"name": str, "what": str, "rows": list}
_ROW: _Kinds = {
    "name": str,
    "role": str,
    "status": str,
    "reason": str,
    "samples": list,
    "bytes_accessed": int,
    "new": bool,
    "first_call": _NUMBER,
    "error": (*_NUMBER, type(None)),
}
_LATENCY: _Kinds = {"situation": str, "callers": int, "calls": int} | dict.fromkeys(
    ("p50", "p99", "p999", "rate"), _NUMBER
)
_COMPARED_FACTS = ("processor", "cores", "threads")


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
    cases = [
        asdict(case) | {"rows": [asdict(row) | _figures(case, row) for row in case.rows]}
        for case in run.cases
    ]
    text = json.dumps({"format": FORMAT, **asdict(run), "cases": cases}, indent=1, allow_nan=False)
    Path(path).write_text(text + "\n", "utf-8")


def load(path: str | Path) -> Run:
    """Return the run of a file that `save` wrote.

    Raises ValueError where the file holds no such run; OSError where it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {shown(data['format'])}")
        return _run(data)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} holds no run of `rope-cpu bench` in format {FORMAT}: {reason}"
        ) from error


def _run(data: Any) -> Run:
    run = _checked("run", data, _RUN)
    for fact in _COMPARED_FACTS:
        if fact not in run["environment"]:
            raise ValueError(f"its environment lacks {fact!r}")
    run["cases"] = [_case(case) for case in run["cases"]]
    run["latency"] = [Latency(**_checked("latency", row, _LATENCY)) for row in run["latency"]]
    return Run(**run)


def _case(data: Any) -> Result:
    case = _checked("case", data, _CASE)
    case["rows"] = [_row(row) for row in case["rows"]]
    return Result(**case)


def _row(data: Any) -> Row:
    row = Row(**_checked("row", data, _ROW))
    for sample in row.samples:
        if not isinstance(sample, float) or not 0 < sample < math.inf:
            raise ValueError(
                f"a row has the sample {shown(sample)}; it must be a number of seconds"
            )
    if row.status == "timed" and not row.samples:
        raise ValueError("a row was timed, but has no samples")
    return row


def _checked(name: str, data: Any, kinds: _Kinds) -> dict[str, Any]:
    """Return the entries of an object that `kinds` names; raise unless each is there and of its kind."""
    if not isinstance(data, dict):
        raise TypeError(f"a {name} is {shown(data)}; it must be an object")
    for key, kind in kinds.items():
        if not isinstance(data[key], kind):
            raise TypeError(f"a {name} has the {key} {shown(data[key])}, which is of another type")
    return {key: data[key] for key in kinds}


def _figures(case: Result, row: Row) -> dict[str, Any]:
    """Return what is computed from the samples, for readers of the file without rope_cpu."""
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
        if case.limit:
            figures["of_limit"] = 1 / case.ratio(row, case.limit).median
    if case.base and row.role in ("ours", "peer"):
        ratio = case.ratio(row)
        bounded = [ratio.low, ratio.high] if ratio.low > 0 else None
        figures["ratio"] = {
            "median": ratio.median,
            "interval": bounded,
            "meaningless": ratio.meaningless,
        }
    return figures
