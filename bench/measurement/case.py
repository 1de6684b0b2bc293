"""What is timed together: a case, its contenders, and a contender made ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .timing import Effort, nothing


@dataclass(frozen=True)
class Ready:
    """A call that can be timed. bytes_accessed: bytes one call reads and writes, 0 where that means nothing.

    new: whether it returns new memory, whose price varies more than all else from run to run.
    error: takes what a call returned and says how far off it is, in units of what is allowed: above 1 it is wrong.
    """

    function: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    bytes_accessed: int = 0
    error: Callable[[Any], float] | None = None
    enter: Callable[[], object] = nothing  # see Timed
    new: bool = False


@dataclass(frozen=True)
class Contender:
    """One row of a case. bind: gets it ready, or raises UnavailableError.

    role: "ours", "kernel" (part of ours), "peer", "limit" (of the machine), or, to tell a slow machine from slow code,
    "copy" (the same from one array to another), "core" (work in the first cache) or "memory" (taking new memory).
    """

    name: str
    role: str
    bind: Callable[[], Ready]


@dataclass(frozen=True)
class Case:
    """Contenders that are timed together; ratios are to the first. default: a plain run includes it.

    memory: bytes it needs at the most, where that is much.
    """

    name: str
    what: str
    contenders: Callable[[], list[Contender]]
    default: bool = True
    cold: bool = False
    memory: int = 0
    effort: Effort = field(default=Effort())
