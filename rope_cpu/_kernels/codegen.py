"""Numba's code generator: asked only where a kernel is not in the cache, so others start without Numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _generator() -> Any:
    from numba.core.codegen import JITCPUCodegen

    return JITCPUCodegen("rope_cpu")


def target() -> tuple[str, str, str]:
    """Return what Numba compiles for: triple, processor and features."""
    return tuple(_generator().magic_tuple())


def object_code(name: str, write: Callable[[Any], None]) -> bytes:
    """Return the machine code of an LLVM module that `write` fills, as an object file."""
    from numba.core.compiler_lock import global_compiler_lock

    with global_compiler_lock:
        library = _generator().create_library(name)
        library.enable_object_caching()  # which keeps the object file
        module = library.create_ir_module(name)
        write(module)
        library.add_ir_module(module)
        library.finalize()
        code, _bitcode = library.serialize_using_object_code()[2]
    return bytes(code)
