"""Compilation of kernels: by Numba, on first use, for one signature each, cached on disk."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Set
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from numba import config, njit

from rope_cpu.kernels import threads

# Numba's cache notices a change in the file of a kernel, but not in the other files whose functions
# the kernel calls. A hash of all sources is therefore a part of every kernel's name.
_SOURCES = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
)

# Options of Numba for kernels, which Python calls, and for parts of them, which kernels call.
_KERNEL_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_PART_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_warned: set[str | None] = set()  # the cache folders that a warning has named


def device_function(
    function: Callable[..., Any],
    variant: str = "",
    parallel: bool = False,
    fastmath: Set[str] = frozenset(),
    inline: bool = False,
) -> Any:
    """Compile a device function: callable from kernels only.

    It has no wrappers for calls from Python, which would double the time to compile it.

    Parameters
    ----------
    function : callable
        The Python function.
    variant : str
        Prefix of the qualified name, for a function that exists once for each pairing or number of
        lanes. LLVM identifies functions by qualified name, types and a number that every process
        counts from 0. Without the prefix, a cached kernel that another process compiled could call
        the function of another pairing.
    parallel : bool
        Whether the function is a prange and nothing else. Numba counts references to the arrays of
        such a function, which would cost a serial call for one token 0.1 µs. In a process of one
        thread it is compiled as a plain loop.
    fastmath : set of str
        LLVM's fast-math flags for the arithmetic of this function, such as "reassoc", without which
        LLVM does not vectorise a sum.
    inline : bool
        Whether Numba copies the function into its callers, before LLVM does. LLVM optimises each
        other function alone and again in its callers, which takes time; without inlining, functions
        that return a vector made the rotation of bfloat16 some 3 % slower, and references to arrays
        that are passed in a tuple were counted.
    """
    if variant:
        function.__qualname__ = f"{variant}_{function.__name__}"
    return njit(
        error_model="numpy",
        fastmath=set(fastmath),
        inline="always" if inline else "never",
        no_cpython_wrapper=True,
        no_cfunc_wrapper=True,
        parallel=parallel and threads.PARALLEL,
    )(function)


def compile_kernel(
    function: Callable[..., Any], name: str, signature: tuple[Any, ...], **functions: Any
) -> Any:
    """Compile a kernel under a name of its own, or load it from the cache.

    Numba's cache identifies kernels by qualified name, signature and bytecode, and cannot store a
    closure over compiled functions. Each kernel is therefore a copy of a plain function, with a
    name of its own and with the functions that differ as its globals.

    Parameters
    ----------
    function : callable
        The Python function to copy.
    name : str
        Name of the kernel.
    signature : tuple of numba types
        Types of its arguments.
    **functions : device functions
        The globals of the copy that differ from those of `function`, by name.

    Raises
    ------
    RuntimeError
        If NUMBA_DISABLE_JIT is set.
    """
    threads.load_tbb()
    if not threads.PARALLEL:
        name = f"{name}_serial"
    dispatcher = _compile_or_load(
        _named_copy(function, name, functions), signature, _KERNEL_OPTIONS
    )
    threads.check_layer()
    dispatcher.disable_compile()
    return dispatcher


def compile_part(
    function: Callable[..., Any], name: str, signature: tuple[Any, ...], **functions: Any
) -> Any:
    """Compile a function that kernels call by its address, with `vectors.call_at`.

    Numba optimises the code of a function again in each function that it is linked into, and a
    prange has four wrappers: with their parts linked, the kernels of caches took up to twice as
    long to compile. A part returns nothing; what it raises is raised in its caller.

    Parameters
    ----------
    function, name, signature, **functions
        As for `compile_kernel`.
    """
    return _compile_or_load(_named_copy(function, name, functions), signature, _PART_OPTIONS)


@cache
def address_of(part: Any) -> int:
    """Return the address of a compiled part, which is kept as long as the process lives.

    To find it takes 20 µs.
    """
    (compiled,) = part.overloads.values()
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def _named_copy(function: Callable[..., Any], name: str, functions: dict[str, Any]) -> FunctionType:
    """Return a copy of a function with a name of its own and with other globals."""
    copy = FunctionType(function.__code__, {**function.__globals__, **functions}, name)
    copy.__module__ = function.__module__
    copy.__qualname__ = f"{name}_{_SOURCES.hexdigest()[:16]}"
    return copy


def _compile_or_load(
    kernel: FunctionType, signature: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Return the compiled dispatcher of a function, from the cache on disk if possible.

    Warn if the cache cannot be used.

    Every exception is blamed on the cache, because reading a damaged file can raise any. An error
    of the compiler is raised again by the second compilation, which does not use the cache.
    """
    if config.DISABLE_JIT:
        raise RuntimeError(
            "NUMBA_DISABLE_JIT is set, but the kernels of rope_cpu exist in compiled form only; "
            "unset it"
        )
    cached = njit(**options)(kernel)
    try:
        cached.enable_caching()
        cached.compile(signature)
        return cached
    except Exception as error:
        uncached = njit(**options)(kernel)
        uncached.compile(signature)
        _warn_once(cached.stats.cache_path, error)
        return uncached


def _warn_once(folder: str | None, error: Exception) -> None:
    """Warn, once for each folder, that the kernel cache cannot be used.

    folder: None if no folder is writable.
    """
    if folder in _warned:
        return
    _warned.add(folder)
    if folder is None:
        fault = "no folder for the kernel cache of rope_cpu can be written"
        remedy = "set NUMBA_CACHE_DIR to a writable folder"
    else:
        reason = f"{type(error).__name__}: {error}"
        fault = f"the kernel cache of rope_cpu in {folder} cannot be used ({reason})"
        remedy = "delete that folder, free disk space, or set NUMBA_CACHE_DIR to another one"
    consequence = "every process compiles the kernels for some seconds"
    warnings.warn(f"{fault}, so {consequence}; {remedy}", stacklevel=2)
