"""Numba intrinsics in explicit vectors: the rotation of one row, and fused multiply-adds.

LLVM's own vectoriser gives up on rows of unknown alignment that may be rotated in place, and knows no bfloat16; so the
loop over a row is emitted in vectors by hand, with the same arithmetic in every width: body and tail give the same
bits.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        self.starts, self.moves = (x, out, cos, sin), (x_step, out_step, cos_step, sin_step)
        self.rows, self.ahead = rows, ahead
        self.blocks, self.count = blocks, count
        self.widest = memory.format.lanes if self.half else memory.format.lanes // 2
        self.whole = _PIECE // memory.format.real_size

    def emit(self) -> None:
        """Emit everything.

        Of a single block, whole pieces go first: where rows share cos and sin, a piece at a time, over all rows, with
        cos and sin held in registers. What is left of it, and several blocks, go row by row.
        """
        b = self.b
        single, shared = (b.icmp_signed("==", value, I64(n)) for value, n in ((self.count, 1), (self.moves[2], 0)))
        first = self._pairs_of(I64(0))
        held = b.select(single, b.and_(first, I64(-self.whole)), I64(0))
        with b.if_else(shared) as (together, apart):
            with together, self._pieces(held) as start:
                steps = self._steps(*self.starts[2:], start, first)
                self._each_row(lambda row, out, cos, sin: self._piece(row, out, steps, start, first))
            with apart:

                def row_by_row(row: Any, out: Any, cos: Any, sin: Any) -> None:
                    with self._pieces(held) as start:
                        self._piece(row, out, self._steps(cos, sin, start, first), start, first)

                self._each_row(row_by_row)
        with b.if_then(b.or_(b.not_(single), b.icmp_signed("<", held, first))):
            self._each_row(lambda row, out, cos, sin: self._row(row, out, cos, sin, held))

    @contextmanager
    def _pieces(self, pairs: Any) -> Iterator[Any]:
        """Loop over the pieces of so many pairs; yields where a piece starts."""
        b = self.b
        with cgutils.for_range(b, b.sdiv(pairs, I64(self.whole))) as loop:
            yield b.mul(loop.index, I64(self.whole))

    def _steps(self, cos: Any, sin: Any, start: Any, pairs: Any) -> list[Step]:
        """Return what rotates a piece."""
        indices = [self.b.add(start, I64(n)) for n in range(0, self.whole, self.widest)]
        return [self._step(cos, sin, i, self.widest, pairs) for i in indices]

    def _piece(self, row: Any, out: Any, steps: list[Step], start: Any, pairs: Any) -> None:
        self._fetch_ahead(row, start, self.whole, pairs)
        for step in steps:
            self._store(step(row), out)

    def _pairs_of(self, block: Any) -> Any:
        b = self.b
        return b.load(b.inttoptr(b.add(self.blocks, b.mul(block, I64(8))), I64.as_pointer()))

    def _each_row(self, body: Callable[[Any, Any, Any, Any], None]) -> None:
        b = self.b
        with cgutils.for_range(b, self.rows) as loop:
            body(*(b.add(start, b.mul(loop.index, move)) for start, move in zip(self.starts, self.moves, strict=True)))

    def _row(self, row: Any, out: Any, cos: Any, sin: Any, held: Any) -> None:
        """Rotate one row, block after block; the first one from pair `held` on."""
        b, form = self.b, self.memory.format
        places = [cgutils.alloca_once(b, place.type) for place in (row, out, cos, sin)]
        for place, start in zip(places, (row, out, cos, sin), strict=True):
            b.store(start, place)
        with cgutils.for_range(b, self.count) as loop:
            pairs = self._pairs_of(loop.index)
            x_at, out_at, c_at, s_at = map(b.load, places)
            self._block(x_at, out_at, c_at, s_at, pairs, held)
            for place, size in zip(places, (2 * form.size, 2 * form.size, form.real_size, form.real_size), strict=True):
                b.store(b.add(b.load(place), b.mul(pairs, I64(size))), place)

    def _block(self, row: Any, out: Any, cos: Any, sin: Any, pairs: Any, held: Any) -> None:
        """Rotate one block of one row: wide vectors, then two that overlap, or one that fits."""
        b = self.b

        def several(indices: list[Any], lanes: int) -> None:
            steps = [self._step(cos, sin, i, lanes, pairs) for i in indices]
            # All are read before any is stored: vectors that overlap find what they read as it was.
            values = [value for step in steps for value in step(row)]
            self._store(values, out)

        span = 4 * self.widest
        with cgutils.for_range(b, b.sdiv(b.sub(pairs, held), I64(span))) as loop:
            at = b.add(held, b.mul(loop.index, I64(span)))
            self._fetch_ahead(row, at, span, pairs)
            several([b.add(at, I64(n)) for n in range(0, span, self.widest)], self.widest)
        at = b.add(held, b.and_(b.sub(pairs, held), I64(-span)))
        left, lanes = b.sub(pairs, at), 2 * self.widest
        two = b.and_(left, I64(lanes))
        with b.if_then(b.icmp_signed("!=", two, I64(0))):
            self._fetch_ahead(row, at, lanes, pairs)
            several([at, b.add(at, I64(self.widest))], self.widest)
        at, left = b.add(at, two), b.sub(left, two)
        while lanes := lanes // 2:
            above = b.icmp_signed("<", left, I64(2 * lanes))
            with b.if_then(b.and_(above, b.icmp_signed(">", left, I64(lanes)))):
                self._fetch_ahead(row, at, 2 * lanes, pairs)
                several([at, b.sub(pairs, I64(lanes))], lanes)
            with b.if_then(b.icmp_signed("==", left, I64(lanes))):
                self._fetch_ahead(row, at, lanes, pairs)
                several([at], lanes)

    def _fetch_ahead(self, row: Any, start: Any, count: int, pairs: Any) -> None:
        """Ask for the elements of `count` pairs, where rows further on are to be fetched."""
        b = self.b
        runs = [(start, count), (b.add(start, pairs), count)] if self.half else [(b.mul(start, I64(2)), 2 * count)]
        with b.if_then(b.icmp_unsigned("!=", self.ahead, I64(0))):
            for first, length in runs:
                self.memory.prefetch(b.add(row, self.ahead), first, length)

    def _store(self, values: list[tuple[Any, Any]], out: Any) -> None:
        for value, index in values:
            self.memory.store(value, out, index)

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
