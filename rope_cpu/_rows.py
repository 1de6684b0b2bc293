"""Numba intrinsic in explicit vectors: the rotation of rows.

LLVM's own vectoriser gives up on rows of unknown alignment that may be rotated in place, and knows no bfloat16; so the
loop over a row is emitted in vectors by hand, with the same arithmetic in every width: body and tail give the same
bits.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from rope_cpu._formats import FORMATS, I64, Memory
from rope_cpu._turn import Step, turn_half, turn_interleaved

# Bytes of cos, and as many of sin, that are held in registers at a time: four vectors, or eight when spread over
# interleaved pairs, of the 32 that AVX-512 has. With 16 shorter ones they are read again from the first cache.
_PIECE = 256


@intrinsic
def rotate_rows(typingctx: Any, run: Any, dtype: Any, pairing: Any, stream: Any) -> Any:
    """Rotate the rows of a run; the output may be the input.

    run: int64 (x, out, cos, sin, blocks, count, rows, x_step, out_step, cos_step, sin_step, ahead, large): addresses of
    first rows; address of the pairs of each block, and how many blocks and rows there are; bytes from row to row
    (cos_step 0: all rows share cos and sin, the heads of one token), how many bytes further on to fetch rows that will
    be needed soon (0: none), and whether input and output together (1) or each (2) are too large for the caches. The
    rest are string literals, which select the code. dtype: a key of FORMATS; pairing: "half" or "interleaved"; stream:
    "stream" stores past the caches, row after row.
    """
    texts = (dtype, pairing, stream)
    if not all(isinstance(text, types.StringLiteral) for text in texts):
        return None
    dtype_name, pairing_name, stream_name = (text.literal_value for text in texts)

    def codegen(context: Any, b: Any, signature: Any, args: Any) -> Any:
        kind = dtype_name, tuple(context.codegen().magic_tuple()), stream_name == "stream"
        _Rows(b, kind, pairing_name == "half", cgutils.unpack_tuple(b, args[0])).emit()
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.int64, 13), *texts), codegen


# What the functions that rotate parts are told of a run, by a pointer: the places of the row and its cos and sin, the
# steps from row to row, how many rows there are, and how far on to fetch.
_TOLD = 10


class _Rows:
    """Emits the division of rows into parts, each rotated by a function of its own.

    A function of its own for each shape of part has all registers to itself: a loop over rows that reads even one
    step from the stack waits there for stores that only look as if they might lie at the same place.

    kind: what `Memory` takes; run: LLVM values as in `rotate_rows`.
    """

    def __init__(self, b: Any, kind: tuple[Any, ...], half: bool, run: Sequence[Any]) -> None:
        x, out, cos, sin, self.blocks, self.count, self.rows, *steps, ahead, self.large = run
        self.b, self.kind, self.half, self.stream = b, kind, half, kind[2]
        self.starts, self.moves = [x, out, cos, sin], steps
        self.format = FORMATS[kind[0]]
        self.widest = self.format.lanes if half else self.format.lanes // 2
        self.piece = _PIECE // self.format.real_size
        self.told = cgutils.alloca_once(b, ir.ArrayType(I64, _TOLD))
        self.done = cgutils.alloca_once_value(b, ir.Constant(ir.IntType(1), 0))  # the block, with the one before
        self._tell(len(self.starts), [*steps, self.rows, ahead])

    def emit(self) -> None:
        """Emit a pass over all rows for each part of each block, or row after row.

        Row after row is for what is far: a memory line costs twice that is not filled at once. Where the output may be
        the input, no two vectors of a row may overlap.
        """
        if self.stream:
            self._row_after_row()
            return
        b, whole, pairs = self.b, self.piece, self._pairs(I64(0))
        alone = b.icmp_signed("==", self.count, I64(1))
        part = b.or_(b.icmp_signed("==", pairs, I64(whole)), b.icmp_signed("<=", pairs, I64(whole // 2)))
        in_place = b.icmp_signed("==", *self.starts[:2])
        even = b.and_(alone, b.icmp_signed("==", b.and_(pairs, I64(self.widest - 1)), I64(0)))
        unfit = b.or_(b.and_(part, alone), b.and_(in_place, b.not_(even)))
        never = not self.half and self.format.size == 2  # in place; 8 % faster in passes
        least = b.select(in_place, I64(3 if never else 2), I64(2 if self.half else 1))
        near = b.icmp_signed("<", self.large, least)
        with b.if_else(b.or_(unfit, near)) as (passes, row_after_row):
            with passes:
                self._blocks(self.starts, self._twins_or_block if self.half else self._block)
            with row_after_row:
                self._row_after_row()

    def _row_after_row(self) -> None:
        self._tell(len(self.starts) + len(self.moves), [I64(1)])
        with _plain_loop(self.b, self.rows, self.starts, self.moves) as starts:
            self._blocks(starts, self._row)

    def _tell(self, at: int, values: Sequence[Any]) -> None:
        for place, value in enumerate(values, at):
            self.b.store(value, cgutils.gep_inbounds(self.b, self.told, 0, place))

    def _pairs(self, block: Any) -> Any:
        b = self.b
        return b.load(b.inttoptr(b.add(self.blocks, b.mul(block, I64(8))), I64.as_pointer()))

    def _blocks(self, starts: list[Any], rotate: Callable[[Any, Any], None]) -> None:
        b, size, real_size = self.b, self.format.size, self.format.real_size
        self._tell(0, starts)
        with cgutils.for_range(b, self.count) as loop:
            pairs = self._pairs(loop.index)
            rotate(pairs, loop.index)
            for place, width in enumerate((2 * size, 2 * size, real_size, real_size)):
                start = cgutils.gep_inbounds(b, self.told, 0, place)
                b.store(b.add(b.load(start), b.mul(pairs, I64(width))), start)

    def _row(self, pairs: Any, _: Any) -> None:
        """Rotate a block of one row."""
        with self.b.if_else(self.b.icmp_signed(">=", pairs, I64(self.widest))) as (wide, narrow):
            with wide:
                self._call("row", lambda part: part.row(self.widest), I64(0), pairs)
            with narrow:
                self._end(I64(0), pairs, self.widest // 2, pairs)

    def _twins_or_block(self, pairs: Any, block: Any) -> None:
        """Rotate a block, with the next one where both are the same two overlapping vectors: together in one pass.

        Most of their loads and stores cross a line, and two passes would meet the line between the blocks twice.
        """
        b, nearly = self.b, self.widest
        following = b.add(block, I64(1))
        following = b.select(b.icmp_signed("<", following, self.count), following, I64(0))
        alike = b.icmp_signed("==", pairs, self._pairs(following))
        fits = b.and_(b.icmp_signed(">", pairs, I64(nearly)), b.icmp_signed("<", pairs, I64(2 * nearly)))
        done = b.load(self.done)
        twins = b.and_(b.and_(alike, fits), b.and_(b.not_(done), b.icmp_signed("!=", following, I64(0))))
        b.store(twins, self.done)
        with b.if_then(twins):
            self._call("twins", lambda part: part.rows(nearly, 2, overlap=True), I64(0), pairs, blocks=2)
        with b.if_then(b.not_(b.or_(twins, done))):
            self._block(pairs, block)

    def _block(self, pairs: Any, _: Any) -> None:
        """Rotate a block: in wide vectors, at its end two that overlap or a single one, as wide as fits."""
        b, whole, widest = self.b, self.piece, self.widest
        with cgutils.for_range(b, b.sdiv(pairs, I64(whole))) as loop:
            self._vectors(b.mul(loop.index, I64(whole)), widest, pairs, whole // widest)
        at = b.and_(pairs, I64(-whole))
        while (whole := whole // 2) > widest:
            part = b.and_(pairs, I64(whole))
            with b.if_then(b.icmp_signed("!=", part, I64(0))):
                self._vectors(at, widest, pairs, whole // widest)
            at = b.add(at, part)
        left = b.sub(pairs, at)
        with b.if_then(b.icmp_signed("!=", left, I64(0))):
            self._end(at, left, widest, pairs)

    def _end(self, at: Any, left: Any, lanes: int, pairs: Any) -> None:
        """Rotate the last pairs of a block, fewer than 2·lanes."""
        b = self.b
        with b.if_else(b.icmp_signed(">", left, I64(lanes))) as (two, one):
            with two:
                self._call(f"ends_{lanes}", lambda part: part.rows(lanes, 2, overlap=True), at, pairs)
            with one, b.if_else(b.icmp_signed("==", left, I64(lanes))) as (fits, narrower):
                with fits:
                    self._vectors(at, lanes, pairs, 1)
                with narrower:
                    if lanes > 1:
                        self._end(at, left, lanes // 2, pairs)

    def _vectors(self, at: Any, lanes: int, pairs: Any, count: int) -> None:
        # A whole piece, what most heads consist of, stands in the caller: a call would take 3 % of a decode step.
        where = "alwaysinline" if lanes * count == self.piece else "noinline"
        self._call(f"vectors_{lanes}_{count}", lambda part: part.rows(lanes, count), at, pairs, where)

    def _call(
        self,
        name: str,
        emit: Callable[[_Part], None],
        at: Any,
        pairs: Any,
        where: str = "noinline",
        blocks: int = 1,
    ) -> None:
        """Call the function `name`, which `emit` writes where there is none yet, for pairs of blocks from `at` on."""
        module, name = self.b.module, name + "_stream" * self.stream
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [self.told.type, I64, I64]), name)
            function.linkage = "internal"
            function.attributes.add(where)
            b = ir.IRBuilder(function.append_basic_block())
            emit(_Part(Memory(b, *self.kind), self.half, blocks, *function.args))
            b.ret_void()
        self.b.call(function, [self.told, at, pairs])


class _Part:
    """Emits the body of a function that rotates some pairs of a block, or of equal ones in a row, in all rows of a run.

    The addresses are, of each block, those of a row's halves, or of the row; the same of the output; then of each block
    cos and sin.
    """

    def __init__(self, memory: Memory, half: bool, blocks: int, told: Any, at: Any, pairs: Any) -> None:
        b, size = memory.b, memory.format.size
        x, out, cos, sin, *steps, self.count, self.ahead = (
            b.load(cgutils.gep_inbounds(b, told, 0, place)) for place in range(_TOLD)
        )
        self.b, self.memory, self.at, self.pairs = b, memory, at, pairs
        self.turn, self.width = (turn_half, 1) if half else (turn_interleaved, 2)
        # Addresses apart for the two halves, so that all that is added to them in a loop are constants.
        self.blocks, self.halves = blocks, 2 if half else 1
        self.sides, real_size = blocks * self.halves, memory.format.real_size
        apart = [b.mul(pairs, I64(side * size)) for side in range(self.sides)]
        skipped, passed = b.mul(at, I64(self.width * size)), b.mul(at, I64(real_size))
        self.starts = [b.add(b.add(base, skipped), side) for base in (x, out) for side in apart]
        for block in range(blocks):
            before = b.add(passed, b.mul(pairs, I64(block * real_size)))
            self.starts += [b.add(base, before) for base in (cos, sin)]
        self.shared = b.icmp_signed("==", steps[2], I64(0))
        self.moves = [step for step in steps[:2] for _ in apart] + steps[2:] * blocks

    def rows(self, lanes: int, count: int, overlap: bool = False) -> None:
        """Rotate, in all rows and each block, `count` vectors of pairs; overlap: the last one ends where it does."""
        b, rotated = self.b, 2 * self.sides
        indices = [I64(n * lanes) for n in range(count)]
        if overlap:
            indices[-1] = b.sub(b.sub(self.pairs, self.at), I64(lanes))

        each = list(product(range(self.blocks), indices))

        def made_ready(places: Sequence[Any]) -> list[Step]:
            return [self._step(places, i, lanes, block) for block, i in each]

        def rotate(places: Sequence[Any], ready: Sequence[Step]) -> None:
            self._fetch_ahead(places, I64(0), lanes * count)
            # All are read before any is stored: vectors that overlap find what they read as it was.
            turned = [step(self._of(block, places)) for step, (block, _) in zip(ready, each, strict=True)]
            for (block, i), values in zip(each, turned, strict=True):
                self._store(values, self._of(block, places[self.sides :]), i)

        with b.if_else(self.shared) as (shared, others):
            with shared:
                ready = made_ready(self.starts)
                with _plain_loop(b, self.count, self.starts[:rotated], self.moves[:rotated]) as places:
                    rotate(places, ready)
            with others, _plain_loop(b, self.count, self.starts, self.moves) as places:
                rotate(places, made_ready(places))

    def row(self, lanes: int) -> None:
        """Rotate one row, vector by vector; the last may overlap the one before, where the row goes elsewhere."""
        b, places = self.b, self.starts
        times, last = b.udiv(b.add(self.pairs, I64(lanes - 1)), I64(lanes)), b.sub(self.pairs, I64(lanes))
        with _plain_loop(b, times, [I64(0)], [I64(lanes)]) as (i,):
            i = b.select(b.icmp_signed("<", i, last), i, last)
            self._fetch_ahead(places, i, lanes)
            self._store(self._step(places, i, lanes)(places[: self.sides]), places[self.sides : 2 * self.sides], i)

    def _of(self, block: int, sides: Sequence[Any]) -> Sequence[Any]:
        return sides[block * self.halves : (block + 1) * self.halves]

    def _step(self, places: Sequence[Any], i: Any, lanes: int, block: int = 0) -> Step:
        cos, sin = places[2 * self.sides :][2 * block : 2 * block + 2]
        return self.turn(self.memory, cos, sin, i, lanes)

    def _store(self, values: Sequence[Any], outs: Sequence[Any], i: Any) -> None:
        for value, out in zip(values, outs, strict=True):
            self.memory.store(value, out, self.b.mul(i, I64(self.width)))

    def _fetch_ahead(self, places: Sequence[Any], i: Any, count: int) -> None:
        """Ask for the elements of `count` pairs, where rows further on are to be fetched."""
        b = self.b
        with b.if_then(b.icmp_unsigned("!=", self.ahead, I64(0))):
            for x in places[: self.sides]:
                self.memory.prefetch(b.add(x, self.ahead), b.mul(i, I64(self.width)), self.width * count)


@contextmanager
def _plain_loop(b: Any, times: Any, starts: Sequence[Any], moves: Sequence[Any]) -> Iterator[list[Any]]:
    """Emit a loop whose body sees `starts`, each further on by its move every time.

    What the body does is as long as it should be. Nothing is known of values that have been through assembly, however
    empty: so LLVM does not repeat the body, and does not make of every address in it a variable to be counted up, more
    than there are registers for.
    """
    before, loop, after = b.block, b.append_basic_block("row"), b.append_basic_block("rows.end")
    b.cbranch(b.icmp_signed(">", times, I64(0)), loop, after)
    b.position_at_end(loop)
    values = [b.phi(I64) for _ in (times, *starts)]
    left, *places = [b.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [value], False) for value in values]
    yield places
    steps = [b.add(value, move) for value, move in zip((left, *places), (I64(-1), *moves), strict=True)]
    for value, start, step in zip(values, (times, *starts), steps, strict=True):
        value.add_incoming(start, before)
        value.add_incoming(step, b.block)
    b.cbranch(b.icmp_signed(">", steps[0], I64(0)), loop, after)
    b.position_at_end(after)
