"""Outcomes of consumers, measured and expected: expectations.json has what does not just work."""

import json
from dataclasses import dataclass
from pathlib import Path

from .consumers import CONSUMERS
from .exported_files import make_file

EXPECTATIONS = json.loads(Path(__file__).with_name("expectations.json").read_text())
KEYS = ("consumer", "target", "kind", "model")


@dataclass
class Outcome:
    """The largest error, and whether all are within their bounds; or the text of a refusal."""

    error: float = 0.0
    within: bool = False
    refusal: str = ""


def measure(consumer, target, kind, model, seed=0, one_row=False):
    """Return the outcome of a file, with one_row of the first batch row alone."""
    file = make_file(model, target, kind, seed)
    file = file.first_row() if one_row else file
    try:
        results = CONSUMERS[consumer](file.model, file.feeds)
    except Exception as error:  # a runtime may raise anything
        return Outcome(refusal=f"{type(error).__name__}: {error}")
    return Outcome(*file.errors(results))


def expectation(consumer, target, kind, model):
    """Return the first row of expectations.json that fits, {} without one.

    A row has lists of names for some of `KEYS`, and a reason. "refuses": part of the text of an
    error. "error": the results are off by more than rounding, but at most by this much.
    "wrong": they are wrong in silence. "one_row": the same keys for a batch of one row.
    """
    names = dict(zip(KEYS, (consumer, target, kind, model), strict=True))
    for row in EXPECTATIONS:
        if all(name in row.get(key, [name]) for key, name in names.items()):
            return row
    return {}
