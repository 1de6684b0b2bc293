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

from rope_cpu._kernels.builder import element
from rope_cpu._kernels.codegen import target
from rope_cpu._kernels.flow import Variable, each, own_function, when, whether
from rope_cpu._kernels.formats import FORMATS, I64
from rope_cpu._kernels.integers import Integer, choose, either, number
from rope_cpu._kernels.memory import Memory
from rope_cpu._kernels.part import FEW, Part, two_of
from rope_cpu._kernels.words import spilled

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
    _Rows(run, (dtype, target(), stream), pairing == "half").emit()


class _Rows:
    """Emits the division of rows into parts, each rotated by a function of its own.

    A function of its own for each shape of part has all registers to itself: a loop over rows that reads even one
    step from the stack waits there for stores that only look as if they might lie at the same place.

    kind: what `Memory` takes; run: as in `rotate_rows`.
    """

    def __init__(self, run: Sequence[Integer], kind: tuple[str, tuple[str, str, str], bool], half: bool) -> None:
        x, out, cos, sin, self.blocks, self.count, rows, *steps, ahead, rotated, kept, self.large = run
        self.b, self.kind, self.half, self.stream = x.b, kind, half, kind[2]
        self.in_place, self.format = x == out, FORMATS[kind[0]]
        self.widest = self.format.lanes if half else self.format.lanes // 2
        self.piece = _PIECE // self.format.real_size
        self.told = spilled(self.b, (x, out, cos, sin, *steps, rows, ahead, rotated, kept))

    def emit(self) -> None:
        """Emit a pass over all rows for each part of each block, or row after row.

        Row after row is for what is far: a memory line costs twice that is not filled at once.
        """
        if self.stream:
            emit = partial(Part.stream, lanes=self.widest, count=self.piece // self.widest)
            self._call("stream", emit, self.blocks, self.count)
            return
        with whether(either(self._are_near(), self._are_one_part)) as (passes, row_after_row):
            with passes:
                self._blocks()
            with row_after_row:
                self._row_after_row()

    def _are_near(self) -> Integer:
        """Tell whether rows are not far enough to go one by one."""
        # Where there is no time spent on converting, reading cos and sin for each row costs nothing.
        least = choose(self._whole_pieces(), 0, 1) if self.format.size >= 4 else 1
        return self.large < choose(self.in_place, 2, least)

    def _are_one_part(self) -> Integer:
        """Tell whether each row is one part, or two that are rotated together."""
        one = (self.count == 1) & (self._pairs(0) <= self.piece)
        return one | ((self.count == 2) & self._are_twins(0, self.count - 1)) if self.half else one

    def _whole_pieces(self) -> Integer:
        """Tell whether there is one block, which consists of whole pieces."""
        return (self.count == 1) & (self._pairs(0) & (self.piece - 1) == 0)

    def _row_after_row(self) -> None:
        count = self.piece // self.widest
        with whether(self._whole_pieces()) as (pieces, blocks):
            with pieces:
                emit = partial(Part.pieces_row_by_row, lanes=self.widest, count=count)
                self._call("pieces_row_by_row", emit, 0, self._pairs(0))
            with blocks:
                emit = partial(Part.row_by_row, lanes=self.widest, count=count)
                self._call("row_by_row", emit, self.blocks, self.count)

    def _pairs(self, block: Integer | int) -> Integer:
        (pairs,) = (self.blocks + block * 8).words(1)
        return pairs

    def _blocks(self) -> None:
        size, real_size = self.format.size, self.format.real_size
        done = Variable(self.b, 0)  # the block, with the one before
        with each(0, self.count) as block:
            pairs = self._pairs(block)
            if self.half:
                self._twins_or_block(pairs, block, done)
            else:
                self._block(pairs)
            for place, width in enumerate((2 * size, 2 * size, real_size, real_size)):
                start = element(self.b, self.told, place)
                self.b.store((Integer(self.b, self.b.load(start)) + pairs * width).value, start)

    def _are_twins(self, block: Integer | int, following: Integer) -> Integer:
        """Tell whether two blocks are equal, of two vectors each."""
        pairs, least = self._pairs(block), self.widest + 1
        return (pairs >= least) & (pairs < least + self.widest) & (pairs == self._pairs(following))

    def _twins_or_block(self, pairs: Integer, block: Integer, done: Variable) -> None:
        """Rotate a block, with the next one where these are twins: together in one pass.

        Two passes would meet the line between the blocks twice, and where there are no others fill no row at once.
        """
        following, before = block + 1, done.now != 0
        following = choose(following < self.count, following, 0)
        twins = (following != 0) & self._are_twins(block, following) & ~before
        done.set(number(twins))
        with when(twins):
            emit = partial(Part.rows, lanes=self.widest, count=2, overlap=1)
            self._call("twins", emit, 0, pairs, "alwaysinline", blocks=2)
        with when(~(twins | before)):
            self._block(pairs)

    def _block(self, pairs: Integer) -> None:
        """Rotate a block: whole pieces, then what is left in one pass, whose last vectors may overlap."""
        widest, whole, few = self.widest, self.piece, 2 * self.widest
        with each(0, pairs // whole) as n:
            self._vectors(n * whole, widest, pairs, whole // widest)
        at = pairs & -whole
        left, step = pairs - at, self.format.lanes
        for most in range(few + step, whole + 1, step):
            with when((left > most - step) & (left <= most)):
                self._vectors(at, widest, pairs, most // widest, step // widest)
        with whether(left == widest) as (fits, others):
            with fits:
                self._vectors(at, widest, pairs, 1)
            with others, when((left != 0) & (left <= few)):
                self._end(at, left, widest, pairs)

    def _end(self, at: Integer, left: Integer, lanes: int, pairs: Integer) -> None:
        """Rotate the last pairs of a block, 1 to 2·lanes: in two vectors that may overlap, very few one by one."""
        if lanes < FEW:
            with each(0, left) as n:
                self._vectors(at + n, 1, pairs, 1)
            return
        with whether(two_of(left, lanes)) as (two, fewer):
            with two:
                self._vectors(at, lanes, pairs, 2, 1)
            with fewer:
                self._end(at, left, lanes // 2, pairs)

    def _vectors(self, at: Integer, lanes: int, pairs: Integer, count: int, overlap: int = 0) -> None:
        # A whole piece, what most heads consist of, stands in the caller, as twins do: a call would take 3 % of a
        # decode step, and more where it is for few rows.
        where = "noinline" if overlap or lanes * count < self.piece else "alwaysinline"
        name = f"vectors_{lanes}_{count}" + "_overlapping" * bool(overlap)
        self._call(name, partial(Part.rows, lanes=lanes, count=count, overlap=overlap), at, pairs, where)

    def _call(
        self,
        name: str,
        emit: Callable[..., None],
        first: Integer | int,
        second: Integer,
        where: str = "noinline",
        blocks: int = 1,
    ) -> None:
        """Call the function `name`, which `emit(part, first, second)` writes where there is none yet."""

        def write(b: Any, given: Sequence[Any]) -> None:
            told, *numbers = given
            emit(Part(Memory(b, *self.kind), self.half, told, blocks), *(Integer(b, number) for number in numbers))
            b.ret_void()

        kind = ir.FunctionType(ir.VoidType(), [self.told.type, I64, I64])
        at = first.value if isinstance(first, Integer) else I64(first)
        self.b.call(own_function(self.b.module, name, kind, write, where), [self.told, at, second.value])
