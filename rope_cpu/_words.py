"""Numba intrinsics on int64 words at addresses: atomic ones that threads talk by, and jobs that are tuples of words."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rope_cpu._integers import emitted, larger, smaller

LINE = 64  # bytes of a memory line

_WORD = ir.IntType(64)


@emitted(types.int64)
def load(base, offset):
    """Read a word that other threads write, so many bytes from an address."""
    return (base + offset).load()


@emitted(types.int64)
def exchange(base, offset, value):
    """Write a word that other threads read, and return what it was."""
    return (base + offset).exchange(value)


@emitted(types.int64)
def add(base, offset, value):
    """Add to a word that other threads add to, and return what it was."""
    return (base + offset).add(value)


@emitted(types.boolean)
def replace(base, offset, old, new):
    """Write `new` if the word is `old`; return whether it was."""
    return (base + offset).replace(old, new)


@emitted(types.int64)
def least(x, y):
    """Return the smaller of two words; Numba's min is compiled anew for each kind of literal."""
    return smaller(x, y)


@emitted(types.int64)
def greatest(x, y):
    """Return the greater of two words."""
    return larger(x, y)


@intrinsic
def call(typingctx: Any, function: Any, words: Any) -> Any:
    """Call the compiled function at an address with a tuple of int64."""
    if not isinstance(words, types.UniTuple):
        return None

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_WORD, [_WORD] * words.count)
        return b.call(b.inttoptr(args[0], kind.as_pointer()), cgutils.unpack_tuple(b, args[1]))

    return types.int64(types.int64, words), codegen


@intrinsic
def relax(typingctx: Any) -> Any:
    """Tell the processor that this is a loop that waits, where it wants to know."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if context.codegen().magic_tuple()[0].startswith("x86_64"):
            nothing = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, nothing, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


# Where LLVM's counter is one that programs may read: on 64-bit Arm in the newest only. An instruction of our own, as
# assembly, would end the process, as Numba's LLVM has no parser for it.
_COUNTED = ("x86_64", "aarch64") if llvm_version_info >= (22,) else ("x86_64",)


@intrinsic
def ticks(typingctx: Any) -> Any:
    """Read the processor's clock, in units of its own; always 0 where it is not known how."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        if not context.codegen().magic_tuple()[0].startswith(_COUNTED):
            return _WORD(0)
        kind = ir.FunctionType(_WORD, [])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.readcyclecounter"), [])

    return types.int64(), codegen


@intrinsic
def spill(typingctx: Any, words: Any) -> Any:
    """Put a tuple of int64 on the stack of this call and return its address."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        place = cgutils.alloca_once(b, args[0].type)
        b.store(args[0], place)
        return b.ptrtoint(place, _WORD)

    return types.int64(words), codegen


@intrinsic
def fetch(typingctx: Any, address: Any, count: Any) -> Any:
    """Return the tuple of `count` int64 at an address; the count is a literal."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    words = types.UniTuple(types.int64, count.literal_value)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.load(b.inttoptr(args[0], context.get_value_type(words).as_pointer()), align=8)

    return words(types.int64, count), codegen


@intrinsic
def pointer(typingctx: Any, address: Any, dtype: Any) -> Any:
    """Return an address as a pointer to numbers of a dtype, named by a literal."""
    if not isinstance(dtype, types.StringLiteral):
        return None
    target = types.CPointer(getattr(types, dtype.literal_value))

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        return b.inttoptr(args[0], context.get_value_type(target))

    return target(types.int64, dtype), codegen


# CPython's allocator of bytes, which needs no GIL; 0 where there is no memory left.
allocate = types.ExternalFunction("PyMem_RawMalloc", types.int64(types.int64))
free = types.ExternalFunction("PyMem_RawFree", types.void(types.int64))


@intrinsic
def copy_bytes(typingctx: Any, out: Any, x: Any, size: Any) -> Any:
    """Copy `size` bytes from address `x` to address `out`, which share none."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        target, source = (b.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(b, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Make streaming stores visible to other threads."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen
