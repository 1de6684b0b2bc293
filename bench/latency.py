"""How long the slowest calls take: a decode step alone, with all cores busy, and from many threads at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.machine import cores

from .models import Model
from .workload import Workload, text_ids

CALLERS = (1, 2, 4, 8, 16, 32, 64)
_WARM_UP = 1000
_PREFILL = 512


@dataclass(frozen=True)
class Latency:
    """Seconds of a call in one situation. callers: Python threads that call at once; rate: calls per second of all."""

    situation: str
    callers: int
    calls: int
    p50: float
    p99: float
    p999: float
    rate: float


def summary(situation: str, taken: list[list[int]], seconds: float) -> Latency:
    """Return the percentiles of the calls of all callers, given in nanoseconds.

    Raises ValueError where there are none.
    """
    calls = np.concatenate(taken)
    p50, p99, p999 = (np.quantile(calls, (0.5, 0.99, 0.999)) / 1e9).tolist()
    return Latency(situation, len(taken), len(calls), p50, p99, p999, len(calls) / seconds)


def latencies(
    model: Model, seconds: float = 1.0, callers: tuple[int, ...] = CALLERS
) -> Iterator[Latency]:
    """Yield the latencies of a plan's call in bfloat16, in place, in each situation for some seconds.

    Of one token: alone, from several callers at once, and with all cores busy. Of a prefill, with all cores busy: on
    one thread and on as many as are in use now.
    """
    for count in callers:
        yield summary(
            "alone" if count == 1 else "callers at once", _calls(model, count, seconds), seconds
        )
    with _busy_cores(cores()):
        yield summary("all cores busy", _calls(model, 1, seconds), seconds)
        threads = rope_cpu.get_num_threads()
        try:
            for n in sorted({1, threads}):
                rope_cpu.set_num_threads(n)
                taken = _calls(model, 1, seconds, _PREFILL)
                yield summary(f"busy, {_PREFILL} tokens, {n} thread{'s'[: n > 1]}", taken, seconds)
        finally:
            rope_cpu.set_num_threads(threads)


def _calls(model: Model, callers: int, seconds: float, tokens: int = 1) -> list[list[int]]:
    """Return the nanoseconds of each call of each caller."""
    rope = model.own
    ids = text_ids(rope, 4096 + np.arange(tokens)[None])
    workload = Workload(rope, ids, model.heads, model.kv_heads, "bfloat16", copies=callers)
    pairs, plan, now = workload.arrays(), rope.plan(ids), time.perf_counter_ns
    for _ in range(_WARM_UP):
        plan(*pairs[0], pairs[0])
    barrier = threading.Barrier(callers)

    def call(pair: tuple[Any, Any]) -> list[int]:
        (q, k), taken = pair, []
        barrier.wait()
        end = now()
        stop = end + int(seconds * 1e9)
        while end < stop:
            start = now()
            plan(q, k, pair)
            end = now()
            taken.append(end - start)
        return taken

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(call, pairs))


@contextmanager
def _busy_cores(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.2)  # they start
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
