"""Several numbers at a time, as LLVM values that are written like numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.formats import (
    F32,
    F64,
    I32,
    I64,
    call_float,
    element_of,
    joined,
    lanes_of,
    lowers,
    register_size,
    splat,
    take,
    vector,
)

_FMA = (
    "declare double @llvm.fma.f64(double, double, double)\n"
    "define double @f(double %x, double %y, double %z) "
    "{ %r = call double @llvm.fma.f64(double %x, double %y, double %z)\n ret double %r }"
)

# How many float64 a register of AVX holds.
_IN_AVX = 4


@dataclass(frozen=True)
class Lanes:
    """Floating-point numbers side by side; a Python number among them stands for as many of its like.

    target: triple, processor and features, which tell whether a multiplication and an addition are one operation.
    """

    b: Any
    value: Any
    target: tuple[str, str, str]

    def _with(self, value: Any) -> Lanes:
        return replace(self, value=value)

    def _of(self, other: Lanes | float) -> Any:
        if isinstance(other, Lanes):
            return other.value
        return splat(element_of(self.value), lanes_of(self.value), other)

    def __add__(self, other: Lanes | float) -> Lanes:
        return self._with(self.b.fadd(self.value, self._of(other)))

    def __sub__(self, other: Lanes | float) -> Lanes:
        return self._with(self.b.fsub(self.value, self._of(other)))

    def __rsub__(self, other: float) -> Lanes:
        return self._with(self.b.fsub(self._of(other), self.value))

    def __mul__(self, other: Lanes | float) -> Lanes:
        return self._with(self.b.fmul(self.value, self._of(other)))

    def __neg__(self) -> Lanes:
        return self._with(self.b.fneg(self.value))

    def all(self, number: float) -> Lanes:
        """Return a number in as many lanes."""
        return self._with(self._of(number))

    def rounded(self) -> Lanes:
        """Return the nearest whole numbers."""
        return self._with(call_float(self.b, "rint", self.value))

    def muladd(self, factor: Lanes | float, addend: Lanes | float) -> Lanes:
        """Return self·factor + addend: fused where the processor can, two roundings where it cannot."""
        return self._with(call_float(self.b, "fmuladd", self.value, self._of(factor), self._of(addend)))

    def product(self, other: Lanes | float) -> tuple[Lanes, Lanes]:
        """Return self·other as float64 rounds it, and what that loses, exactly.

        Without a fused multiply-add in a longer way; a library's fma would be ten times slower.
        """
        y = other if isinstance(other, Lanes) else self.all(other)
        product = self * y
        if lowers(_FMA, *self.target):
            return product, self._with(call_float(self.b, "fma", self.value, y.value, (-product).value))
        return exact_product(self, y)

    def plus_once(self, other: Lanes, addend: Lanes) -> Lanes:
        """Return self·other + addend, rounded once.

        The sum with the product as float64 rounds it must be exact.
        """
        if lowers(_FMA, *self.target):
            return self._with(call_float(self.b, "fma", self.value, other.value, addend.value))
        product, lost = exact_product(self, other)
        sum_: Lanes = (product + addend) + lost
        return sum_

    def bit(self, number: int) -> Lanes:
        """Return −0 where a bit of float64 is set, counted from the last, which is 0, else 0."""
        sign = self._with_bits(self.b.shl(self._bits(), splat(I64, lanes_of(self.value), 63 - number)))
        return sign & self.all(-0.0)

    def __and__(self, other: Lanes) -> Lanes:
        """Return the bits of float64 that both have."""
        return self._with_bits(self.b.and_(self._bits(), other._bits()))

    def __xor__(self, other: Lanes) -> Lanes:
        """Return the bits of float64 that one of them has; if the other is −0, the opposite."""
        return self._with_bits(self.b.xor(self._bits(), other._bits()))

    def _bits(self) -> Any:
        """Return float64 as integers."""
        return self.b.bitcast(self.value, vector(I64, lanes_of(self.value)))

    def _with_bits(self, bits: Any) -> Lanes:
        return self._with(self.b.bitcast(bits, self.value.type))

    def in_turn(self) -> Lanes:
        """Return the same numbers; with AVX alone, LLVM then computes them in the order in which they stand in code.

        To keep numbers in 16 registers, LLVM would go on with one vector while the processor waits for it. SSE, which
        has as many, has twice as many vectors to keep there.
        """
        lanes = lanes_of(self.value)
        if lanes % _IN_AVX or register_size(self.target) != 8 * _IN_AVX:
            return self
        b, kind = self.b, vector(F64, _IN_AVX)
        keep = ir.FunctionType(kind, [kind])
        vectors = [take(b, self.value, range(first, first + _IN_AVX)) for first in range(0, lanes, _IN_AVX)]
        return self._with(joined(b, [b.asm(keep, "", "=x,0", [each], True) for each in vectors]))

    def choose(self, then: Lanes, otherwise: Lanes) -> Lanes:
        """Return `then` where a lane is −0, else `otherwise`."""
        negative = self.b.icmp_signed("<", self._bits(), splat(I64, lanes_of(self.value), 0))
        return self._with(self.b.select(negative, then.value, otherwise.value))

    def below(self, number: float, then: Lanes, otherwise: Lanes) -> Lanes:
        """Return `then` where a lane lies between ±number, else `otherwise`."""
        size = self._with(call_float(self.b, "fabs", self.value))
        chosen = self.b.fcmp_ordered("<", size.value, self._of(number))
        return self._with(self.b.select(chosen, then.value, otherwise.value))

    def to(self, element: Any) -> Lanes:
        """Return the numbers as another type, rounded to nearest where that is narrower."""
        if element_of(self.value) == element:
            return self
        convert = self.b.fptrunc if element == F32 else self.b.fpext
        return self._with(convert(self.value, vector(element, lanes_of(self.value))))

    def to_odd(self) -> Lanes:
        """Return the numbers as float32, from which they round to 16 bits as they would from float64.

        What float32 does not hold is cut towards zero, and the last bit says that something was cut off.
        """
        if element_of(self.value) == F32:
            return self
        b, near = self.b, self.to(F32)
        back, bits = near.to(F64), vector(I32, lanes_of(self.value))
        beyond = b.fcmp_ordered(">", call_float(b, "fabs", back.value), call_float(b, "fabs", self.value))
        cut = b.add(b.bitcast(near.value, bits), b.sext(beyond, bits))
        odd = b.or_(cut, b.zext(b.fcmp_ordered("!=", back.value, self.value), bits))
        return self._with(b.bitcast(odd, vector(F32, lanes_of(self.value))))


def exact_sum(x: Any, y: Any) -> tuple[Any, Any]:
    """Return x + y as float64 rounds it, and what that loses; of Lanes or of NumPy's arrays (D. E. Knuth)."""
    total = x + y
    shadow = total - x
    return total, (x - (total - shadow)) + (y - shadow)


def exact_product(x: Any, y: Any) -> tuple[Any, Any]:
    """Return x·y as float64 rounds it, and what that loses, exactly below 2^996; of the same.

    Source: T. J. Dekker, A floating-point technique for extending the available precision, Numerische Mathematik 18,
    1971: each factor is split into two halves.
    """
    product = x * y
    (x1, x2), (y1, y2) = _halves(x), _halves(y)
    return product, (((x1 * y1 - product) + x1 * y2) + x2 * y1) + x2 * y2


def _halves(x: Any) -> tuple[Any, Any]:
    """Split float64 into two of 26 bits that add up to it."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high
