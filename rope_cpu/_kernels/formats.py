"""Storage formats as LLVM vectors: loads and stores of float32, float64, float16 and bfloat16, converted on the way.

Nothing here emits an instruction by name. Where the processor lacks a conversion, LLVM would call a library function
that is not there and the process would die; so each conversion is tried out at code generation, and written with
integers where it is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.words import LINE


class _BFloat(ir.types._BaseFloatType):  # type: ignore[misc]
    """LLVM's `bfloat`, which llvmlite does not define."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        raise NotImplementedError("no bfloat16 constant is ever emitted")


_BFloat._create_instance()

LLVM_20 = llvm.llvm_version_info >= (20,)

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()


@dataclass(frozen=True)
class Format:
    """How elements are stored and what they are computed in; sizes in bytes, lanes of one 512-bit vector."""

    stored: Any
    size: int
    real: Any = F32
    real_size: int = 4
    lanes: int = 16


FORMATS = {
    "float32": Format(F32, 4),
    "float64": Format(F64, 8, F64, 8, 8),
    "float16": Format(ir.HalfType(), 2),
    "bfloat16": Format(_BFloat(), 2),
}


def vector(element: Any, lanes: int) -> Any:
    """Return the type of `lanes` elements: a scalar for one."""
    return ir.VectorType(element, lanes) if lanes > 1 else element


def splat(element: Any, lanes: int, value: float) -> Any:
    """Return a constant with every lane `value`."""
    return ir.Constant(vector(element, lanes), [value] * lanes if lanes > 1 else value)


def lanes_of(value: Any) -> int:
    """Return how many lanes a value has."""
    return int(value.type.count) if isinstance(value.type, ir.VectorType) else 1


def element_of(value: Any) -> Any:
    """Return the type of one lane of a value."""
    return value.type.element if isinstance(value.type, ir.VectorType) else value.type


def call_float(b: Any, name: str, *values: Any) -> Any:
    """Call the LLVM intrinsic `name` (llvm.fma, llvm.fmuladd, …) on floats or vectors of them."""
    first = values[0]
    lanes = lanes_of(first)
    suffix = (f"v{lanes}" if lanes > 1 else "") + ("f64" if element_of(first) == F64 else "f32")
    signature = ir.FunctionType(first.type, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, signature, f"llvm.{name}.{suffix}"), values)


@cache
def instructions(body: str, triple: str, cpu: str, features: str) -> str:
    """Return what a processor does for LLVM text, in assembly without directives."""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    assembly = machine.emit_assembly(llvm.parse_assembly(f'target triple = "{triple}"\n{body}'))
    return re.sub(r"^\s*\..*", "", assembly, flags=re.MULTILINE)


def lowers(body: str, triple: str, cpu: str, features: str) -> bool:
    """Tell whether a processor does `body` in instructions of its own, without a call into a library."""
    return not re.search(r"__\w+|\b_?fma\b", instructions(body, triple, cpu, features))


def conversion(name: str, source: str, target: str) -> str:
    """Return LLVM text that converts one number, for `instructions`."""
    return f"define {target} @f({source} %v) {{ %r = {name} {source} %v to {target}\n ret {target} %r }}"


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


def _narrower(dtype: str, target: tuple[str, str, str]) -> Callable[[Any, Any, int], Any] | None:
    """Return what rounds float32 to the bits of 16-bit numbers, None where LLVM's own conversion is all it takes."""
    conversion_to = conversion("fptrunc", "float", str(FORMATS[dtype].stored))
    if dtype == "float16":
        return None if lowers(conversion_to, *target) else _narrow_half
    # LLVM also converts without an instruction for it, but keeps what is below 2^-126. LLVM 15, of Numba 0.61, knows
    # of none and ends the process on Arm.
    found = re.search("vcvtneps2bf16|bfcvt", instructions(conversion_to, *target) if LLVM_20 else "")
    return {"vcvtneps2bf16": None, "bfcvt": _narrow_bfloat_by_hardware}[found[0]] if found else _narrow_bfloat


class Memory:
    """Loads and stores of one storage format, converted to and from the type that is computed in.

    aligned: of how many bytes the addresses are multiples that are stored to past the caches.
    """

    def __init__(self, b: Any, dtype: str, target: tuple[str, str, str], stream: bool) -> None:
        self.b, self.format, self.stream = b, FORMATS[dtype], stream
        narrow, half = self.format.size == 2, dtype == "float16"
        stored = str(self.format.stored)
        self.aligned, self.widen, self.narrow = self.format.size, None, None
        # Widening a bfloat16 is a shift everywhere; LLVM's own fpext is a library call on some targets.
        if narrow and not half:
            self.widen = _widen_bfloat_at_once if target[1].startswith("znver") else _widen_bfloat
        elif narrow and not lowers(conversion("fpext", stored, "float"), *target):
            self.widen = _widen_half
        if narrow:
            self.narrow = _narrower(dtype, target)

    def _read(self, at: Integer, element: Any, lanes: int, align: int) -> Any:
        value = self.b.load(self.b.inttoptr(at.value, vector(element, lanes).as_pointer()))
        value.align = align
        return value

    def load_real(self, at: Integer, lanes: int) -> Any:
        """Load cos or sin."""
        return self._read(at, self.format.real, lanes, self.format.real_size)

    def load(self, at: Integer, lanes: int) -> Any:
        form = self.format
        if self.widen:
            return self.widen(self.b, self._read(at, I16, lanes, form.size), lanes)
        value = self._read(at, form.stored, lanes, form.size)
        return value if form.stored == form.real else self.b.fpext(value, vector(form.real, lanes))

    def prefetch(self, at: Integer, size: int) -> None:
        """Ask for the cache lines of so many bytes, whether or not there is memory."""
        b, byte = self.b, I8.as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        fetch = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
        for offset in range(0, size, LINE):
            line = b.inttoptr((at + offset).value, byte)
            b.call(fetch, [line, I32(0), I32(3), I32(1)])  # to read, into all caches, as data

    def store(self, value: Any, at: Integer) -> None:
        form, lanes = self.format, lanes_of(value)
        if self.narrow:
            value = self.narrow(self.b, value, lanes)
        elif form.stored != form.real:
            value = self.b.fptrunc(value, vector(form.stored, lanes))
        self._put(value, at, form.size)

    def copy_word(self, x: Integer, out: Integer) -> None:
        """Copy 8 bytes as they are."""
        self._put(self._read(x, I64, 1, self.format.size), out, 8)

    def _put(self, value: Any, at: Integer, size: int) -> None:
        """Store a value, past the caches where this memory is for that; less than 8 bytes LLVM may store as usual."""
        words = size * lanes_of(value) // 4
        if not self.stream or not words:
            self._write(value, at, self.format.size)
            return
        # LLVM would split a vector itself, but one of bfloat16 by way of the stack and the caches. On x86, vectors at
        # addresses of which too little is known go past the caches as words of 8 bytes, which may start anywhere.
        value, together = self.b.bitcast(value, ir.VectorType(I32, words)), max(self.aligned // 4, 4)
        for first in range(0, words, together):
            taken = list(range(first, min(first + together, words)))
            part = self.b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(taken)), taken))
            stored = self._write(part, at + 4 * first, self.aligned)
            stored.set_metadata("nontemporal", self.b.module.add_metadata([ir.Constant(I32, 1)]))

    def _write(self, value: Any, at: Integer, align: int) -> Any:
        stored = self.b.store(value, self.b.inttoptr(at.value, value.type.as_pointer()))
        stored.align = align
        return stored
