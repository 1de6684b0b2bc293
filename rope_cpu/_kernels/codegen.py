"""Numba's code generator: asked only where a kernel is not in the cache, so others start without Numba."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def _generator() -> Any:
    from numba.core.codegen import AOTCodeLibrary, JITCPUCodegen

    class Generator(JITCPUCodegen):  # type: ignore[misc]
        """Numba's own for this processor, but that it hands over object files and loads none.

        Numba's way to them is a callback, in which an interrupt that comes while LLVM works would be lost.
        """

        _library_class = AOTCodeLibrary

        def _add_module(self, module: Any) -> None:
            """Add it to no engine."""

    return Generator("rope_cpu")


def compiler_lock() -> Any:
    """Return the lock that Numba compiles under; a thread may take it several times."""
    # As a whole and first: an interrupt within the import of a part leaves pieces that cannot be imported again.
    import numba  # noqa: F401
    from numba.core.compiler_lock import global_compiler_lock

    return global_compiler_lock


def target() -> tuple[str, str, str]:
    """Return what Numba compiles for: triple, processor and features."""
    return tuple(_generator().magic_tuple())


def object_code(name: str, write: Callable[[Any], None]) -> bytes:
    """Return the machine code of an LLVM module that `write` fills, as an object file."""
    with compiler_lock():
        library = _generator().create_library(name)
        module = library.create_ir_module(name)
        write(module)
        library.add_ir_module(module)
        library.finalize()
        return bytes(library.emit_native_object())
