"""What compiled code does with memory, with other compiled code and with the processor, besides computing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info

from rope_cpu._kernels.builder import declared, element
from rope_cpu._kernels.codegen import target
from rope_cpu._kernels.integers import Integer

LINE = 64  # bytes of a memory line

_INT, _WORD, _VOID = ir.IntType(32), ir.IntType(64), ir.VoidType()


def foreign(name: str, result: Any, *parameters: Any) -> Callable[..., Integer]:
    """Return what emits, given a builder and numbers, a call of a C function; numbers are cut and widened to fit."""

    def emit(b: Any, *numbers: Integer | int) -> Any:
        given = [
            kind(number) if isinstance(number, int) else number.value if kind == _WORD else b.trunc(number.value, kind)
            for kind, number in zip(parameters, numbers, strict=True)
        ]
        function = declared(b, ir.FunctionType(result, parameters), name)
        answer = b.call(function, given)
        return Integer(b, b.sext(answer, _WORD) if result == _INT else answer)

    return emit


# CPython's allocator of bytes, which needs no GIL; 0 where there is no memory left.
allocate = foreign("PyMem_RawMalloc", _WORD, _WORD)
free = foreign("PyMem_RawFree", _VOID, _WORD)
# CPython's locks, which exist on every platform and need no GIL either.
acquire = foreign("PyThread_acquire_lock", _INT, _WORD, _INT)
release = foreign("PyThread_release_lock", _VOID, _WORD)
# Linux alone: which processor this is, and on which ones a thread may run.
processor = foreign("sched_getcpu", _INT)
allowed = foreign("sched_getaffinity", _INT, _INT, _WORD, _WORD)
allow = foreign("sched_setaffinity", _INT, _INT, _WORD, _WORD)


def call(function: Integer, *words: Integer | int) -> Integer:
    """Call the compiled function at an address."""
    b, kind = function.b, ir.FunctionType(_WORD, [_WORD] * len(words))
    given = [word.value if isinstance(word, Integer) else _WORD(word) for word in words]
    return Integer(b, b.call(b.inttoptr(function.value, kind.as_pointer()), given))


def relax(b: Any) -> None:
    """Tell the processor that this is a loop that waits, where it wants to know."""
    if target()[0].startswith("x86_64"):
        b.call(declared(b, ir.FunctionType(_VOID, []), "llvm.x86.sse2.pause"), [])


# Where LLVM's counter is one that programs may read: on 64-bit Arm in the newest only. An instruction of our own, as
# assembly, would end the process, as Numba's LLVM has no parser for it.
_COUNTED = ("x86_64", "aarch64") if llvm_version_info >= (22,) else ("x86_64",)
_system_time = foreign("clock_gettime", _INT, _INT, _WORD)


def ticks(b: Any) -> Integer:
    """Read the processor's clock, in units of its own, or else the system's; always 0 where there is neither."""
    if target()[0].startswith(_COUNTED):
        kind = ir.FunctionType(_WORD, [])
        return Integer(b, b.call(declared(b, kind, "llvm.readcyclecounter"), []))
    if not hasattr(time, "CLOCK_MONOTONIC"):
        return Integer(b, _WORD(0))
    place = spill(b, [0, 0])
    _system_time(b, time.CLOCK_MONOTONIC, place)
    seconds, nanoseconds = place.words(2)
    return seconds * 10**9 + nanoseconds


def spill(b: Any, words: Sequence[Integer | int]) -> Integer:
    """Put words on the stack of this call and return their address."""
    return Integer(b, b.ptrtoint(spilled(b, words), _WORD))


def spilled(b: Any, words: Sequence[Integer | int]) -> Any:
    """Put words on the stack of this call and return an LLVM pointer to them, which LLVM knows more of."""
    with b.goto_entry_block():
        place = b.alloca(ir.ArrayType(_WORD, len(words)))
    for n, word in enumerate(words):
        b.store(word.value if isinstance(word, Integer) else _WORD(word), element(b, place, n))
    return place


def write_float(at: Integer, number: Integer) -> None:
    """Write a whole number to an address as float64."""
    b, kind = at.b, ir.DoubleType()
    b.store(b.sitofp(number.value, kind), b.inttoptr(at.value, kind.as_pointer()))


def copy_bytes(out: Integer, x: Integer, size: Integer) -> None:
    """Copy so many bytes from address `x` to address `out`, which share none."""
    b = out.b
    byte = ir.IntType(8).as_pointer()
    copy = b.module.declare_intrinsic("llvm.memcpy", [byte, byte, _WORD])
    b.call(copy, [*(b.inttoptr(address.value, byte) for address in (out, x)), size.value, ir.IntType(1)(False)])


def fence(b: Any) -> None:
    """Make streaming stores visible to other threads."""
    b.fence("seq_cst")
