"""`--set NAME=VALUE` of `rope-cpu export`: departures from a model on purpose."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rope_cpu.arguments.texts import shown
from rope_cpu.command_line import UsageError
from rope_cpu.configs.attention_facts import Attention


def _limit(kind: type[int] | type[float], text: str) -> int | float | None:
    """Return a number from 0 on; None for 0, which is no limit."""
    number = kind("0" if text == "none" else text)
    if not 0 <= number < math.inf:
        raise ValueError
    return number or None


def _factor(text: str) -> float | None:
    number = None if text == "none" else float(text)
    if number is not None and not 0 < number < math.inf:
        raise ValueError
    return number


def _none(text: str) -> None:
    if text != "none":
        raise ValueError


# Parts of a model's attention that can be left out, which are fields of `Attention`.
OPTIONAL_PARTS = ("sinks", "qk_norm", "v_norm", "chunk", "query_scale", "other")

# Names for --set: the values that they take, for error texts, and the function that reads one.
NAMES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "window": ("a number of keys or none", partial(_limit, int)),
    "softcap": ("a number above 0, or none", partial(_limit, float)),
    "scale": ("a number above 0, or none for head_dim^-½", _factor),
}
NAMES |= dict.fromkeys(OPTIONAL_PARTS, ("none", _none))


def read_departures(settings: Sequence[str]) -> dict[str, Any]:
    """Return {name: value} from the values of all --set; raise UsageError if one is wrong."""
    departures: dict[str, Any] = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in NAMES:
            raise UsageError(f"--set is {shown(text)}; its name must be one of {', '.join(NAMES)}")
        if name in departures:
            raise UsageError(f"--set {name} is given twice; give it once")
        rule, read = NAMES[name]
        try:
            departures[name] = read(value)
        except ValueError:
            raise UsageError(
                f"--set is {shown(text)}; the value of {name} must be {rule}"
            ) from None
    return departures


def changed(facts: Attention, departures: Mapping[str, Any]) -> Attention:
    """Return the facts of a model's attention, changed by --set.

    Raises UsageError for a part that is left out, but that the model does not have.
    """
    for name, value in departures.items():
        own = getattr(facts, name)
        if not own and not value:
            raise UsageError(f"--set {name} is none, but the model has no {name}; drop it")
        empty: Any = False if isinstance(own, bool) else None
        facts = replace(facts, **{name: value or empty})
    return replace(facts, window_in_all_layers=True) if "window" in departures else facts
