"""Object files made part of this process, by LLVM alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm

_FASTCALL = 0x80  # METH_FASTCALL of Python.h


class _Method(ctypes.Structure):
    """CPython's PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def for_ever(thing: Any) -> Any:
    """Return what lives on, as compiled code goes by its address, even where a module is loaded anew."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing


@cache
def _target() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple())


def load(code: bytes) -> Callable[[str], int]:
    """Make an object file part of this process; return what tells where one of its functions is."""
    engine = for_ever(llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target().create_target_machine()))
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address  # type: ignore[no-any-return]


def callable_at(address: int, name: str) -> Callable[..., int]:
    """Return what calls the C function at an address, which takes what `entry` writes."""
    method = for_ever(_Method(name.encode(), address, _FASTCALL, None))
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.POINTER(_Method), ctypes.c_void_p, ctypes.c_void_p)
    return kind(("PyCFunction_NewEx", ctypes.pythonapi))(ctypes.byref(method), None, None)  # type: ignore[no-any-return]
