"""Compilation of kernels and their parts: by Numba, on first use, cached on disk."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Set
from contextlib import suppress
from functools import cache, partial
from importlib import resources
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from numba import config, njit, prange, types
from numba.core.compiler_lock import global_compiler_lock

from rope_cpu.kernels import threads
from rope_cpu.kernels.vectors import address, call_part, stored

# Numba's cache notices a change in the file of a kernel, but not in the other files whose functions
# the kernel calls, nor that a process of one thread has loops instead of `prange`, nor the level of
# LLVM's optimisation. A hash of all sources and of the latter two is therefore a part of every
# kernel's name. PyInstaller leaves no folder of sources, and Numba caches nothing then.
_FOLDER = resources.files(__package__)
_SOURCES = {file.name: file for file in _FOLDER.iterdir()} if _FOLDER.is_dir() else {}
_VERSION = hashlib.sha256(
    b"".join(_SOURCES[name].read_bytes() for name in sorted(_SOURCES) if name.endswith(".py"))
    + f"{threads.PARALLEL} {config.OPT}".encode()
)

# Options of Numba for kernels, which Python calls, and for parts of them, which kernels call.
_KERNEL_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_PART_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}

_CACHE_FILES = f"*_{'[0-9a-f]' * 16}-*.nb[ic]"  # those of kernels of any version of the sources

_logger = logging.getLogger("rope_cpu")
_warned: set[str | None] = set()  # the cache folders that a warning has named
_cache_setting = threading.Lock()


def device_function(
    function: Callable[..., Any],
    variant: str = "",
    parallel: bool = False,
    fastmath: Set[str] = frozenset(),
    inline: bool = False,
) -> Any:
    """Compile a device function: callable from kernels only.

    It has no wrappers for calls from Python, which would double the time to compile it.

    variant: prefix of the qualified name, for a function that exists once for each pairing or
    number of lanes. parallel: whether the function is a prange and nothing else. fastmath: LLVM's
    fast-math flags, such as "reassoc", without which LLVM does not vectorise a sum. inline: whether
    Numba copies the function into its callers, before LLVM does.
    """
    # LLVM identifies functions by qualified name, types and a number that every process counts from
    # 0. Without the variant, a cached kernel that another process compiled could call the function
    # of another pairing.
    # parallel: Numba counts references to the arrays of a function with a prange, which would cost
    # a serial call for one token 0.1 µs. In a process of one thread it is compiled as a plain loop.
    # inline: LLVM optimises each other function alone and again in its callers, which takes time.
    # Without inlining, functions that return a vector made the rotation of bfloat16 some 3 %
    # slower, and references to arrays that are passed in a tuple were counted.
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
    function: Callable[..., Any],
    name: str,
    signature: tuple[Any, ...],
    level: int = 1,
    **constants: Any,
) -> Any:
    """Compile a kernel under a name of its own, or load it from the cache.

    level, constants: as the level and the functions of `compile_part`.

    Raises RuntimeError if NUMBA_DISABLE_JIT is set, ValueError for a wrong variable about threads.
    """
    threads.read_variables()
    threads.load_tbb()
    copy = _named_copy(function, name, **constants)
    dispatcher = _compile_or_load(copy, signature, _KERNEL_OPTIONS, level)
    threads.check_layer()
    dispatcher.disable_compile()
    return dispatcher


def compile_part(
    function: Callable[..., Any], name: str, arguments: types.Type, level: int = 1, **functions: Any
) -> Any:
    """Compile a function that kernels call by its address, for arguments of a type.

    Numba optimises the code of a function again in each function that it is linked into, and a
    prange has four wrappers: with their parts linked, the kernels of caches took up to twice as
    long to compile. A part returns nothing, and it neither raises nor allocates: what is raised
    inside a prange is lost. Its caller allocates the memory that it needs.

    level: of LLVM's optimisation. Level 1 takes half the time, and the code of most parts is as
    fast. functions: the globals of the compiled copy that differ from those of `function`, by name.
    """
    signature = (types.CPointer(arguments), types.intp, types.intp)
    copy = _named_copy(function, name, **functions)
    return _compile_or_load(copy, signature, _PART_OPTIONS, level)


@partial(device_function, parallel=True)
def _run_in_parallel(part, arguments, parts):
    for index in prange(parts):
        call_part(part, arguments, np.intp(index), parts)


@partial(device_function, inline=True)
def run_parts(part, arguments, parts):
    """Call a part, by its address, once for each of several threads with a pointer to arguments.

    Numba does not see that parts use the arrays in the arguments. One that the kernel has made must
    be used after this call.
    """
    start = address(stored(arguments))
    if parts > 1:
        _run_in_parallel(part, start, parts)
    else:
        call_part(part, start, np.intp(0), parts)


@cache
def address_of(part: Any) -> int:
    """Return the address of a compiled part, which is kept as long as the process lives.

    To find it takes 20 µs.
    """
    (compiled,) = part.overloads.values()
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


def clear_cache() -> dict[Path, list[int]]:
    """Delete the cached kernels of all versions of the sources; return the sizes of the files.

    The sizes are in bytes, for each folder that was searched: that of the cache, if one can be
    written, and the one beside the sources, which earlier versions used. Raises OSError if a file
    cannot be deleted, RuntimeError if NUMBA_DISABLE_JIT is set.
    """
    _check_compiler()
    folders = [Path(__file__).parent / "__pycache__"]
    function = njit(_named_copy(lambda: None, "none"))
    with suppress(OSError, RuntimeError):  # no folder can be written
        _enable_cache(function)
        folders.insert(0, Path(function.stats.cache_path))
    return {folder: _delete_kernels(folder) for folder in dict.fromkeys(folders)}


def _delete_kernels(folder: Path) -> list[int]:
    """Delete the kernels in a folder, and no files of other programs; return their sizes."""
    sizes = []
    for file in sorted(folder.glob(_CACHE_FILES)):
        with suppress(FileNotFoundError):  # another process clears the cache, too
            size = file.stat().st_size
            file.unlink()
            sizes.append(size)
    return sizes


def _named_copy(function: Callable[..., Any], name: str, **functions: Any) -> FunctionType:
    """Return a copy of a function with a name of its own and with other globals.

    Numba's cache identifies functions by qualified name, signature and bytecode, and cannot store a
    closure over compiled functions.
    """
    code = _code_in_file(function.__code__)
    copy = FunctionType(code, {**function.__globals__, **functions}, name)
    copy.__module__ = function.__module__
    copy.__qualname__ = f"{name}_{_VERSION.hexdigest()[:16]}"
    return copy


def _code_in_file(code: CodeType) -> CodeType:
    """Return code with the name of an existing file: of code in an archive, the archive.

    Numba caches no function of another file, but its locator of those in a "*.zip", which ignores
    the folder of the cache.
    """
    path = Path(code.co_filename)
    file = next((found for found in (path, *path.parents) if found.is_file()), path)
    return code.replace(co_filename=str(file))


def _compile_or_load(
    kernel: FunctionType, signature: tuple[Any, ...], options: dict[str, Any], level: int
) -> Any:
    """Return the compiled dispatcher of a function, from the cache on disk if possible.

    Warn if the cache cannot be used.

    Every exception but a lack of memory is blamed on the cache, because reading a damaged file can
    raise any. An error of the compiler is raised again by the second compilation, which does not
    use the cache.
    """
    _check_compiler()
    cached = njit(**options)(kernel)
    try:
        _enable_cache(cached)
        folder = Path(cached.stats.cache_path)
        if not any(folder.glob(f"*{kernel.__qualname__}-*")):
            _log_once(str(folder))
        _compile(cached, signature, level)
        return cached
    except MemoryError:
        raise
    except Exception as error:
        uncached = njit(**options)(kernel)
        _compile(uncached, signature, level)
        _warn_once(cached.stats.cache_path, error)
        return uncached


def _compile(dispatcher: Any, signature: tuple[Any, ...], level: int) -> None:
    """Compile or load a function at a level of LLVM's optimisation, or at the user's if it is less.

    The garbage collector rests meanwhile: it finds little in the compiler's objects, which it would
    visit for a tenth of the time. Numba's own lock keeps functions of other libraries, compiled in
    other threads, from this level.
    """
    with global_compiler_lock:
        usual = config.OPT
        collects = gc.isenabled()
        config.OPT = type(usual)(min(level, usual))
        gc.disable()
        try:
            dispatcher.compile(signature)
        finally:
            config.OPT = usual
            if collects:
                gc.enable()


# CPython keeps the frames of functions in chunks of 16 KB. Where calls in a loop cross the end of a
# chunk, each allocates and frees the next one, which made compilation up to a fifth longer. A frame
# as large as this gets a chunk that has room for those of the whole compiler, too.
_compile.__code__ = _compile.__code__.replace(co_stacksize=2**15)


def _check_compiler() -> None:
    """Raise RuntimeError if Numba's compiler is switched off."""
    if config.DISABLE_JIT:
        raise RuntimeError(
            "NUMBA_DISABLE_JIT is set, but the kernels of rope_cpu exist in compiled form only; "
            "unset it"
        )


def _enable_cache(dispatcher: Any) -> None:
    """Let Numba cache a function, by default in the user's cache folder.

    Numba's own default is the folder of the source file. Files there outlive `pip uninstall`, after
    which Python imports the folder as an empty package. A folder or locator that the user chose has
    precedence.

    Numba reads its setting, one for the process, only when a cache is enabled. A function of
    another library that is decorated in another thread meanwhile, for 0.1 ms, is cached in this
    folder too, and compiled once more by the next process.
    """
    with _cache_setting:
        if config.CACHE_DIR or config.CACHE_LOCATOR_CLASSES:
            dispatcher.enable_caching()
            return
        config.CACHE_DIR = _user_folder()
        try:
            dispatcher.enable_caching()
        finally:
            config.CACHE_DIR = ""


def _user_folder() -> str:
    """Return the folder of rope_cpu in the user's cache folder; make it if it does not exist.

    Raise OSError or RuntimeError if it cannot be written. Numba would then use the folder of the
    source file.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():  # unset, or to be ignored as its specification says
        caches = Path.home() / ".cache"
    folder = caches / "rope_cpu"
    # Whatever the umask, nobody else may write machine code that this user executes.
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return str(folder)


@cache
def _log_once(folder: str) -> None:
    """Log, before a process compiles its first kernel, the reason for the wait."""
    _logger.info("compiling kernels, which takes some seconds; they are kept in %s", folder)


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
    text = f"{fault}, so {consequence}; {remedy}"
    try:
        warnings.warn(text, stacklevel=2)
    except UserWarning:  # made an error (-W error): the kernel works all the same
        _logger.warning(text)
