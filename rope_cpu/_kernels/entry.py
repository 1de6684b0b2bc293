"""How Python calls compiled code: by C functions that take objects, written down as LLVM like all the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.flow import Ending
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.words import foreign

# What is made of an object that is given, at an address, for compiled code to take.
Taken = Callable[[Integer], Integer]

_WORD = ir.IntType(64)
_whole = foreign("PyLong_AsLongLong", _WORD, _WORD)
_real = foreign("PyFloat_AsDouble", ir.DoubleType(), _WORD)
_failed = foreign("PyErr_Occurred", _WORD)
_without_gil = foreign("PyEval_SaveThread", _WORD)
_with_gil = foreign("PyEval_RestoreThread", ir.VoidType(), _WORD)
_answer = foreign("PyLong_FromLongLong", _WORD, _WORD)


def whole(given: Integer) -> Integer:
    """Take a whole number."""
    return _whole(given.b, given)


def float_bits(given: Integer) -> Integer:
    """Take the bits of a float64."""
    return Integer(given.b, given.b.bitcast(_real(given.b, given).value, _WORD))


def object_at(given: Integer) -> Integer:
    """Take any object, by its address."""
    return given


def write_entry(module: Any, name: str, function: Any, parameters: Sequence[Taken]) -> None:
    """Write the C function `name` of an LLVM module, which takes objects (self, array, count) and calls `function`.

    Other Python threads go on meanwhile. It fails where the number or kind of objects is another, and looks at nothing
    else: the caller must have made sure that they are what `function` was written for.
    """
    own = ir.Function(module, ir.FunctionType(_WORD, [_WORD] * 3), name)
    b = ir.IRBuilder(own.append_basic_block())
    end, (_self, objects, count) = Ending(b), (Integer(b, value) for value in own.args)
    end.leave_if(count != len(parameters), 0)
    given = [take(at) for take, at in zip(parameters, objects.words(len(parameters)), strict=True)]
    end.leave_if(_failed(b) != 0, 0)
    thread = _without_gil(b)
    answer = Integer(b, b.call(function, [value.value for value in given]))
    _with_gil(b, thread)
    b.ret(end.reached(_answer(b, answer)).value)
