"""How a function becomes a compiled, cached kernel: the only place where Numba's options stand."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime import rtsys

Kernel = Callable[..., int]


def _wait_until_free() -> None:
    """Take Numba's lock, whatever signals raise meanwhile: Python prints what leaves this, and forks all the same."""
    raised = None
    while True:
        try:
            global_compiler_lock.acquire()
            break
        except BaseException as error:
            raised = error
            if global_compiler_lock.is_locked():
                break  # it was raised when the lock was taken already
    if raised is not None:
        raise raised


# Numba compiles and loads under a lock. A child that is forked while another thread holds it, which the child does not
# have, would wait for it for ever; so a fork waits until it is free.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_wait_until_free,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )

# What a kernel answers: it did its work; or it wrote nothing, as its arguments need a closer look, are of another dtype
# than it was told, or are worth threads that are not started.
DONE, LOOK_CLOSER, OTHER_DTYPE, NO_THREADS = 0, 1, 2, 3

# Numba's disk cache looks at a kernel's own file alone. Kernels close over this string, so that they are compiled anew
# when code they are generated from, in other files of this folder, has changed.
_FILES = sorted(Path(__file__).parent.glob("[!.]*.py"))
SOURCES = sha256(b"".join(path.name.encode() + path.read_bytes() for path in _FILES)).hexdigest()


def entry_point(kernel: Kernel) -> Kernel:
    """Return the compiled function behind a kernel, for calls that cannot afford the types to be resolved each time.

    It looks at nothing: the caller must have made sure that arguments are what it was compiled for.
    """
    (overload,) = kernel.overloads.values()  # type: ignore[attr-defined]
    return overload.entry_point  # type: ignore[no-any-return]


@cache
def address(kernel: Kernel) -> int:
    """Return where the compiled function is, for calls from other compiled code.

    LLVM is asked once, as it has a lock of its own.
    """
    (overload,) = kernel.overloads.values()  # type: ignore[attr-defined]
    return int(overload.library.get_pointer_to_function(overload.fndesc.llvm_cfunc_wrapper_name))


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's disk cache, without what only compiling takes.

    Before it loads a kernel, Numba makes that ready, some 70 modules: a third of the time from an empty process to a
    first rotation. Compiled code itself may call Numba's runtime, where it was not optimised.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        ready = partial(rtsys.initialize, target_context)
        return super().load_overload(sig, target_context.subtarget(refresh=ready))


def compiled(function: Callable[..., Any], name: str, signature: Any) -> Kernel:
    """Compile `function` for one signature.

    nogil: other Python threads go on. error_model: no branch for division by zero. The name is unique and the signature
    the only one, because two specialisations that processes compile under one name at the same time can later be loaded
    one for the other. Where no folder is writable, or what lies there cannot be read, every process compiles.

    Raises RuntimeError where Numba's compiler is switched off.
    """
    if numba.config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set, but rope_cpu has no kernels without Numba's compiler; unset it")
    function.__qualname__ = function.__name__ = name
    kernel = njit(nogil=True, error_model="numpy")(function)
    try:
        with suppress(RuntimeError):
            kernel.enable_caching()  # a Numba that keeps its cache under another name goes on with its own
            kernel._cache = _Cache(function)
        kernel.compile(signature)
    except (OSError, EOFError, UnpicklingError, ImportError, AttributeError) as error:
        folder = kernel.stats.cache_path
        warnings.warn(
            f"kernels cannot be cached in {folder} ({error}); empty it, or name another in NUMBA_CACHE_DIR",
            stacklevel=2,
        )
        kernel = njit(nogil=True, error_model="numpy")(function)
        kernel.compile(signature)
    kernel.disable_compile()
    return kernel  # type: ignore[no-any-return]
