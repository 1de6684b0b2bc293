"""On how many threads kernels run: the only state the library has outside its objects.

The threads are our own, see `_kernels.sharing`. They are started when a large array is first met, in every process
anew: a forked child, which has none of its parent's threads, starts its own.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rope_cpu import _machine
from rope_cpu._kernels import sharing
from rope_cpu._kernels.loading import for_ever
from rope_cpu.spec import whole_number

# Enough to be measured, 10 to 100 µs.
_MEASURED_LOOKS = 2000

VARIABLE = "ROPE_CPU_NUM_THREADS"


def _most() -> int:
    """Return how many threads there may be: one for each core, as more would take turns, or what Numba's variable says.

    That is read here, as a process that finds its kernels in the cache does without Numba.
    """
    said = os.environ.get("NUMBA_NUM_THREADS", "").strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return _machine.cores()


MOST = _most()

_limit = MOST
_pool_in_use: Pool | None = None
# What kernels see of it: its address, 0 where they must not share their work, −1 where it is not started.
IN_USE = for_ever(np.array([0 if _limit == 1 else -1], np.int64))
_starting = threading.Lock()


@dataclass(frozen=True)
class Pool:
    """Threads that share the work of kernels. words: what they know of each other. address: where that stands."""

    words: NDArray[np.int64]
    address: int

    @property
    def size(self) -> int:
        """How many threads there are, the caller included."""
        return int(self.words[sharing.SIZE // 8])

    def use(self, threads: int) -> None:
        """Let jobs be shared by at most so many threads, the caller included."""
        self.words[sharing.THREADS // 8] = min(threads, self.size)


def start(threads: int) -> Pool:
    """Start a pool of so many threads, the caller included; of fewer where the system allows no more."""
    memory = for_ever(np.zeros(sharing.HEAD_WORDS + sharing.THREAD_WORDS * threads + 8, np.int64))
    words = memory[-(memory.ctypes.data // 8) % 8 :]
    pool, kernel = Pool(words, words.ctypes.data), sharing.serving().call
    words[sharing.SIZE // 8], words[sharing.SHARE // 8] = 1, sharing.sharing().address
    _set_looks(pool, kernel)
    for me in range(1, threads):
        own = words[sharing.HEAD_WORDS + sharing.THREAD_WORDS * me :]
        own[sharing.LOCK // 8] = _locked()
        worker = threading.Thread(target=kernel, args=(pool.address, me), daemon=True, name=f"rope_cpu {me}")
        try:
            worker.start()
        except RuntimeError:  # no more threads
            break
        own[sharing.NATIVE // 8] = worker.native_id or 0
        words[sharing.SIZE // 8] += 1
    pool.use(threads)
    return pool


def _set_looks(pool: Pool, kernel: Callable[[int, int], object]) -> None:
    """Measure how often a worker may look for a job before it sleeps: the caller does so in vain, three times."""
    pool.words[sharing.LOOKS // 8] = _MEASURED_LOOKS
    looks = _MEASURED_LOOKS * sharing.IDLE_SECONDS / _machine.seconds(lambda: kernel(pool.address, 0), 3)
    pool.words[sharing.LOOKS // 8] = np.clip(looks, 100, 100_000)


def _locked() -> int:
    """Return the address of a new lock of CPython's that is held."""
    allocate, acquire = ctypes.pythonapi.PyThread_allocate_lock, ctypes.pythonapi.PyThread_acquire_lock
    allocate.restype, acquire.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_int)
    lock = allocate()
    acquire(lock, 1)
    return int(lock)


def pool() -> int:
    """Return the address of the pool that kernels share their work in now, or 0 where they must not."""
    at = int(IN_USE[0])
    return _started() if at < 0 else at


def _started() -> int:
    with _starting:
        if _pool_in_use is None:
            _use(start(_limit), _limit)
        return int(IN_USE[0])


def _use(pool: Pool | None, limit: int) -> None:
    global _pool_in_use, _limit
    _pool_in_use, _limit = pool, limit
    IN_USE[0] = 0 if limit == 1 else -1 if pool is None else pool.address


def set_num_threads(n: int) -> None:
    """Let rotations use at most `n` threads, in all Python threads of this process; 1 means serial.

    Raises TypeError or ValueError where `n` is no integer from 1 to the number of cores that this process may use, or
    to what the variable NUMBA_NUM_THREADS says instead.
    """
    n = allowed("n", n)
    with _starting:
        if _pool_in_use is None or n > _pool_in_use.size:
            _use(None, n)  # a larger one is started when it is needed; the threads of this one sleep on
        else:
            _pool_in_use.use(n)
            _use(_pool_in_use, n)


def allowed(name: str, value: object) -> int:
    """Return a number of threads; raise unless there may be so many."""
    number = whole_number(name, value)
    if number > MOST:
        raise ValueError(
            f"`{name}` is {number}; it must be at most {MOST}, the cores this process may use (or NUMBA_NUM_THREADS)"
        )
    return number


def get_num_threads() -> int:
    """Return how many threads rotations may use at most."""
    return int(_limit)


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.Lock()
    _use(None, _limit)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _from_environment() -> None:
    said = os.environ.get(VARIABLE)
    if not said:
        return
    if not said.strip().isdecimal() or int(said) == 0:
        raise ValueError(f"{VARIABLE} is {said!r}; it must be a number of threads, at least 1")
    set_num_threads(min(int(said), MOST))  # "at most": the same image starts on a machine of fewer cores


_from_environment()
