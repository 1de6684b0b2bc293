"""When a kernel may run in parallel, and on how many threads: the only state the library has outside its objects.

A child made by fork from a process that had started OpenMP, through Numba or any other library, is killed or hangs when
it launches a parallel kernel; whether one had cannot be found out, so every forked child stays serial. Numba's
workqueue layer aborts the process when two Python threads launch at a time and costs 100 µs a launch, so nothing runs
in parallel on it.
"""

from __future__ import annotations

import os
import time
from typing import Any

import numba

from rope_cpu._compile import Kernel
from rope_cpu.spec import whole_number

VARIABLE = "ROPE_CPU_NUM_THREADS"

# Below these a launch on several threads (3 µs with the wake-up of idle ones) costs more than it saves on two cores:
# elements of q, where 48 tokens of 32 heads take 13 µs serially, and pairs of cos and sin, at 1.3 ns each.
SERIAL_ELEMENTS = 3 * 2**16
SERIAL_PAIRS = 2**14

# Where other processes keep the cores busy, a launch waits until the scheduler has run all its threads, milliseconds at
# a time. A launch that was kept waiting for longer than STALL is a sign of that; kernels then run serially for PAUSE.
STALL_SECONDS = 0.0005
PAUSE_SECONDS = 0.1

_limit = numba.config.NUMBA_NUM_THREADS
_usable: int | None = None  # None: not known before the threading layer has been started
_forked = False
_paused_until = 0.0


def set_num_threads(n: int) -> None:
    """Let rotations use at most `n` threads, in all Python threads of this process; 1 means serial.

    Raises TypeError or ValueError where `n` is no integer from 1 to the number of threads Numba was started with.
    """
    global _limit, _usable
    n = whole_number("n", n)
    if n > numba.config.NUMBA_NUM_THREADS:
        raise ValueError(f"`n` is {n}, but Numba was started with {numba.config.NUMBA_NUM_THREADS} threads")
    _limit, _usable = n, None


def get_num_threads() -> int:
    """Return how many threads rotations may use at most."""
    return int(_limit)


def usable() -> int:
    """Return how many threads a kernel may use now; where it is 1, the serial kernel must run."""
    global _usable
    threads = _usable
    if threads is None:
        threads = _usable = 1 if _limit == 1 or _forked or _layer() not in ("omp", "tbb") else int(_limit)
    return 1 if threads == 1 or time.monotonic() < _paused_until else threads


def run(kernel: Kernel, *arguments: Any) -> int:
    """Run a parallel kernel, and note whether it was kept waiting for other processes."""
    global _paused_until
    wall, busy = time.perf_counter(), time.thread_time()
    status = kernel(*arguments)
    if time.perf_counter() - wall - (time.thread_time() - busy) > STALL_SECONDS:
        _paused_until = time.monotonic() + PAUSE_SECONDS
    return status


def _layer() -> str:
    try:
        numba.get_num_threads()  # starts the layer: 15–30 ms, once
        return str(numba.threading_layer())
    except ValueError:  # the layer asked for by NUMBA_THREADING_LAYER is not there
        return "none"


def _after_fork_in_child() -> None:
    global _forked, _usable
    _forked, _usable = True, None


os.register_at_fork(after_in_child=_after_fork_in_child)

if os.environ.get(VARIABLE):
    try:
        set_num_threads(int(os.environ[VARIABLE]))
    except ValueError as error:
        raise ValueError(f"{VARIABLE} is {os.environ[VARIABLE]!r}; it must be a number of threads: {error}") from None
