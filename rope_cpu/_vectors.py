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

from rope_cpu._formats import F64, I32, I64, Memory, call_float, lowers, splat, vector

# Bytes of cos, and as many of sin, that are held in registers at a time: four vectors, or eight when spread over
# interleaved pairs, of the 32 that AVX-512 has. With 16 shorter ones they are read again from the first cache.
_PIECE = 256

# Some pairs of a row, made ready: takes the row, and returns values with the indices where they are stored.
Step = Callable[[Any], list[tuple[Any, Any]]]


@intrinsic
def rotate_rows(typingctx: Any, run: Any, dtype: Any, pairing: Any, stream: Any) -> Any:
    """Rotate the rows of a run; the output may be the input.

    run: int64 (x, out, cos, sin, blocks, count, rows, x_step, out_step, cos_step, sin_step, ahead): addresses of first
    rows; address of the pairs of each block, and how many blocks and rows there are; bytes from row to row (cos_step 0:
    all rows share cos and sin, the heads of one token), and how many bytes further on to fetch rows that will be needed
    soon (0: none). The rest are string literals, which select the code. dtype: a key of FORMATS; pairing: "half" or
    "interleaved"; stream: "stream" stores past the caches.
    """
    texts = (dtype, pairing, stream)
    if not all(isinstance(text, types.StringLiteral) for text in texts):
        return None
    dtype_name, pairing_name, stream_name = (text.literal_value for text in texts)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        memory = Memory(b, dtype_name, tuple(context.codegen().magic_tuple()), stream_name == "stream")
        _Rows(memory, pairing_name, *cgutils.unpack_tuple(b, args[0])).emit()
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 12), *texts), codegen


class _Rows:
    """Emits the loops over the rows of a run; attributes are LLVM values named as in `rotate_rows`."""

    def __init__(
        self, memory: Memory, pairing: str,
        x: Any, out: Any, cos: Any, sin: Any, blocks: Any, count: Any, rows: Any,
        x_step: Any, out_step: Any, cos_step: Any, sin_step: Any, ahead: Any,
    ) -> None:  # fmt: skip
        self.b, self.memory, self.half = memory.b, memory, pairing == "half"
        self.starts, self.moves = [x, out, cos, sin], (x_step, out_step, cos_step, sin_step)
        self.rows, self.ahead, self.blocks, self.count = rows, ahead, blocks, count
        self.shared = memory.b.icmp_signed("==", cos_step, I64(0))
        self.widest = memory.format.lanes if self.half else memory.format.lanes // 2

    def emit(self) -> None:
        """Emit a pass over all rows for each part of each block, with cos and sin in registers.

        Results that go elsewhere go row by row instead where rows have several parts, since a memory line that is not
        filled at once costs twice: of several blocks, and of one that is stored past the caches.
        """
        b, whole = self.b, _PIECE // self.memory.format.real_size
        one = b.icmp_signed("==", self.count, I64(1))
        if self.memory.stream:
            pairs = self._pairs(I64(0))
            part = b.or_(b.icmp_signed("==", pairs, I64(whole)), b.icmp_signed("<=", pairs, I64(whole // 2)))
            one = b.and_(one, part)
        one = b.or_(one, b.icmp_signed("==", self.starts[0], self.starts[1]))
        times, self.rows = b.select(one, I64(1), self.rows), b.select(one, self.rows, I64(1))
        first = self.starts
        with cgutils.for_range(b, times) as loop:
            self._blocks([b.add(at, b.mul(loop.index, move)) for at, move in zip(first, self.moves, strict=True)])

    def _pairs(self, block: Any) -> Any:
        b = self.b
        return b.load(b.inttoptr(b.add(self.blocks, b.mul(block, I64(8))), I64.as_pointer()))

    def _blocks(self, starts: list[Any]) -> None:
        b, size, real_size = self.b, self.memory.format.size, self.memory.format.real_size
        places = [cgutils.alloca_once(b, I64) for _ in starts]
        for place, start in zip(places, starts, strict=True):
            b.store(start, place)
        with cgutils.for_range(b, self.count) as loop:
            pairs = self._pairs(loop.index)
            self.starts = [b.load(place) for place in places]
            self._block(pairs)
            for place, width in zip(places, (2 * size, 2 * size, real_size, real_size), strict=True):
                b.store(b.add(b.load(place), b.mul(pairs, I64(width))), place)

    def _block(self, pairs: Any) -> None:
        """Rotate a block: in wide vectors, at its end two that overlap or a single one, as wide as fits."""
        b, whole, widest = self.b, _PIECE // self.memory.format.real_size, self.widest
        with cgutils.for_range(b, b.sdiv(pairs, I64(whole))) as loop:
            self._vectors(b.mul(loop.index, I64(whole)), whole, pairs)
        at = b.and_(pairs, I64(-whole))
        while (whole := whole // 2) > widest:
            part = b.and_(pairs, I64(whole))
            with b.if_then(b.icmp_signed("!=", part, I64(0))):
                self._vectors(at, whole, pairs)
            at = b.add(at, part)
        self._end(at, b.sub(pairs, at), widest, pairs)

    def _end(self, at: Any, left: Any, lanes: int, pairs: Any) -> None:
        """Rotate the last pairs of a block, fewer than 2·lanes."""
        b = self.b
        both = [at, b.sub(pairs, I64(lanes))]
        if lanes < self.widest // 2:  # few and rare: where one fits, do the same twice
            with b.if_else(b.icmp_signed(">=", left, I64(lanes))) as (fits, narrower):
                with fits:
                    self._pass(both, lanes, pairs)
                with narrower:
                    if lanes > 1:
                        self._end(at, left, lanes // 2, pairs)
            return
        with b.if_else(b.icmp_signed(">", left, I64(lanes))) as (two, one):
            with two:
                self._pass(both, lanes, pairs)
            with one, b.if_else(b.icmp_signed("==", left, I64(lanes))) as (fits, narrower):
                with fits:
                    self._pass([at], lanes, pairs)
                with narrower:
                    if lanes > 1:
                        self._end(at, left, lanes // 2, pairs)

    def _vectors(self, start: Any, count: int, pairs: Any) -> None:
        self._pass([self.b.add(start, I64(n)) for n in range(0, count, self.widest)], self.widest, pairs)

    def _pass(self, indices: list[Any], lanes: int, pairs: Any) -> None:
        """Rotate `lanes` pairs from each index on, in all rows; wide shared cos and sin stay in registers."""

        def steps(cos: Any, sin: Any) -> list[Step]:
            return [self._step(cos, sin, i, lanes, pairs) for i in indices]

        def rotate(row: Any, out: Any, ready: list[Step]) -> None:
            self._fetch_ahead(row, indices[0], lanes * len(indices), pairs)
            # All are read before any is stored: vectors that overlap find what they read as it was.
            for value, index in [stored for step in ready for stored in step(row)]:
                self.memory.store(value, out, index)

        def apart() -> None:
            self._each_row(lambda row, out, cos, sin: rotate(row, out, steps(cos, sin)))

        if lanes < self.widest or self.memory.stream:  # not worth the code: rare, or waiting for memory
            apart()
            return
        with self.b.if_else(self.shared) as (shared, others):
            with shared:
                ready = steps(*self.starts[2:])
                self._each_row(lambda row, out, cos, sin: rotate(row, out, ready))
            with others:
                apart()

    def _each_row(self, body: Callable[[Any, Any, Any, Any], None]) -> None:
        b = self.b
        with cgutils.for_range(b, self.rows) as loop:
            body(*(b.add(start, b.mul(loop.index, move)) for start, move in zip(self.starts, self.moves, strict=True)))

    def _fetch_ahead(self, row: Any, start: Any, count: int, pairs: Any) -> None:
        """Ask for the elements of `count` pairs, where rows further on are to be fetched."""
        b = self.b
        runs = [(start, count), (b.add(start, pairs), count)] if self.half else [(b.mul(start, I64(2)), 2 * count)]
        with b.if_then(b.icmp_unsigned("!=", self.ahead, I64(0))):
            for first, length in runs:
                self.memory.prefetch(b.add(row, self.ahead), first, length)

    def _step(self, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
        """Return what rotates `lanes` pairs from pair i on."""
        return (_half if self.half else _interleaved)(self.memory, cos, sin, i, lanes, pairs)


def _half(memory: Memory, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
    b, partner = memory.b, memory.b.add(i, pairs)
    c, s = memory.load_real(cos, i, lanes), memory.load_real(sin, i, lanes)

    def step(x: Any) -> list[tuple[Any, Any]]:
        first, second = memory.load(x, i, lanes), memory.load(x, partner, lanes)
        turned = call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s)))
        return [(turned, i), (call_float(b, "fmuladd", second, c, b.fmul(first, s)), partner)]

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

    def step(x: Any) -> list[tuple[Any, Any]]:
        z = memory.load(x, at, 2 * lanes)
        crossed = b.fmul(take(z, [lane ^ 1 for lane in range(2 * lanes)]), s)
        return [(call_float(b, "fmuladd", z, c, crossed), at)]

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
