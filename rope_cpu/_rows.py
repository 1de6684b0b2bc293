"""The rotation of rows, in explicit vectors.

LLVM's own vectoriser gives up on rows of unknown alignment that may be rotated in place, and knows no bfloat16; so the
loop over a row is emitted in vectors by hand, with the same arithmetic in every width: body and tail give the same
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from rope_cpu._formats import FORMATS, I64, Memory
from rope_cpu._integers import Integer
from rope_cpu._part import FEW, TOLD, Part, reaches
from rope_cpu._words import target

# Bytes of cos, and as many of sin, that are held in registers at a time: four vectors, or eight when spread over
# interleaved pairs, of the 32 that AVX-512 has. With 16 shorter ones they are read again from the first cache.
_PIECE = 256


def rotate_rows(run: Sequence[Integer], dtype: str, pairing: str, stream: bool) -> None:
    """Rotate the rows of a run; the output may be the input, but not where it is stored past the caches.

    run: x, out, cos, sin, blocks, count, rows, x_step, out_step, cos_step, sin_step, ahead, rotated, kept, large:
    addresses of first rows; address of the pairs of each block, and how many blocks and rows there are; bytes from row
    to row (cos_step 0: all rows share cos and sin, the heads of one token), how many bytes further on to fetch rows
    that will be needed soon (0: none), how many bytes of a row are rotated and how many are not, and how large the
    arrays are: 1 from a fifth of the last-level cache on, 2 beyond it. dtype: a key of FORMATS; pairing: "half" or
    "interleaved"; stream: store past the caches, row after row, and copy what is not rotated, which is otherwise the
    caller's to do.
    """
    _Rows(run[0].b, (dtype, target(), stream), pairing == "half", [number.value for number in run]).emit()


class _Rows:
    """Emits the division of rows into parts, each rotated by a function of its own.

    A function of its own for each shape of part has all registers to itself: a loop over rows that reads even one
    step from the stack waits there for stores that only look as if they might lie at the same place.

    kind: what `Memory` takes; run: LLVM values as in `rotate_rows`.
    """

    def __init__(self, b: Any, kind: tuple[Any, ...], half: bool, run: Sequence[Any]) -> None:
        x, out, cos, sin, self.blocks, self.count, rows, *steps, ahead, rotated, kept, self.large = run
        self.b, self.kind, self.half, self.stream = b, kind, half, kind[2]
        self.starts = [x, out, cos, sin]
        self.format = FORMATS[kind[0]]
        self.widest = self.format.lanes if half else self.format.lanes // 2
        self.piece = _PIECE // self.format.real_size
        self.told = cgutils.alloca_once(b, ir.ArrayType(I64, TOLD))
        self.done = cgutils.alloca_once_value(b, ir.Constant(ir.IntType(1), 0))  # the block, with the one before
        for place, value in enumerate((*self.starts, *steps, rows, ahead, rotated, kept)):
            b.store(value, cgutils.gep_inbounds(b, self.told, 0, place))

    def emit(self) -> None:
        """Emit a pass over all rows for each part of each block, or row after row.

        Row after row is for what is far: a memory line costs twice that is not filled at once.
        """
        if self.stream:
            emit = partial(Part.stream, lanes=self.widest, count=self.piece // self.widest)
            self._call("stream", emit, self.blocks, self.count)
            return
        with self.b.if_else(self._row_by_row()) as (row_after_row, passes):
            with row_after_row:
                self._row_after_row()
            with passes:
                self._blocks(self._twins_or_block if self.half else self._block)

    def _row_by_row(self) -> Any:
        """Tell whether there are several parts to a row, and rows are far enough to go one by one."""
        b = self.b
        answer = cgutils.alloca_once_value(b, ir.Constant(ir.IntType(1), 0))
        in_place = b.icmp_signed("==", *self.starts[:2])
        # Where there is no time spent on converting, reading cos and sin for each row costs nothing.
        near = b.select(self._whole_pieces(), I64(0), I64(1)) if self.format.size >= 4 else I64(1)
        least = b.select(in_place, I64(2), near)
        with b.if_then(b.icmp_signed(">=", self.large, least)):
            more = b.icmp_signed(">", self._pairs(I64(0)), I64(self.piece))
            several = b.or_(b.icmp_signed(">", self.count, I64(1)), more)
            if self.half:
                two = b.icmp_signed("==", self.count, I64(2))
                both = b.and_(two, self._are_twins(I64(0), b.sub(self.count, I64(1))))
                several = b.and_(several, b.not_(both))
            b.store(several, answer)
        return b.load(answer)

    def _whole_pieces(self) -> Any:
        """Tell whether there is one block, which consists of whole pieces."""
        b, rest = self.b, self.b.and_(self._pairs(I64(0)), I64(self.piece - 1))
        return b.and_(b.icmp_signed("==", self.count, I64(1)), b.icmp_signed("==", rest, I64(0)))

    def _row_after_row(self) -> None:
        b, count = self.b, self.piece // self.widest
        with b.if_else(self._whole_pieces()) as (pieces, blocks):
            with pieces:
                emit = partial(Part.pieces_row_by_row, lanes=self.widest, count=count)
                self._call("pieces_row_by_row", emit, I64(0), self._pairs(I64(0)))
            with blocks:
                emit = partial(Part.row_by_row, lanes=self.widest, count=count)
                self._call("row_by_row", emit, self.blocks, self.count)

    def _pairs(self, block: Any) -> Any:
        b = self.b
        return b.load(b.inttoptr(b.add(self.blocks, b.mul(block, I64(8))), I64.as_pointer()))

    def _blocks(self, rotate: Callable[[Any, Any], None]) -> None:
        b, size, real_size = self.b, self.format.size, self.format.real_size
        with cgutils.for_range(b, self.count) as loop:
            pairs = self._pairs(loop.index)
            rotate(pairs, loop.index)
            for place, width in enumerate((2 * size, 2 * size, real_size, real_size)):
                start = cgutils.gep_inbounds(b, self.told, 0, place)
                b.store(b.add(b.load(start), b.mul(pairs, I64(width))), start)

    def _are_twins(self, block: Any, following: Any) -> Any:
        """Tell whether two blocks are equal, of two vectors each."""
        b, pairs = self.b, self._pairs(block)
        fits = b.icmp_unsigned("<", b.sub(pairs, I64(self.widest + 1)), I64(self.widest))
        return b.and_(fits, b.icmp_signed("==", pairs, self._pairs(following)))

    def _twins_or_block(self, pairs: Any, block: Any) -> None:
        """Rotate a block, with the next one where these are twins: together in one pass.

        Two passes would meet the line between the blocks twice, and where there are no others fill no row at once.
        """
        b, following = self.b, self.b.add(block, I64(1))
        following = b.select(b.icmp_signed("<", following, self.count), following, I64(0))
        done = b.load(self.done)
        twins = b.and_(b.icmp_signed("!=", following, I64(0)), self._are_twins(block, following))
        twins = b.and_(twins, b.not_(done))
        b.store(twins, self.done)
        with b.if_then(twins):
            emit = partial(Part.rows, lanes=self.widest, count=2, overlap=1)
            self._call("twins", emit, I64(0), pairs, "alwaysinline", blocks=2)
        with b.if_then(b.not_(b.or_(twins, done))):
            self._block(pairs, block)

    def _block(self, pairs: Any, _: Any) -> None:
        """Rotate a block: whole pieces, then what is left in one pass, whose last vectors may overlap."""
        b, widest, whole, few = self.b, self.widest, self.piece, 2 * self.widest
        with cgutils.for_range(b, b.sdiv(pairs, I64(whole))) as loop:
            self._vectors(b.mul(loop.index, I64(whole)), widest, pairs, whole // widest)
        at = b.and_(pairs, I64(-whole))
        left, step = b.sub(pairs, at), self.format.lanes
        for most in range(few + step, whole + 1, step):
            fits = b.and_(b.icmp_signed(">", left, I64(most - step)), b.icmp_signed("<=", left, I64(most)))
            with b.if_then(fits):
                self._vectors(at, widest, pairs, most // widest, step // widest)
        with b.if_else(b.icmp_signed("==", left, I64(widest))) as (fits, others):
            with fits:
                self._vectors(at, widest, pairs, 1)
            with others, b.if_then(b.and_(b.icmp_signed("!=", left, I64(0)), b.icmp_signed("<=", left, I64(few)))):
                self._end(at, left, widest, pairs)

    def _end(self, at: Any, left: Any, lanes: int, pairs: Any) -> None:
        """Rotate the last pairs of a block, 1 to 2·lanes: in two vectors that may overlap, very few one by one."""
        b = self.b
        if lanes < FEW:
            with cgutils.for_range(b, left) as loop:
                self._vectors(b.add(at, loop.index), 1, pairs, 1)
            return
        with b.if_else(b.icmp_signed(reaches(lanes), left, I64(lanes))) as (two, fewer):
            with two:
                self._vectors(at, lanes, pairs, 2, 1)
            with fewer:
                self._end(at, left, lanes // 2, pairs)

    def _vectors(self, at: Any, lanes: int, pairs: Any, count: int, overlap: int = 0) -> None:
        # A whole piece, what most heads consist of, stands in the caller, as twins do: a call would take 3 % of a
        # decode step, and more where it is for few rows.
        where = "noinline" if overlap or lanes * count < self.piece else "alwaysinline"
        name = f"vectors_{lanes}_{count}" + "_overlapping" * bool(overlap)
        self._call(name, partial(Part.rows, lanes=lanes, count=count, overlap=overlap), at, pairs, where)

    def _call(
        self, name: str, emit: Callable[..., None], first: Any, second: Any, where: str = "noinline", blocks: int = 1
    ) -> None:
        """Call the function `name`, which `emit(part, first, second)` writes where there is none yet."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [self.told.type, I64, I64]), name)
            function.linkage = "internal"
            function.attributes.add(where)
            b = ir.IRBuilder(function.append_basic_block())
            told, *given = function.args
            emit(Part(Memory(b, *self.kind), self.half, told, blocks), *given)
            b.ret_void()
        self.b.call(function, [self.told, first, second])
