"""The threads of kernels: those of Numba, on TBB where it is installed."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, files

from numba import config, threading_layer

from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.scalars import whole_number
from rope_cpu.arguments.texts import shown

VARIABLE = "ROPE_CPU_NUM_THREADS"

# The values of NUMBA_THREADING_LAYER.
_LAYERS = ("default", "safe", "threadsafe", "forksafe", "tbb", "omp", "workqueue")

# The number of cores this process may use, or the value of NUMBA_NUM_THREADS.
MAX_THREADS: int = config.NUMBA_NUM_THREADS

# With one thread, kernels are compiled without `prange`, and no threading layer is loaded.
PARALLEL = MAX_THREADS > 1

# limit: maximum number of threads of a kernel. serial: forces one thread where a parallel launch
# would crash or deadlock (workqueue layer; some forked children).
limit = MAX_THREADS
serial = False
_forked_alone = True

_variables_are_read = False
_reading = threading.Lock()


@cache
def load_tbb() -> None:
    """Load the TBB that pip installed, before the first kernel starts Numba's threads.

    Numba does not look where pip installs it.
    """
    if not PARALLEL:
        return
    with suppress(PackageNotFoundError, OSError):
        for file in files("tbb") or ():
            if file.name in ("libtbb.so.12", "tbb12.dll"):
                ctypes.CDLL(str(file.locate()), mode=ctypes.RTLD_GLOBAL)


def check_layer() -> None:
    """Force one thread on the workqueue layer, which Python threads must not use at once."""
    global serial
    serial = serial or _layer() == "workqueue"


@atexit.register
def _keep_tbb() -> None:
    """Keep Numba from unloading TBB at exit, by a reference to its module that is never released.

    Numba waits there for a task that it gave TBB at the start, and for TBB's worker threads. It
    waits for ever where TBB has no worker that takes the task over from a thread that has ended
    (one CPU, by affinity or by quota), and in children of a fork, which have none of the workers
    that their parent started from another thread (numba#10556). The end of the process ends the
    workers.
    """
    module = sys.modules.get("numba.np.ufunc.tbbpool")
    if module is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))


def _before_fork() -> None:
    """Remember whether other Python threads exist.

    A fork during a launch of one of them leaves TBB unusable in the child.
    """
    global _forked_alone
    _forked_alone = threading.active_count() == 1


def _after_fork() -> None:
    """Force one thread in a child that cannot start the threads of its parent's layer again."""
    global serial, _reading
    _reading = threading.Lock()  # another thread of the parent may hold the old one
    layer = _layer()
    unusable = layer == "omp" or (layer == "tbb" and not _forked_alone)
    serial = serial or unusable


def _layer() -> str | None:
    """Return the name of Numba's threading layer; None before the first kernel starts it."""
    try:
        return str(threading_layer())
    except ValueError:
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def set_num_threads(n: int) -> None:
    """Set the maximum number of threads that rotations use, for all Python threads of this process.

    Parameters
    ----------
    n : int
        From 1, which means serial, to the number of cores this process may use, or to the value of
        the environment variable NUMBA_NUM_THREADS.

    Raises
    ------
    TypeError, ValueError
        If `n` is not an integer in this range, or as `get_num_threads`.

    Examples
    --------
    >>> import rope_cpu
    >>> usual = rope_cpu.get_num_threads()
    >>> rope_cpu.set_num_threads(1)
    >>> rope_cpu.get_num_threads()
    1
    >>> rope_cpu.set_num_threads(usual)
    """
    global limit
    read_variables()
    number = whole_number("n", n)
    if number > MAX_THREADS:
        cores = "the number of cores this process may use or the value of NUMBA_NUM_THREADS"
        raise ArgumentError("n", number, f"be at most {MAX_THREADS}, {cores}")
    limit = number


def get_num_threads() -> int:
    """Return the maximum number of threads that rotations use.

    Returns
    -------
    n : int
        The argument of `set_num_threads`, or the first of the environment variables
        ROPE_CPU_NUM_THREADS, NUMBA_NUM_THREADS and OMP_NUM_THREADS that is set. By default the
        number of cores this process may use.

    Raises
    ------
    ValueError
        If ROPE_CPU_NUM_THREADS or NUMBA_THREADING_LAYER is set and wrong.

    Examples
    --------
    >>> import rope_cpu
    >>> rope_cpu.get_num_threads() >= 1
    True
    """
    read_variables()
    return limit


def read_variables() -> None:
    """Check and apply the environment variables, before the first use of kernels or of the limit.

    A number above the cores is cut to them, so that one container image starts on every machine.
    Raises ValueError if a variable is wrong, as Numba would when the first kernel is loaded.
    """
    global limit, _variables_are_read
    with _reading:
        if not _variables_are_read:
            limit = _limit_of_variables()
            _variables_are_read = True


def _limit_of_variables() -> int:
    """Return the number of threads by the environment variables; raise if one is wrong."""
    layer = str(config.THREADING_LAYER)
    if layer.lower() not in _LAYERS:
        raise ValueError(
            f"NUMBA_THREADING_LAYER is {shown(layer)}; it must be one of {', '.join(_LAYERS)}, or "
            "unset"
        )
    digits = _digits_of_variables()
    if not digits:
        return MAX_THREADS
    return min(int(digits[:20]), MAX_THREADS)  # Python refuses to convert some thousand digits


def _digits_of_variables() -> str:
    """Return the number of threads that the environment sets; "" if it sets none."""
    text = os.environ.get(VARIABLE, "")
    if text:
        digits = text.strip().lstrip("0")
        if not digits.isdecimal():
            raise ValueError(
                f"{VARIABLE} is {shown(text)}; it must be a number of threads, at least 1, or unset"
            )
        return digits
    # Ray, joblib and others set OMP_NUM_THREADS so that each of several processes takes its share
    # of the cores. As in OpenBLAS, its first number counts, and a text without one is ignored.
    if os.environ.get("NUMBA_NUM_THREADS"):
        return ""
    found = re.match(r"\s*\+?0*([1-9][0-9]*)", os.environ.get("OMP_NUM_THREADS", ""))
    return found[1] if found else ""
