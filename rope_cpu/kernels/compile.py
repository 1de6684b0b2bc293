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
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)

_warned: set[str | None] = set()  # cache folders that a warning has named


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
    return njit(
        error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, parallel=parallel
    )(function)


def compiled(
    function: Callable[..., Any], name: str, signature: tuple[Any, ...], **functions: Any
) -> Any:
    """Compile a kernel under a name of its own, or load it from the cache; functions: the globals that it calls.

    Numba's cache distinguishes kernels by qualified name, signature and bytecode, and keeps no closures over compiled
    functions: so each kernel is a copy of a plain function, with a name of its own and what differs as its globals.

    Raises RuntimeError where NUMBA_DISABLE_JIT is set.
    """
    if config.DISABLE_JIT:
        raise RuntimeError(
            "NUMBA_DISABLE_JIT is set, but the kernels of rope_cpu exist in compiled form only"
        )
    threads.load_tbb()
    kernel = FunctionType(function.__code__, {**function.__globals__, **functions}, name)
    kernel.__module__ = function.__module__
    kernel.__qualname__ = f"{name}_{_SOURCES.hexdigest()[:16]}"
    dispatcher = _cached(kernel, signature)
    threads.check_layer()
    dispatcher.disable_compile()
    return dispatcher


def _cached(kernel: FunctionType, signature: tuple[Any, ...]) -> Any:
    """Return the compiled dispatcher of a kernel, from the cache on disk if possible; warn if not.

    Every exception is blamed on the cache, because reading a damaged file can raise any. An error of the compiler is
    raised again by the second compilation, which does not use the cache.
    """
    cached = _dispatcher(kernel)
    try:
        cached.enable_caching()
        cached.compile(signature)
        return cached
    except Exception as error:
        uncached = _dispatcher(kernel)
        uncached.compile(signature)
        _warn_once(cached.stats.cache_path, error)
        return uncached


def _dispatcher(kernel: FunctionType) -> Any:
    return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True)(kernel)


def _warn_once(folder: str | None, error: Exception) -> None:
    """Warn, once for each folder, that the kernel cache cannot be used; folder: None if none can be written."""
    if folder in _warned:
        return
    _warned.add(folder)
    if folder is None:
        fault = "no folder for the kernel cache of rope_cpu can be written"
        remedy = "set NUMBA_CACHE_DIR to a writable folder"
    else:
        fault = f"the kernel cache of rope_cpu in {folder} cannot be used ({type(error).__name__}: {error})"
        remedy = "delete that folder, free disk space, or set NUMBA_CACHE_DIR to another one"
    warnings.warn(
        f"{fault}, so every process compiles the kernels for some seconds; {remedy}", stacklevel=2
    )
