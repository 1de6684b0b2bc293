"""Conversions of float16 and bfloat16 to float32 and back, as LLVM instructions.

No instruction is emitted by name. Where the processor lacks a conversion, LLVM would call a library function that is
not there and the process would die; so whether it has one is found out at code generation, and what is missing is
written with integers. Words are little-endian.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.formats import (
    F32,
    FORMATS,
    I16,
    I32,
    LLVM_20,
    instructions,
    joined,
    lowers,
    register_size,
    splat,
    take,
    vector,
)

Target = tuple[str, str, str]
Conversion = Callable[[Any, Any, int], Any]
_FEWEST = 8  # lanes that are worth another order


def _widen_half(b: Any, half: Any, lanes: int) -> Any:
    """float16 bits → float32: shift the exponent into place and scale by 2^112, which is exact, subnormals too."""

    def k(value: int) -> Any:
        return splat(I32, lanes, value)

    bits = b.zext(half, vector(I32, lanes))
    magnitude = b.shl(b.and_(bits, k(0x7FFF)), k(13))
    sign = b.shl(b.and_(bits, k(0x8000)), k(16))
    scaled = b.fmul(b.bitcast(magnitude, vector(F32, lanes)), splat(F32, lanes, 2.0**112))
    special = b.icmp_unsigned(">=", magnitude, k(0x7C00 << 13))  # infinity and NaN keep the largest exponent
    finite = b.bitcast(scaled, vector(I32, lanes))
    return b.bitcast(b.or_(b.select(special, b.or_(magnitude, k(0x7F800000)), finite), sign), vector(F32, lanes))


def _narrow_half(b: Any, value: Any, lanes: int) -> Any:
    """float32 → float16 bits, to nearest even: subnormal results by adding ½, normal ones in integers."""

    def k(number: int) -> Any:
        return splat(I32, lanes, number)

    bits = b.bitcast(value, vector(I32, lanes))
    sign = b.and_(bits, k(0x80000000))
    magnitude = b.xor(bits, sign)
    shifted = b.fadd(b.bitcast(magnitude, vector(F32, lanes)), splat(F32, lanes, 0.5))
    subnormal = b.sub(b.bitcast(shifted, vector(I32, lanes)), k(0x3F000000))
    odd = b.and_(b.lshr(magnitude, k(13)), k(1))
    normal = b.lshr(b.add(b.add(magnitude, k(0xC8000FFF)), odd), k(13))
    finite = b.select(b.icmp_unsigned("<", magnitude, k(113 << 23)), subnormal, normal)
    special = b.select(b.icmp_unsigned(">", magnitude, k(0x7F800000)), k(0x7E00), k(0x7C00))
    result = b.select(b.icmp_unsigned(">=", magnitude, k(143 << 23)), special, finite)
    return b.trunc(b.or_(result, b.lshr(sign, k(16))), vector(I16, lanes))


def _widen_bfloat(b: Any, half: Any, lanes: int) -> Any:
    """bfloat16 bits → float32: its upper half."""
    return b.bitcast(b.shl(b.zext(half, vector(I32, lanes)), splat(I32, lanes, 16)), vector(F32, lanes))


def _widen_bfloat_at_once(b: Any, half: Any, lanes: int) -> Any:
    """Do the same in one shuffle with zeros: a step less on AMD's processors, one more on Intel's."""
    if lanes == 1:
        return _widen_bfloat(b, half, lanes)
    zeros = ir.Constant(half.type, [0] * lanes)
    mask = ir.Constant(vector(I32, 2 * lanes), [at for lane in range(lanes) for at in (lane, lanes + lane)])
    return b.bitcast(b.shuffle_vector(zeros, half, mask), vector(F32, lanes))


def even_first(lanes: int) -> Sequence[int]:
    """Return which of neighbouring numbers each lane holds where even ones come first."""
    return range(lanes) if lanes < _FEWEST else [*range(0, lanes, 2), *range(1, lanes, 2)]


def _widen_bfloat_even_first(b: Any, half: Any, lanes: int) -> Any:
    """bfloat16 bits → float32, even numbers first, so that none has to change places."""
    if lanes < _FEWEST:
        return _widen_bfloat(b, half, lanes)
    words = b.bitcast(half, vector(I32, lanes // 2))
    even, odd = b.shl(words, splat(I32, lanes // 2, 16)), b.and_(words, splat(I32, lanes // 2, 0xFFFF0000))
    return b.bitcast(joined(b, [even, odd]), vector(F32, lanes))


def _narrow_bfloat(b: Any, value: Any, lanes: int) -> Any:
    """float32 → bfloat16 bits, to nearest even; below 2^-126 it becomes zero, as AVX512-BF16 has it."""

    def k(number: int) -> Any:
        return splat(I32, lanes, number)

    bits = b.bitcast(value, vector(I32, lanes))
    even = b.icmp_unsigned("==", b.and_(bits, k(1 << 16)), k(0))
    rounded = b.add(bits, b.select(even, k(0x7FFF), k(0x8000)))
    small = b.icmp_unsigned("==", b.and_(bits, k(0x7F800000)), k(0))
    finite = b.select(small, b.and_(bits, k(0x80000000)), rounded)
    result = b.select(b.fcmp_unordered("uno", value, value), b.or_(bits, k(0x400000)), finite)
    return b.trunc(b.lshr(result, k(16)), vector(I16, lanes))


def _narrow_bfloat_by_hardware(b: Any, value: Any, lanes: int) -> Any:
    """Do the same where an instruction converts (Arm's bfcvt), but keeps what is below 2^-126."""
    bits = b.bitcast(value, vector(I32, lanes))
    small = b.icmp_unsigned("==", b.and_(bits, splat(I32, lanes, 0x7F800000)), splat(I32, lanes, 0))
    kept = b.select(small, b.and_(bits, splat(I32, lanes, 0x80000000)), bits)
    narrow = b.fptrunc(b.bitcast(kept, vector(F32, lanes)), vector(FORMATS["bfloat16"].stored, lanes))
    return b.bitcast(narrow, vector(I16, lanes))


def _narrow_bfloat_together(b: Any, value: Any, lanes: int) -> Any:
    """float32, even numbers first, → bfloat16 bits in their places, as `_narrow_bfloat` has them.

    Upper and lower halves are brought together first, so that the rest is done for twice as many numbers to a register.
    A NaN must be quiet, as arithmetic makes it.
    """
    if lanes < _FEWEST:
        return _narrow_bfloat(b, value, lanes)

    def k(number: int) -> Any:
        return splat(I16, lanes, number)

    def alternating(first: Any, second: Any) -> Any:
        """Return every other half of the first, and between them those of the second."""
        order = [number for at in range(0, lanes, 2) for number in (at, lanes + at + 1)]
        halves = (b.bitcast(words, vector(I16, lanes)) for words in (first, second))
        return b.shuffle_vector(*halves, ir.Constant(vector(I32, lanes), order))

    def mask(which: Any) -> Any:
        return b.sext(which, vector(I16, lanes))

    bits, width = b.bitcast(value, vector(I32, lanes)), splat(I32, lanes // 2, 16)
    even, odd = (take(b, bits, range(start, start + lanes // 2)) for start in (0, lanes // 2))
    high, low = alternating(b.lshr(even, width), odd), alternating(even, b.shl(odd, width))
    exponent = b.and_(high, k(0x7F80))
    # What is cut off, less ½, is above 0, or for an odd number above −1.
    above = b.icmp_signed(">", b.xor(low, k(0x8000)), b.sub(k(0), b.and_(high, k(1))))
    finite = b.icmp_signed("!=", exponent, k(0x7F80))
    rounded = b.sub(high, b.and_(mask(above), mask(finite)))
    return b.and_(rounded, b.or_(mask(b.icmp_signed(">", exponent, k(0))), k(0x8000)))


def _conversion(name: str, source: str, target: str) -> str:
    """Return LLVM text that converts one number, for `instructions`."""
    return f"define {target} @f({source} %v) {{ %r = {name} {source} %v to {target}\n ret {target} %r }}"


def _widener(dtype: str, target: Target) -> Conversion | None:
    """Return what makes float32 of the bits of 16-bit numbers, None where LLVM's own conversion is all it takes."""
    if dtype == "float16":
        return None if lowers(_conversion("fpext", "half", "float"), *target) else _widen_half
    # A shift everywhere; LLVM's own conversion is a library call on some targets.
    return _widen_bfloat_at_once if target[1].startswith("znver") else _widen_bfloat


def _narrower(dtype: str, target: Target) -> Conversion | None:
    """Return what rounds float32 to the bits of 16-bit numbers, None where LLVM's own conversion is all it takes."""
    conversion_to = _conversion("fptrunc", "float", str(FORMATS[dtype].stored))
    if dtype == "float16":
        return None if lowers(conversion_to, *target) else _narrow_half
    # LLVM also converts without an instruction for it, but keeps what is below 2^-126. LLVM 15, of Numba 0.61, knows
    # of none and ends the process on Arm.
    found = re.search("vcvtneps2bf16|bfcvt", instructions(conversion_to, *target) if LLVM_20 else "")
    return {"vcvtneps2bf16": None, "bfcvt": _narrow_bfloat_by_hardware}[found[0]] if found else _narrow_bfloat


def conversions(dtype: str, target: Target) -> tuple[Conversion | None, Conversion | None, bool]:
    """Return what widens and what narrows numbers of 16 bits, and whether with `even_first` in between."""
    if FORMATS[dtype].size > 2:
        return None, None, False
    widen, narrow = _widener(dtype, target), _narrower(dtype, target)
    # With 512 bits, which have 16 numbers in float32 to a register, they would go to one from two.
    if narrow is _narrow_bfloat and register_size(target) < 64:
        return _widen_bfloat_even_first, _narrow_bfloat_together, True
    return widen, narrow, False
