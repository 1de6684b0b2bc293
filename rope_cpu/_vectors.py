"""Numba intrinsics in explicit vectors: the rotation of one row, and fused multiply-adds.

LLVM's own vectoriser gives up on rows of unknown alignment that may be rotated in place, and knows no bfloat16; so the
loop over a row is emitted in vectors by hand, with the same arithmetic in every width: body and tail give the same
bits.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rope_cpu._formats import F64, FORMATS, I32, I64, Memory, call_float, lowers, splat, vector

Step = Callable[[Any, int], None]


@intrinsic
def rotate_row(
    typingctx: Any, x: Any, out: Any, cos: Any, sin: Any, pairs: Any, dtype: Any, pairing: Any, stream: Any
) -> Any:
    """Rotate `pairs` pairs at address `x` into `out`, which may be `x`.

    x, out, cos, sin: addresses (int64) of contiguous rows. dtype: a key of FORMATS; pairing: "half" or "interleaved";
    stream: "stream" stores past the caches, "" does not. These three are string literals and select the code.
    """
    texts = (dtype, pairing, stream)
    if not all(isinstance(text, types.StringLiteral) for text in texts):
        return None
    dtype_name, pairing_name, stream_name = (text.literal_value for text in texts)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        target = tuple(context.codegen().magic_tuple())
        memory = Memory(b, dtype_name, target, stream_name == "stream")
        emit = _half_step if pairing_name == "half" else _interleaved_step
        widest = FORMATS[dtype_name].lanes // (1 if pairing_name == "half" else 2)
        _over_row(b, args[4], widest, emit(memory, *args[:5]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, *texts), codegen


def _over_row(b: Any, pairs: Any, widest: int, step: Step) -> None:
    """Emit a loop of the widest vectors, then at most one step of each narrower width."""
    done = b.and_(pairs, I64(-widest))
    with cgutils.for_range(b, b.sdiv(pairs, I64(widest))) as loop:
        step(b.mul(loop.index, I64(widest)), widest)
    lanes = widest // 2
    while lanes:
        present = b.icmp_unsigned("!=", b.and_(pairs, I64(lanes)), I64(0))
        with b.if_then(present):
            step(done, lanes)
        done = b.add(done, b.and_(pairs, I64(lanes)))
        lanes //= 2


def _half_step(memory: Memory, x: Any, out: Any, cos: Any, sin: Any, pairs: Any) -> Step:
    b = memory.b

    def step(i: Any, lanes: int) -> None:
        partner = b.add(i, pairs)
        first, second = memory.load(x, i, lanes), memory.load(x, partner, lanes)
        c, s = memory.load_real(cos, i, lanes), memory.load_real(sin, i, lanes)
        memory.store(call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s))), out, i)
        memory.store(call_float(b, "fmuladd", second, c, b.fmul(first, s)), out, partner)

    return step


def _interleaved_step(memory: Memory, x: Any, out: Any, cos: Any, sin: Any, pairs: Any) -> Step:
    b, real = memory.b, memory.format.real

    def take(value: Any, mask: list[int]) -> Any:
        return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(mask)), mask))

    def twice(base: Any, i: Any, lanes: int) -> Any:
        value = memory.load_real(base, i, lanes)
        if lanes == 1:
            value = b.insert_element(ir.Constant(vector(real, 2), ir.Undefined), value, I32(0))
        return take(value, [lane // 2 for lane in range(2 * lanes)])

    def step(i: Any, lanes: int) -> None:
        at = b.mul(i, I64(2))
        z, c, s = memory.load(x, at, 2 * lanes), twice(cos, i, lanes), twice(sin, i, lanes)
        crossed = b.fmul(take(z, [lane ^ 1 for lane in range(2 * lanes)]), s)
        signs = ir.Constant(vector(real, 2 * lanes), [-1.0, 1.0] * lanes)
        memory.store(call_float(b, "fmuladd", z, c, b.fmul(crossed, signs)), out, at)

    return step


@intrinsic
def copy_bytes(typingctx: Any, out: Any, x: Any, size: Any) -> Any:
    """Copy `size` bytes from address `x` to address `out`, which share none."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        target, source = (b.inttoptr(address, ir.IntType(8).as_pointer()) for address in args[:2])
        cgutils.raw_memcpy(b, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def fence(typingctx: Any) -> Any:
    """Make streaming stores visible to other threads."""

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        b.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


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
