"""Vectors for Numba: many lanes that are loaded, multiplied, shuffled and stored as one value.

LLVM cannot make vectors of a plain loop over rows that may be rotated in place. So the rotation kernels name theirs,
and `a * c - b * s` on 64 lanes becomes as many instructions as the processor needs for them.

NumPy's 16-bit floats come as the integers of their bits, int16 for float16 and uint16 for bfloat16. Both become float32
vectors when they are loaded, and are rounded once when they are stored.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

_I16, _I32 = ir.IntType(16), ir.IntType(32)
_REALS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_STORED = _REALS | {types.int16: ir.HalfType(), types.uint16: _I16}

ALIGNMENT = 64  # bytes: that of memory which `store` may write past the caches


class Vector(types.Type):
    """Numba's type of `lanes` numbers of one floating-point type."""

    def __init__(self, real: types.Float, lanes: int) -> None:
        self.real, self.lanes = real, lanes
        super().__init__(name=f"Vector({real}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(_REALS[kind.real], kind.lanes))


def _define(operation: Callable[..., Any], instruction: str) -> None:
    """Define one of Python's operators on two vectors of one type."""

    @infer_global(operation)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            both = len(args) == 2 and isinstance(args[0], Vector) and args[0] == args[1]
            return signature(args[0], *args) if both else None

    lower_builtin(operation, Vector, Vector)(
        lambda context, b, sig, args: getattr(b, instruction)(*args)
    )


_define(operator.add, "fadd")
_define(operator.sub, "fsub")
_define(operator.mul, "fmul")


@intrinsic
def muladd(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once where the processor has an instruction for it and twice elsewhere."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        name = f"llvm.fmuladd.v{x.lanes}f{x.real.bitwidth}"
        kind = ir.FunctionType(args[0].type, [args[0].type] * 3)
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)

    return x(x, x, x), emit


# Memory. Nothing is checked.


@intrinsic
def pointer(typing: Any, array: Any) -> Any:
    """Return a pointer to the first element of an array."""

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        return context.make_array(array)(context, b, args[0]).data

    return types.CPointer(array.dtype)(array), emit


@intrinsic
def advance(typing: Any, at: Any, offset: Any) -> Any:
    """Return the pointer `offset` bytes further on."""
    return at(at, types.intp), lambda context, b, sig, args: cgutils.pointer_add(b, *args)


@intrinsic
def address(typing: Any, at: Any) -> Any:
    """Return the address that a pointer points to."""
    return types.intp(at), lambda context, b, sig, args: b.ptrtoint(
        args[0], context.get_value_type(types.intp)
    )


@intrinsic(prefer_literal=True)
def load(typing: Any, at: Any, index: Any, lanes: Any) -> Any:
    """Return the vector of the `lanes` elements from `index` on; lanes: a constant."""
    element, count = at.dtype, lanes.literal_value
    real = element if element in _REALS else types.float32

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        kind = ir.VectorType(_STORED[element], count)
        value = b.load(
            b.bitcast(b.gep(args[0], [args[1]]), kind.as_pointer()), align=element.bitwidth // 8
        )
        if element == types.int16:
            return b.fpext(value, ir.VectorType(_REALS[real], count))
        return _from_bfloat16(b, value) if element == types.uint16 else value

    return Vector(real, count)(at, types.intp, lanes), emit


@intrinsic
def store(typing: Any, at: Any, index: Any, vector: Any, past_caches: Any) -> Any:
    """Write a vector to the elements from `index` on; past_caches: without a place in them, at aligned memory."""
    element, size = at.dtype, at.dtype.bitwidth // 8

    def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
        value = args[2]
        if element == types.int16:
            value = b.fptrunc(value, ir.VectorType(ir.HalfType(), vector.lanes))
        elif element == types.uint16:
            value = _to_bfloat16(b, value, context.codegen().magic_tuple()[2])
        place = b.bitcast(b.gep(args[0], [args[1]]), value.type.as_pointer())
        if size * vector.lanes < ALIGNMENT:
            b.store(value, place, align=size)
            return context.get_dummy_value()
        with b.if_else(args[3]) as (past, usual):
            with past:
                done = b.store(value, place, align=ALIGNMENT)
                done.set_metadata("nontemporal", b.module.add_metadata([_I32(1)]))
            with usual:
                b.store(value, place, align=size)
        return context.get_dummy_value()

    return types.void(at, types.intp, vector, types.boolean), emit


# Lanes of one vector, for pairs of neighbours.


def _shuffle(choose: Callable[[int], int], times: int) -> Any:
    """Return the function to a vector of `times` as many lanes; choose: which lane of the given one goes there."""

    @intrinsic
    def shuffle(typing: Any, v: Any) -> Any:
        lanes = times * v.lanes

        def emit(context: Any, b: Any, sig: Any, args: Any) -> Any:
            mask = ir.Constant(ir.VectorType(_I32, lanes), [choose(n) for n in range(lanes)])
            return b.shuffle_vector(args[0], args[0], mask)

        return Vector(v.real, lanes)(v), emit

    return shuffle


doubled = _shuffle(lambda n: n // 2, 2)  # 0 0 1 1 2 2 …
swapped = _shuffle(lambda n: n ^ 1, 1)  # 1 0 3 2 5 4 …


@intrinsic
def even_negated(typing: Any, v: Any) -> Any:
    """Return a vector with lanes 0, 2, 4 … negated."""
    signs = [-1.0, 1.0] * (v.lanes // 2)
    return v(v), lambda context, b, sig, args: b.fmul(args[0], ir.Constant(args[0].type, signs))


# 16-bit floats.


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not name."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()


def _from_bfloat16(b: Any, bits: Any) -> Any:
    wide = ir.VectorType(_I32, bits.type.count)
    upper = b.shl(b.zext(bits, wide), ir.Constant(wide, [16] * wide.count))
    return b.bitcast(upper, ir.VectorType(ir.FloatType(), wide.count))


def _to_bfloat16(b: Any, value: Any, features: str) -> Any:
    """Round float32 to nearest, ties to even; what is below the least normal number becomes zero, as in hardware."""
    kind, narrow = (ir.VectorType(integer, value.type.count) for integer in (_I32, _I16))
    if "+avx512bf16" in features:  # Arm's instruction keeps subnormal numbers
        return b.bitcast(b.fptrunc(value, ir.VectorType(_BFloat(), kind.count)), narrow)

    def lanes(number: int) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    bits = b.bitcast(value, kind)
    upper = b.lshr(bits, lanes(16))
    rounded = b.lshr(b.add(b.add(bits, lanes(0x7FFF)), b.and_(upper, lanes(1))), lanes(16))
    number = b.select(b.fcmp_unordered("uno", value, value), b.or_(upper, lanes(0x40)), rounded)
    tiny = b.icmp_unsigned("<", b.and_(bits, lanes(0x7FFFFFFF)), lanes(0x00800000))
    return b.trunc(b.select(tiny, b.and_(upper, lanes(0x8000)), number), narrow)


def converts_float16() -> bool:
    """Return True if the processor that Numba compiles for has instructions for float16; else LLVM calls a library."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    if config.CPU_FEATURES is not None:
        return "+f16c" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get("f16c"))
