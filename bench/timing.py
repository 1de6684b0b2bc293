"""How calls are timed: calibrated loop counts, and rounds with a sample of each in random order."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import ceil
from typing import Any

Clock = Callable[[], float]

# Threads of a pool go on spinning after their work, those of onnxruntime for 30 ms. The next
# contender waits until they sleep. In seconds: one check, and the longest wait.
_IDLE_CHECK = 0.002
_LONGEST_PAUSE = 0.1
# Untimed calls before a sample, in seconds and in number: arrays of some megabytes need about ten
# calls until they are back in a shared cache, and an idle processor needs milliseconds to speed up.
WARM_UP_SECONDS = 0.006
WARM_UP_CALLS = 8
# A longer call needs no warm-up: its arrays fit no cache.
LONG_CALL = 0.01


@dataclass
class Call:
    """A function with its arguments, ready to be timed.

    results: converts what a call returns to the results that the workload checks. None for a part
        of the work: it is not checked, and the bytes of the workload mean nothing for it.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Effort:
    """How long to measure: seconds of one sample and of all rounds, and the least rounds.

    A sample is much shorter than the time slices of an operating system, so that most samples are
    not interrupted on a busy machine, and much longer than a reading of the clock. Fewer than six
    rounds have no interval of 95 % confidence.
    """

    sample: float = 0.0005
    budget: float = 1.0
    rounds: int = 13


def elapsed(call: Call, loops: int, clock: Clock = time.perf_counter) -> float:
    """Return the seconds of `loops` calls together."""
    function = call.function
    repeated = repeat(call.arguments, loops)
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = clock()
        for arguments in repeated:
            function(*arguments)
        return clock() - start
    finally:
        if collecting:
            gc.enable()


def calibrate(call: Call, sample: float, clock: Clock = time.perf_counter) -> tuple[int, float]:
    """Return the number of calls that take about `sample` seconds, and the seconds per call."""
    elapsed(call, 1, clock)
    loops = 1
    seconds = elapsed(call, loops, clock)
    while seconds < sample / 2:
        loops *= 2
        seconds = elapsed(call, loops, clock)
    if seconds < LONG_CALL:  # an interruption can make a short call look long
        repeated = [elapsed(call, loops, clock) for _ in range(2)]
        seconds = min(seconds, *repeated)
    return max(1, round(sample * loops / seconds)), seconds / loops


def warm_up(call: Call, per_call: float, clock: Clock = time.perf_counter) -> None:
    """Make untimed calls, unless they take so long (`per_call` seconds) that they need none."""
    if per_call < LONG_CALL:
        elapsed(call, max(WARM_UP_CALLS, ceil(WARM_UP_SECONDS / per_call)), clock)


def settle(sleep: Callable[[float], object] = time.sleep, busy: Clock = time.process_time) -> None:
    """Wait until no thread of this process is busy."""
    for _ in range(round(_LONGEST_PAUSE / _IDLE_CHECK)):
        before = busy()
        sleep(_IDLE_CHECK)
        if busy() - before < _IDLE_CHECK / 4:
            return


def interleave(
    calls: Sequence[Call],
    effort: Effort,
    clock: Clock = time.perf_counter,
    pause: Callable[[], object] = settle,
) -> list[list[float]]:
    """Return the seconds per call, for each call a value of each round.

    A round takes one sample of each call, in random order, so that drift and other processes affect
    all alike. A sample follows a pause and a few untimed calls. Rounds end when the budget is spent
    and there are enough of them.
    """
    calibrations = [calibrate(call, effort.sample, clock) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    shuffle = random.Random(0)
    start = clock()
    while len(samples[0]) < effort.rounds or clock() - start < effort.budget:
        for index in shuffle.sample(range(len(calls)), len(calls)):
            call = calls[index]
            loops, per_call = calibrations[index]
            pause()
            warm_up(call, per_call, clock)
            samples[index].append(elapsed(call, loops, clock) / loops)
    return samples
