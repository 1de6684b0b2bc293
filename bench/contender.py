"""What a case lets run against each other, and how each gets ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.bench import limit
from rope_cpu.bench.implementations import BY_NAME
from rope_cpu.bench.problem import Problem
from rope_cpu.bench.timing import Effort, nothing

# Work of fewer bytes is timed on one thread, as small rotations are serial.
_SERIAL_BYTES = 2**18


@dataclass(frozen=True)
class Ready:
    """A call that can be timed. moved: bytes one call reads and writes, 0 where that means nothing.

    new: whether it returns new memory, whose price varies more than all else from run to run.
    error: takes what a call returned and says how far off it is, in units of what is allowed: above 1 it is wrong.
    """

    function: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    moved: int = 0
    error: Callable[[Any], float] | None = None
    enter: Callable[[], object] = nothing  # see Timed
    new: bool = False


@dataclass(frozen=True)
class Contender:
    """One row of a case. bind: gets it ready, or raises UnavailableError.

    role: "ours", "floor" (part of ours), "peer", "limit" (of the machine), or, to tell a slow machine from slow code,
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


def rotating(name: str, problem: Problem, label: str | None = None, threads: int | None = None) -> Contender | None:
    """Return an implementation of the table on a problem, checked against the float64 reference before it is timed.

    threads: how many ours may use; None: as many as now. None is returned for a form of the other pairing.
    """
    implementation = BY_NAME[name]
    if problem.rope.interleaved not in implementation.pairings:
        return None

    def bind() -> Ready:
        binding = implementation.bound(problem)

        def picked(x: Any) -> Any:
            return binding.bshd(x)[:, problem.checked].copy()

        given = [picked(x) for x in binding.inputs]

        def error(returned: Any) -> float:
            results = binding.results(returned)
            return max(
                problem.error(x, picked(y), implementation.arithmetic) for x, y in zip(given, results, strict=True)
            )

        enter = partial(rope_cpu.set_num_threads, threads) if threads else nothing
        return Ready(binding.function, binding.sets, problem.moved, error, enter, implementation.new)

    return Contender((label or name) + _on(threads), implementation.role, bind)


def limits(moved: int, copies: int = 1, threads: Sequence[int] = ()) -> list[Contender]:
    """Return the scaling of as many bytes in place, on one thread and on more: the fastest is the limit; and "core"."""
    shared: list[Any] = []

    def bind(count: int) -> Ready:
        if not shared:
            shared.extend(limit.buffers(moved, copies))
        enter, one = partial(rope_cpu.set_num_threads, count) if count > 1 else nothing, np.ones(1, np.float32)
        return Ready(limit.scale, [(x, x, one, count > 1) for x in shared], moved, enter=enter)

    counts = sorted({1, *(threads or (rope_cpu.get_num_threads(),))})
    rows = [Contender("limit" + _on(count), "limit", partial(bind, count)) for count in counts]
    return [*rows, Contender("scaled in the first cache", "core", partial(_in_cores, moved))]


def _in_cores(moved: int) -> Ready:
    parallel = rope_cpu.get_num_threads() > 1 and moved > _SERIAL_BYTES
    return Ready(limit.scale_in_cores, [(limit.core_buffer(), np.ones(1, np.float32), parallel)])


def copy(moved: int, copies: int = 1) -> Contender:
    """Return the scaling of as many bytes from one array to another, which takes twice the room in the caches."""
    parallel, one = rope_cpu.get_num_threads() > 1, np.ones(1, np.float32)

    def bind() -> Ready:
        pairs = zip(limit.buffers(moved, copies), limit.buffers(moved, copies), strict=True)
        return Ready(limit.scale, [(x, out, one, parallel) for x, out in pairs], moved)

    return Contender("scaled into another array", "copy", bind)


def memory(size: int) -> Contender:
    """Return the taking and touching of `size` bytes of new memory: what calls that return new arrays do besides."""
    parallel = rope_cpu.get_num_threads() > 1
    sets = [(size // 4, np.ones(1, np.float32), parallel)]
    return Contender("new memory", "memory", lambda: Ready(limit.scale_new, sets, size))


def _on(threads: int | None) -> str:
    return "" if threads is None else f", {threads} thread{'s'[: threads > 1]}"
