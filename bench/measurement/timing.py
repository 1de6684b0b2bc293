"""How calls are timed: loop counts calibrated, contenders interleaved round by round, in an order that changes."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice, repeat
from math import ceil
from statistics import median, median_high
from typing import Any

Clock = Callable[[], float]

# Threads of a pool go on spinning for a while after their work, onnxruntime's for 30 ms; the next contender waits until
# they sleep, but not for ever. Seconds of one check, and of all.
_CHECK, _PATIENCE = 0.002, 0.1
# Untimed calls before a sample, in seconds and at the least: arrays of some megabytes need about ten calls until they
# have their place in a shared cache again, and a processor that slept needs milliseconds until it is as fast as before.
WARM_UP, WARM_UP_CALLS = 0.006, 8
# Rounds there always are; how many times its budget a measurement may take where calls are slow or interrupted.
_FEWEST, _OVERRUN = 5, 3.0
# Samples that the speed of arrays in one place of memory is judged by.
_SAMPLES_PER_PLACE = 3
# A call longer than this needs no warm-up: its arrays fit no cache.
LONG_CALL = 0.01


def nothing() -> None:
    """Do nothing before a sample."""


@dataclass
class Timed:
    """A call to time: a function, and sets of arguments that mean the same work on arrays of their own.

    cold: each call takes the next set, so that many sets are met outside the caches; otherwise all calls take the same.
    enter: called before each sample, untimed (sets the number of threads).
    """

    function: Callable[..., object]
    sets: Sequence[tuple[Any, ...]]
    cold: bool = False
    enter: Callable[[], object] = nothing
    arguments: Iterator[tuple[Any, ...]] = field(init=False)

    def __post_init__(self) -> None:
        """Start with the first set."""
        self.arguments = cycle(self.sets) if self.cold else repeat(self.sets[0])


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of one sample, seconds of all rounds together, and how many rounds.

    A sample is much shorter than the time slices of an operating system, so that most samples are not interrupted on a
    busy machine, and much longer than a reading of the clock.
    """

    sample: float = 0.0005
    budget: float = 1.0
    least: int = 13
    most: int = 101


def elapsed(timed: Timed, loops: int, clock: Clock = time.perf_counter) -> float:
    """Return the seconds that `loops` calls take together."""
    function, arguments = timed.function, islice(timed.arguments, loops)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for these in arguments:
            function(*these)
        return clock() - start
    finally:
        if collecting:
            gc.enable()


def calibrate(timed: Timed, sample: float, clock: Clock = time.perf_counter) -> tuple[int, float]:
    """Return how many calls make a sample of about `sample` seconds, and the seconds a call takes."""
    timed.enter()
    elapsed(timed, 1, clock)
    loops = 1
    while (seconds := elapsed(timed, loops, clock)) < sample / 2:
        loops *= 2
    if seconds < LONG_CALL:  # an interruption must not pass for a long call
        seconds = min(seconds, *(elapsed(timed, loops, clock) for _ in range(2)))
    return max(1, round(sample * loops / seconds)), seconds / loops


def warm_up(timed: Timed, per_call: float, clock: Clock = time.perf_counter) -> None:
    """Make untimed calls, unless calls of `per_call` seconds need none."""
    if per_call < LONG_CALL:
        elapsed(timed, max(WARM_UP_CALLS, ceil(WARM_UP / per_call)), clock)


def choose_place(
    timed: Timed, loops: int, per_call: float, clock: Clock = time.perf_counter
) -> None:
    """Let all calls take the set of arguments of median speed.

    Where arrays happen to lie in memory makes a call a few per cent faster or slower, rarely twice as slow. A new set
    for every round would be as fair, but a shared cache takes hundreds of calls until it holds megabytes as well as
    it can, and the sets would push each other out of it.
    """
    if timed.cold or len(timed.sets) == 1:
        return
    seconds: list[float] = []
    timed.enter()
    for arguments in timed.sets:
        timed.arguments = repeat(arguments)
        warm_up(timed, per_call, clock)
        seconds.append(median(elapsed(timed, loops, clock) for _ in range(_SAMPLES_PER_PLACE)))
    timed.arguments = repeat(timed.sets[seconds.index(median_high(seconds))])


def settle(sleep: Callable[[float], object] = time.sleep, busy: Clock = time.process_time) -> None:
    """Wait until no thread of this process is busy."""
    for _ in range(round(_PATIENCE / _CHECK)):
        before = busy()
        sleep(_CHECK)
        if busy() - before < _CHECK / 4:
            return


def interleave(
    contenders: Sequence[Timed],
    effort: Effort,
    clock: Clock = time.perf_counter,
    pause: Callable[[], object] = settle,
) -> list[list[float]]:
    """Return seconds per call of each contender in each round.

    A round takes one sample of each, in random order, so that drift and other processes affect all alike. A sample
    follows a pause and a few untimed calls, on arrays in a place of median speed. Rounds end when the budget is spent
    and there are enough, or when it is spent several times over.
    """
    plans = [(timed, *calibrate(timed, effort.sample, clock)) for timed in contenders]
    for plan in plans:
        choose_place(*plan, clock)
    samples: list[list[float]] = [[] for _ in contenders]
    draw, start = random.Random(0), clock()
    while not _enough(effort, len(samples[0]), clock() - start):
        for n in draw.sample(range(len(plans)), len(plans)):
            timed, loops, per_call = plans[n]
            pause()
            timed.enter()
            warm_up(timed, per_call, clock)
            samples[n].append(elapsed(timed, loops, clock) / loops)
    return samples


def _enough(effort: Effort, rounds: int, spent: float) -> bool:
    if rounds < min(_FEWEST, effort.least):
        return False
    wanted = effort.budget if rounds >= effort.least else _OVERRUN * effort.budget
    return rounds >= effort.most or spent >= wanted
