"""How long the slowest calls take: a decode step alone, with all cores busy, and from many threads at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import rope_cpu
from rope_cpu.machine import cores

from .models import Model
from .workload import Workload

CALLERS = (1, 2, 4, 8, 16, 32, 64)
_PARTS = (0.5, 0.99, 0.999)
_WARM_UP = 1000
_PREFILL = 512


@dataclass(frozen=True)
class Latency:
    """Seconds of a call in one situation. callers: Python threads that call at a time; rate: calls a second of all."""

    situation: str
    callers: int
    calls: int
    p50: float
    p99: float
    p999: float
    rate: float


def summary(situation: str, taken: list[list[int]], seconds: float) -> Latency:
    """Return what the calls of all callers, in nanoseconds, come to.

    Raises ValueError where there are none.
    """
    calls = [one for caller in taken for one in caller]
    p50, p99, p999 = (np.quantile(calls, _PARTS) / 1e9).tolist()
    return Latency(situation, len(taken), len(calls), p50, p99, p999, len(calls) / seconds)


def latencies(
    model: Model, seconds: float = 1.0, callers: tuple[int, ...] = CALLERS, say: Callable[[str], object] = print
) -> Iterator[Latency]:
    """Yield the latencies of a plan's call in bfloat16, in place, in each situation for some seconds.

    Of one token: alone, from several callers at once, and with all cores busy. Of a prefill, with all cores busy: on
    one thread and on as many as are in use now.
    """
    for count in callers:
        situation = "alone" if count == 1 else "callers at once"
        say(f"latency: {situation}, {count}")
        yield summary(situation, *_calls(model, count, seconds))
    with _busy_cores(cores()):
        say("latency: all cores busy")
        yield summary("all cores busy", *_calls(model, 1, seconds))
        threads = rope_cpu.get_num_threads()
        for n in sorted({1, threads}):
            situation = f"busy, {_PREFILL} tokens, {n} thread{'s'[: n > 1]}"
            say(f"latency: {situation}")
            rope_cpu.set_num_threads(n)
            try:
                taken = _calls(model, 1, seconds, _PREFILL)
            finally:
                rope_cpu.set_num_threads(threads)
            yield summary(situation, *taken)


def _calls(model: Model, callers: int, seconds: float, tokens: int = 1) -> tuple[list[list[int]], float]:
    """Return the nanoseconds of each call of each caller, and the seconds they called for."""
    rope = model.own
    ids = 4096 + np.arange(tokens)[None]
    if rope.axes > 1:  # text, in a model of several axes
        ids = np.repeat(ids[..., None], rope.axes, axis=-1)
    workload = Workload(rope, ids, 1, tokens, model.heads, model.kv_heads, "bfloat16", copies=callers)
    pairs, plan = workload.arrays(), rope.plan(workload.ids)
    barrier = threading.Barrier(callers + 1)

    def call(q: Any, k: Any) -> list[int]:
        out, now, taken = (q, k), time.perf_counter_ns, []
        try:
            for _ in range(_WARM_UP):
                plan(q, k, out)
        except BaseException:
            barrier.abort()  # nobody waits for it any more
            raise
        barrier.wait()
        stop = end = now()
        stop += int(seconds * 1e9)
        while end < stop:
            start = now()
            plan(q, k, out)
            end = now()
            taken.append(end - start)
        return taken

    with ThreadPoolExecutor(callers) as pool:
        running = [pool.submit(call, *pair) for pair in pairs]
        barrier.wait()
        start = time.perf_counter()
        return [one.result() for one in running], time.perf_counter() - start


@contextmanager
def _busy_cores(count: int) -> Iterator[None]:
    """Keep `count` cores busy with other processes."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        if processes:
            time.sleep(0.2)  # they start
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
