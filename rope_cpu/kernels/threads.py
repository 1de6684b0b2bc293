"""On how many threads kernels run: Numba's threads, on TBB where it is installed."""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, files

from numba import config, threading_layer

from rope_cpu.arguments.scalars import whole_number

VARIABLE = "ROPE_CPU_NUM_THREADS"

MOST: int = config.NUMBA_NUM_THREADS  # the cores this process may use, or the variable of that name

# Kernels run on at most so many threads; serially where a parallel launch would end the process, or hang.
limit, serial = MOST, False
_forked_alone = True


@cache
def load_tbb() -> None:
    """Load the TBB that pip installed, where Numba does not look, before a first kernel starts Numba's threads."""
    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name in ("libtbb.so.12", "tbb12.dll"):
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)


def check_layer() -> None:
    """Let kernels be serial on Numba's workqueue, which two Python threads must not use at a time."""
    global serial
    serial = serial or _layer() == "workqueue"


def _before_fork() -> None:
    """Remember whether another thread might be amid a launch, which leaves TBB unusable in the child."""
    global _forked_alone
    _forked_alone = threading.active_count() == 1


def _after_fork() -> None:
    """Let kernels be serial in a child where the threads of its parent's layer cannot be started again."""
    global serial
    serial = serial or _layer() == "omp" or (_layer() == "tbb" and not _forked_alone)


def _layer() -> str | None:
    """Return the name of Numba's threading layer, which a first kernel starts; None before."""
    try:
        return str(threading_layer())
    except ValueError:
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def set_num_threads(n: int) -> None:
    """Let rotations use at most `n` threads, in all Python threads of this process; 1 means serial.

    Raises TypeError or ValueError where `n` is no integer from 1 to the number of cores that this process may use, or
    to the variable NUMBA_NUM_THREADS where it is set.
    """
    global limit
    limit = allowed("n", n)


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
    return limit


if given := os.environ.get(VARIABLE):
    if not given.strip().isdecimal() or int(given) == 0:
        raise ValueError(f"{VARIABLE} is {given!r}; it must be a number of threads, at least 1")
    set_num_threads(
        min(int(given), MOST)
    )  # "at most": the same image starts on a machine of fewer cores
