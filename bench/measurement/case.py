"""A case: calls that are timed together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .rows import Row
from .timing import Call, Effort

# An empty row, and the function that prepares its call or raises UnavailableError.
Contender = tuple[Row, Callable[[], Call]]


class UnavailableError(Exception):
    """A call that cannot be timed here; the message is the reason."""


@dataclass(frozen=True)
class Case:
    """Contenders that are timed together; ratios are relative to the first.

    what: a description. contenders: creates them, with their arrays.
    default: whether a run without patterns includes the case. cold: see `Call`.
    memory: upper bound of the bytes needed, 0 if small.
    effort: how long to measure. first_calls: seconds that first calls of compilers take.
    overrun: seconds by which rounds of slow calls exceed the budget of `effort`.
    """

    name: str
    what: str
    contenders: Callable[[], list[Contender]]
    default: bool = True
    cold: bool = False
    memory: int = 0
    effort: Effort = field(default=Effort())
    first_calls: float = 0.0
    overrun: float = 0.0
