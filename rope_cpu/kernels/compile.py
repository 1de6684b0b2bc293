"""How kernels are compiled: by Numba, on first use, for one signature each, and kept in its cache on disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import config, njit

from rope_cpu.kernels import threads

# Numba's cache notices when the file of a kernel changes, not what the kernel calls in other files: so kernels of other
# sources have other names.
_SOURCES = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))

_warned: set[str | None] = set()  # folders of the cache that a warning was about


def inner(function: Callable[..., Any], of: str = "", parallel: bool = False) -> Any:
    """Return a function that kernels call, without the wrappers that Python needs: they take as long to compile.

    of: what there is another such function of, by name, for each pairing. LLVM knows functions by qualified name, types
    and a number that each process counts from 0: of kernels that several processes have compiled, one would call the
    functions of another.
    parallel: it has a prange, and nothing else: Numba counts references to the arrays of such a function, which serial
    calls of one token would pay 0.1 µs for.
    """
    if of:
        function.__qualname__ = f"{of}_{function.__name__}"
    return njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, parallel=parallel)(function)


def compiled(function: Callable[..., Any], name: str, signature: tuple[Any, ...], **functions: Any) -> Any:
    """Compile a kernel under a name of its own, or load it from the cache; functions: the globals that it calls.

    Numba's cache distinguishes kernels by qualified name, signature and bytecode, and keeps no closures over compiled
    functions: so each kernel is a copy of a plain function, with a name of its own and what differs as its globals.

    Raises RuntimeError where NUMBA_DISABLE_JIT is set.
    """
    if config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set, but the kernels of rope_cpu exist in compiled form only")
    threads.load_tbb()
    kernel = FunctionType(function.__code__, {**function.__globals__, **functions}, name)
    kernel.__module__ = function.__module__
    kernel.__qualname__ = f"{name}_{_SOURCES.hexdigest()[:16]}"
    dispatcher = _cached(kernel, signature)
    threads.check_layer()
    dispatcher.disable_compile()
    return dispatcher


def _cached(kernel: FunctionType, signature: tuple[Any, ...]) -> Any:
    """Return the dispatcher of a kernel, from the cache on disk if that can be used; warn if it cannot.

    A damaged file raises whatever unpickling it raises, so every exception counts as the cache's. An error of the
    compiler is raised again by the second compilation, which does without the cache.
    """
    dispatcher = _dispatcher(kernel)
    try:
        dispatcher.enable_caching()
        dispatcher.compile(signature)
    except Exception as error:
        folder = dispatcher.stats.cache_path
        if not dispatcher.signatures:  # the kernel could not be loaded; otherwise it could not be saved
            dispatcher = _dispatcher(kernel)
            dispatcher.compile(signature)
        _warn_once(folder, f"{type(error).__name__}: {error}")
    return dispatcher


def _dispatcher(kernel: FunctionType) -> Any:
    return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(kernel)


def _warn_once(folder: str | None, reason: str) -> None:
    """Warn that kernels are compiled in every process, once for each folder."""
    if folder in _warned:
        return
    _warned.add(folder)
    if folder is None:
        fault = "no folder for the kernels of rope_cpu can be written"
        remedy = "set NUMBA_CACHE_DIR to a folder that can be"
    else:
        fault = f"the kernels of rope_cpu cannot be kept in {folder} ({reason})"
        remedy = "delete that folder, free disk space, or set NUMBA_CACHE_DIR to another one"
    warnings.warn(f"{fault}, so every process compiles them for some seconds; {remedy}", stacklevel=2)
