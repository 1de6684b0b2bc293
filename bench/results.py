"""A run as data, with its environment and the results of its cases: to and from JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rope_cpu.arguments.texts import escaped, shown

from .measurement.rows import Result, Row

FORMAT = 2

# The keys that are read of each object, with the types of their values; other keys, such as those
# of older versions, are ignored.
_Types = Mapping[str, type | tuple[type, ...]]
_NUMBER = (int, float)
_RUN: _Types = {
    "command": str,
    "model": str,
    "environment": dict,
    "cases": list,
    "seconds": _NUMBER,
}
_CASE: _Types = {"name": str, "what": str, "rows": list}
_ROW: _Types = {
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
_ENVIRONMENT: _Types = {
    "processor": str,
    "cores": int,
    "threads": int,
    "time": str,
    "governor": str,
    "caches": dict,
    "load": (*_NUMBER, type(None)),
    "python": str,
    "versions": dict,
}
# Facts of the environment that make timings of two runs comparable.
FACTS_OF_MACHINE = ("processor", "cores", "threads")
ALL_FACTS = tuple(_ENVIRONMENT)


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


def load(path: str | Path, facts: Sequence[str] = FACTS_OF_MACHINE) -> Run:
    """Return the run in a file written by `save`.

    facts: those that its environment must have, `ALL_FACTS` to show the run.
    Raises ValueError if the file holds no such run, OSError if it cannot be read.
    """
    try:
        data = _escaped(json.loads(Path(path).read_text("utf-8")))
        if data["format"] != FORMAT:
            raise ValueError(f"its format is {shown(data['format'])}")
        return _run(data, facts)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path} is not a file of `rope-cpu bench --json` in format {FORMAT}: {reason}"
        ) from error


def _escaped(data: Any) -> Any:
    """Return data with escapes in all texts: they go to tables and pictures."""
    if isinstance(data, str):
        return escaped(data)
    if isinstance(data, list):
        return [_escaped(entry) for entry in data]
    if isinstance(data, dict):
        return {_escaped(key): _escaped(value) for key, value in data.items()}
    return data


def _run(data: Any, facts: Sequence[str]) -> Run:
    values = _checked("run", data, _RUN)
    types = {fact: _ENVIRONMENT[fact] for fact in facts}
    _checked("environment", values["environment"], types)
    values["cases"] = [_case(case) for case in values["cases"]]
    return Run(**values)


def _case(data: Any) -> Result:
    values = _checked("case", data, _CASE)
    values["rows"] = [_row(row) for row in values["rows"]]
    return Result(**values)


def _row(data: Any) -> Row:
    row = Row(**_checked("row", data, _ROW))
    for sample in row.samples:
        if not isinstance(sample, float) or not 0 < sample < math.inf:
            raise ValueError(f"a row has the sample {shown(sample)}; it must be seconds above 0")
    if row.status == "timed" and not row.samples:
        raise ValueError("a row was timed, but has no samples")
    return row


def _checked(name: str, data: Any, types: _Types) -> dict[str, Any]:
    """Return the entries of an object that `types` lists; raise unless each is there and valid."""
    if not isinstance(data, dict):
        raise TypeError(f"a {name} is {shown(data)}; it must be an object")
    for key, expected in types.items():
        if not isinstance(data[key], expected):
            raise TypeError(f"a {name} has the {key} {shown(data[key])}, which is of another type")
    return {key: data[key] for key in types}
