"""What is timed together: a case, its contenders, and a contender made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .timing import Effort, nothing


@dataclass(frozen=True)
class Ready:
    """A call that can be timed.

    bytes_accessed: bytes one call reads and writes, 0 where that means nothing. error: takes what a call returned and
    returns its largest error / tolerance: above 1 it is wrong. enter: see Timed. new: whether it returns new memory,
    the time for which varies more than all else from run to run.
    """

    function: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    bytes_accessed: int = 0
    error: Callable[[Any], float] | None = None
    enter: Callable[[], object] = nothing
    new: bool = False


@dataclass(frozen=True)
class Contender:
    """One row of a case. bind: gets it ready, or raises UnavailableError.

    role: "ours", "peer", "limit" (of the machine), or a further baseline to tell a slow machine from slow code: "copy"
    (the limit from one array to another), "core" (work in the first cache) or "memory" (taking new memory).
    """

    name: str
    role: str
    bind: Callable[[], Ready]


@dataclass(frozen=True)
class Case:
    """Contenders that are timed together; ratios are to the first.

    default: a plain run includes it. cold: see Timed. memory: bytes it needs at the most, where that is much.
    """

    name: str
    what: str
    contenders: Callable[[], list[Contender]]
    default: bool = True
    cold: bool = False
    memory: int = 0
    effort: Effort = field(default=Effort())
