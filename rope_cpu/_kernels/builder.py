"""What llvmlite's builder of LLVM instructions has no word for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

_INDEX = ir.IntType(32)


def declared(b: Any, kind: Any, name: str) -> Any:
    """Return the function `name` of the module that is built, declared where it is not there yet."""
    return b.module.globals.get(name) or ir.Function(b.module, kind, name)


def element(b: Any, array: Any, n: int) -> Any:
    """Return a pointer to an element of the array that a pointer leads to."""
    return b.gep(array, [_INDEX(0), _INDEX(n)], inbounds=True)


def kept(b: Any, value: Any) -> Any:
    """Put a value on the stack of this call, and return a pointer to it."""
    with b.goto_entry_block():
        place = b.alloca(value.type)
    b.store(value, place)
    return place
