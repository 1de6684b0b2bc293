"""How code that is written down as LLVM becomes a compiled kernel, cached on disk."""

from __future__ import annotations

import logging  # noqa: F401  for its hook, see below
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import ir

from rope_cpu._kernels.cache import cached, keep
from rope_cpu._kernels.codegen import compiler_lock, object_code
from rope_cpu._kernels.entry import Taken, write_entry
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.loading import callable_at, load

# What a kernel answers: it did its work; or it wrote nothing, as its arguments need a closer look, are of another dtype
# than it was told, or are worth threads that are not started.
DONE, LOOK_CLOSER, OTHER_DTYPE, NO_THREADS = 0, 1, 2, 3

_WORD = ir.IntType(64)


class Kernel(NamedTuple):
    """A compiled function of int64, which returns one.

    call: what Python calls; it looks at nothing, so the caller must have made sure that arguments are what the kernel
    is for. address: where it is, for calls from other compiled code. compiled: it was not in the cache. folder: the one
    that holds it, None where no folder can be written and every process compiles.
    """

    name: str
    call: Callable[..., int]
    address: int
    compiled: bool
    folder: Path | None


Write = Callable[..., Integer | int]


def built(write: Write, name: str, parameters: Sequence[Taken]) -> bytes:
    """Compile a function: `write` is called with Integers, one for each parameter, and returns the answer."""

    def fill(module: Any) -> None:
        function = ir.Function(module, ir.FunctionType(_WORD, [_WORD] * len(parameters)), name)
        function.attributes.add("noinline")  # in its entry it would stand a second time
        b = ir.IRBuilder(function.append_basic_block())
        answer = write(*(Integer(b, value) for value in function.args))
        b.ret(answer.value if isinstance(answer, Integer) else _WORD(answer))
        write_entry(module, f"{name}.entry", function, parameters)

    return object_code(name, fill)


def loaded(code: bytes, name: str, compiled: bool = True, folder: Path | None = None) -> Kernel:
    """Return the kernel that was compiled to an object file."""
    find = load(code)
    return Kernel(name, callable_at(find(f"{name}.entry"), name), find(name), compiled, folder)


def compiled(write: Write, name: str, parameters: Sequence[Taken]) -> Kernel:
    """Compile a function, see `built`, or load it where that was done before; its name must be its own."""
    with _at_work:
        kernel = _known(name)
        if kernel:
            return kernel
        numbas = compiler_lock()
    with numbas, _at_work:
        return _known(name) or _made(write, name, parameters)


def _known(name: str) -> Kernel | None:
    """Return a kernel that this process has, or that is in the cache."""
    kernel = _kernels.get(name)
    found = None if kernel else cached(name)
    if found:
        kernel = _kernels[name] = loaded(found[0], name, False, found[1])
    return kernel


def _made(write: Write, name: str, parameters: Sequence[Taken]) -> Kernel:
    code = built(write, name, parameters)
    kernel = _kernels[name] = loaded(code, name)  # before a warning that it cannot be cached, which may be an error
    _kernels[name] = kernel._replace(folder=keep(name, code))
    return _kernels[name]


# Those of this process: `functools.cache`, by which they are asked for, lets several threads compile side by side.
_kernels: dict[str, Kernel] = {}

# Kernels are compiled and loaded under a lock, and Numba has one of its own, which is always taken first: whoever
# compiles with Numba may come to rotate meanwhile. A child that is forked while another thread holds one, which the
# child does not have, would wait for it for ever; so a fork waits until they are free.
_at_work = threading.RLock()


class _Held(threading.local):
    """The locks that a thread which forks holds for the fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_held = _Held()


def _locks() -> list[Any]:
    numbas = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    return [numbas, _at_work] if numbas else [_at_work]


def _before_fork() -> None:
    """Take the locks, whatever signals raise meanwhile: Python prints what leaves this, and forks all the same."""
    raised, complete = None, False
    while not complete:
        locks = _locks()
        for lock in locks:
            raised = _take(lock) or raised
            _held.locks.append(lock)
        complete = len(_locks()) == len(locks)
        if not complete:
            _after_fork()  # a thread that had ours has imported Numba, and may now hold Numba's
    if raised is not None:
        raise raised


def _take(lock: Any) -> BaseException | None:
    """Take a lock; return what signals raised meanwhile."""
    is_taken: Callable[[], bool] = getattr(lock, "is_locked", None) or lock._is_owned
    raised = None
    while True:
        try:
            lock.acquire()
            return raised
        except BaseException as error:
            raised = error
            if is_taken():
                return raised  # it was raised when the lock was taken already


def _after_fork() -> None:
    while _held.locks:
        _held.locks.pop().release()


# Before a fork, hooks that were registered last are called first. `logging` holds its lock from its own on, and what
# Numba imports while it compiles logs: so that one is registered before this.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
