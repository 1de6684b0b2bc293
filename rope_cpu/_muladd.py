"""Numba intrinsics on float64: multiply-adds fused where the processor can, the error of a product, wide vectors."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from rope_cpu._formats import F64, call_float, lowers, splat

_DOUBLE = types.float64(types.float64, types.float64, types.float64)


@intrinsic
def muladd(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x·y + z: fused where the processor can, two roundings where it cannot."""
    return _DOUBLE, lambda context, b, signature, args: call_float(b, "fmuladd", *args)


@intrinsic
def product_error(typingctx: Any, x: Any, y: Any, product: Any) -> Any:
    """Return the rounding error x·y − product, exactly, where product = x·y as float64 rounds it.

    Without a fused multiply-add the factors are split in two halves each (T. J. Dekker, Numerische Mathematik 18,
    1971), which is exact for |x|, |y| < 2^996; a library's fma would be ten times slower.
    """

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, y, product = args
        fma = "declare double @llvm.fma.f64(double, double, double)\n" + (
            "define double @f(double %x, double %y, double %z) "
            "{ %r = call double @llvm.fma.f64(double %x, double %y, double %z)\n ret double %r }"
        )
        if lowers(fma, *context.codegen().magic_tuple()):
            return call_float(b, "fma", x, y, b.fneg(product))
        (x1, x2), (y1, y2) = _split(b, x), _split(b, y)
        error = b.fsub(b.fmul(x1, y1), product)
        for left, right in ((x1, y2), (x2, y1), (x2, y2)):
            error = b.fadd(error, b.fmul(left, right))
        return error

    return _DOUBLE, codegen


def _split(b: Any, value: Any) -> tuple[Any, Any]:
    """Split a float64 into two of 26 bits that add up to it."""
    scaled = b.fmul(value, splat(F64, 1, 134217729.0))  # 2^27 + 1
    high = b.fsub(scaled, b.fsub(scaled, value))
    return high, b.fsub(value, high)


@intrinsic
def in_widest_vectors(typingctx: Any) -> Any:
    """Let LLVM vectorise the loops of this function as widely as the processor can; on Intel's it uses half of that."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        # llvmlite knows no attribute that has a value, but writes down what is in this set.
        set.add(b.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen
