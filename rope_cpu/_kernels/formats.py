"""Storage formats and numbers as LLVM vectors, and what a processor does for LLVM text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

from rope_cpu._kernels.builder import declared


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


def take(b: Any, value: Any, lanes: Sequence[int]) -> Any:
    """Return lanes of a number or vector, in this order."""
    if list(lanes) == list(range(lanes_of(value))):
        return value
    if lanes_of(value) == 1:
        value = b.insert_element(ir.Constant(vector(value.type, 2), ir.Undefined), value, I32(0))
    return b.shuffle_vector(value, value, ir.Constant(vector(I32, len(lanes)), list(lanes)))


def joined(b: Any, vectors: Sequence[Any]) -> Any:
    """Return one vector of a power of two of equal ones."""
    while len(vectors) > 1:
        order = ir.Constant(vector(I32, 2 * lanes_of(vectors[0])), list(range(2 * lanes_of(vectors[0]))))
        vectors = [b.shuffle_vector(*two, order) for two in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def call_float(b: Any, name: str, *values: Any) -> Any:
    """Call the LLVM intrinsic `name` (llvm.fma, llvm.fmuladd, …) on floats or vectors of them."""
    first = values[0]
    lanes = lanes_of(first)
    suffix = (f"v{lanes}" if lanes > 1 else "") + ("f64" if element_of(first) == F64 else "f32")
    signature = ir.FunctionType(first.type, [value.type for value in values])
    return b.call(declared(b, signature, f"llvm.{name}.{suffix}"), values)


@cache
def instructions(body: str, triple: str, cpu: str, features: str) -> str:
    """Return what a processor does for LLVM text, in assembly without directives."""
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features)
    assembly = machine.emit_assembly(llvm.parse_assembly(f'target triple = "{triple}"\n{body}'))
    return re.sub(r"^\s*\..*", "", assembly, flags=re.MULTILINE)


def lowers(body: str, triple: str, cpu: str, features: str) -> bool:
    """Tell whether a processor does `body` in instructions of its own, without a call into a library."""
    return not re.search(r"__\w+|\b_?fma\b", instructions(body, triple, cpu, features))


def register_size(target: tuple[str, str, str]) -> int:
    """Return how many bytes a processor's widest registers hold: 64, 32 or 16."""
    body = "define <16 x float> @f(<16 x float> %v) { %r = fadd <16 x float> %v, %v\n ret <16 x float> %r }"
    found = instructions(body, *target)
    return next((size for name, size in (("zmm", 64), ("ymm", 32)) if name in found), 16)
