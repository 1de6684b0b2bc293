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

# Bytes of cos, and as many of sin, that are held in registers at a time: four vectors, or eight when spread over
# interleaved pairs, of the 32 that AVX-512 has. With 16 shorter ones they are read again from the first cache.
_PIECE = 256

# A rotation of one piece of a row: of pairs at an index, for an input row and an output row.
Step = Callable[[Any, Any], None]


@intrinsic
def rotate_rows(typingctx: Any, run: Any, dtype: Any, pairing: Any, angles: Any, stream: Any) -> Any:
    """Rotate the rows of a run; the output may be the input.

    run: int64 (x, out, cos, sin, pairs, rows, x_step, out_step, cos_step, sin_step, ahead): addresses of first rows,
    how many pairs and rows, bytes from row to row, and how many bytes further on to fetch rows that will be needed soon
    (0: none). The rest are string literals, which select the code. dtype: a key of FORMATS; pairing: "half" or
    "interleaved"; angles: "shared" rotates all rows by the first row of cos and sin, the heads of one token; "each" by
    one row each, the tokens of one head; stream: "stream" stores past the caches.
    """
    texts = (dtype, pairing, angles, stream)
    if not all(isinstance(text, types.StringLiteral) for text in texts):
        return None
    dtype_name, pairing_name, angles_name, stream_name = (text.literal_value for text in texts)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        x, out, cos, sin, pairs, rows, x_step, out_step, cos_step, sin_step, ahead = cgutils.unpack_tuple(b, args[0])
        memory = Memory(b, dtype_name, tuple(context.codegen().magic_tuple()), stream_name == "stream")
        prepare = _half if pairing_name == "half" else _interleaved

        def steps(c: Any, s: Any, start: Any, lanes: int, vectors: int) -> list[Step]:
            return [prepare(memory, c, s, b.add(start, I64(v * lanes)), lanes, pairs) for v in range(vectors)]

        def rows_of(body: Callable[[Any, Any, Any, Any], None]) -> None:
            with cgutils.for_range(b, rows) as loop:
                moves = (x, x_step), (out, out_step), (cos, cos_step), (sin, sin_step)
                body(*(b.add(base, b.mul(loop.index, move)) for base, move in moves))

        def fetch_ahead(row: Any, start: Any, count: int) -> None:
            with b.if_then(b.icmp_unsigned("!=", ahead, I64(0))):
                for first, length in _touched(b, pairing_name, start, pairs, count):
                    memory.prefetch(b.add(row, ahead), first, length)

        def piece(start: Any, lanes: int, vectors: int) -> None:
            # Shared cos and sin stay in registers while all rows pass by.
            ready = steps(cos, sin, start, lanes, vectors) if angles_name == "shared" else None

            def body(row: Any, out_row: Any, c: Any, s: Any) -> None:
                fetch_ahead(row, start, lanes * vectors)
                for step in ready or steps(c, s, start, lanes, vectors):
                    step(row, out_row)

            rows_of(body)

        def rest(start: Any, sizes: list[tuple[int, int]]) -> None:
            def body(row: Any, out_row: Any, c: Any, s: Any) -> None:
                at, c, s = start, cos if angles_name == "shared" else c, sin if angles_name == "shared" else s
                for lanes, vectors in sizes:
                    present = b.and_(pairs, I64(lanes * vectors))
                    with b.if_then(b.icmp_unsigned("!=", present, I64(0))):
                        fetch_ahead(row, at, lanes * vectors)
                        for step in steps(c, s, at, lanes, vectors):
                            step(row, out_row)
                    at = b.add(at, present)

            rows_of(body)

        form = FORMATS[dtype_name]
        widest = form.lanes if pairing_name == "half" else form.lanes // 2
        _in_pieces(b, pairs, _PIECE // form.real_size, widest, piece, rest)
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 11), *texts), codegen


def _in_pieces(
    b: Any,
    pairs: Any,
    whole: int,
    widest: int,
    piece: Callable[[Any, int, int], None],
    rest: Callable[[Any, list[tuple[int, int]]], None],
) -> None:
    """Emit pieces of `whole` pairs, then the rest by at most one of every smaller power of two."""
    with cgutils.for_range(b, b.sdiv(pairs, I64(whole))) as loop:
        piece(b.mul(loop.index, I64(whole)), widest, whole // widest)
    done, smaller = b.and_(pairs, I64(-whole)), [whole >> n for n in range(1, whole.bit_length())]
    with b.if_then(b.icmp_unsigned("!=", done, pairs)):
        rest(done, [(min(size, widest), max(size // widest, 1)) for size in smaller])


def _touched(b: Any, pairing: str, start: Any, pairs: Any, count: int) -> list[tuple[Any, int]]:
    """Return the runs of elements, first and how many, that `count` pairs from `start` are in."""
    if pairing == "half":
        return [(start, count), (b.add(start, pairs), count)]
    return [(b.mul(start, I64(2)), 2 * count)]


def _half(memory: Memory, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
    b, partner = memory.b, memory.b.add(i, pairs)
    c, s = memory.load_real(cos, i, lanes), memory.load_real(sin, i, lanes)

    def step(x: Any, out: Any) -> None:
        first, second = memory.load(x, i, lanes), memory.load(x, partner, lanes)
        memory.store(call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s))), out, i)
        memory.store(call_float(b, "fmuladd", second, c, b.fmul(first, s)), out, partner)

    return step


def _interleaved(memory: Memory, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
    b, real, at = memory.b, memory.format.real, memory.b.mul(i, I64(2))

    def take(value: Any, mask: list[int]) -> Any:
        return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(mask)), mask))

    def twice(base: Any) -> Any:
        value = memory.load_real(base, i, lanes)
        if lanes == 1:
            value = b.insert_element(ir.Constant(vector(real, 2), ir.Undefined), value, I32(0))
        return take(value, [lane // 2 for lane in range(2 * lanes)])

    c = twice(cos)
    s = b.fmul(twice(sin), ir.Constant(vector(real, 2 * lanes), [-1.0, 1.0] * lanes))

    def step(x: Any, out: Any) -> None:
        z = memory.load(x, at, 2 * lanes)
        crossed = b.fmul(take(z, [lane ^ 1 for lane in range(2 * lanes)]), s)
        memory.store(call_float(b, "fmuladd", z, c, crossed), out, at)

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
