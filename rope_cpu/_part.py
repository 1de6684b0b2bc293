"""The rotation of some pairs in all rows of a run, as the body of a function of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from rope_cpu._formats import I64, Memory
from rope_cpu._turn import Step, turn_half, turn_interleaved

# What the functions that rotate parts are told of a run, by a pointer: the places of the row and its cos and sin, the
# steps from row to row, how many rows there are, how far on to fetch, and how many bytes of a row are rotated and how
# many are kept as they are.
TOLD = 12
# Fewer pairs go one by one.
FEW = 4


def reaches(lanes: int) -> str:
    """Return what pairs must be, compared with `lanes`, to be rotated as two vectors of so many that overlap.

    FEW pairs are twice the same vector, which costs less than going one by one; of more, two shorter ones do as well.
    """
    return ">" if lanes > FEW else ">="


class Part:
    """Emits the body of a function that rotates, in all rows of a run, some pairs of a block or all blocks.

    The addresses are, of each block, those of a row's halves, or of the row; the same of the output; then of each block
    cos and sin. blocks: how many equal ones are rotated at a time.
    """

    def __init__(self, memory: Memory, half: bool, told: Any, blocks: int = 1) -> None:
        b = memory.b
        values = [b.load(cgutils.gep_inbounds(b, told, 0, place)) for place in range(TOLD)]
        self.starts, self.steps = values[:4], values[4:8]
        self.count, self.ahead, self.rotated, self.kept = values[8:]
        self.b, self.memory = b, memory
        self.turn, self.width = (turn_half, 1) if half else (turn_interleaved, 2)
        self.blocks, self.halves = blocks, 2 if half else 1
        self.sides = blocks * self.halves

    def rows(self, at: Any, pairs: Any, lanes: int, count: int, overlap: int = 0) -> None:
        """Rotate, in all rows, `count` vectors of pairs from pair `at` on of a block, or of each of equal ones.

        pairs: of a block; the last `overlap` vectors end where it does.
        """
        b, rotated = self.b, 2 * self.sides
        indices = [I64(n * lanes) for n in range(count - overlap)]
        indices += [b.sub(b.sub(pairs, at), I64(n * lanes)) for n in range(overlap, 0, -1)]
        starts = self._places(self.starts, pairs, at)
        moves = [step for step in self.steps[:2] for _ in range(self.sides)] + self.steps[2:] * self.blocks
        with b.if_else(b.icmp_signed("==", self.steps[2], I64(0))) as (shared, others):
            with shared:
                ready = self._made_ready(starts, indices, lanes)
                with plain_loop(b, self.count, starts[:rotated], moves[:rotated]) as places:
                    self._fetch_ahead(places, I64(0), lanes * count)
                    self._rotate(places, indices, lanes, ready, not overlap)
            with others, plain_loop(b, self.count, starts, moves) as places:
                self._fetch_ahead(places, I64(0), lanes * count)
                self._rotate(places, indices, lanes, self._made_ready(places, indices, lanes), not overlap)

    def pieces_row_by_row(self, at: Any, pairs: Any, lanes: int, count: int) -> None:
        """Rotate a block of one row after the other, `count` vectors at a time, as often as they fit."""
        with plain_loop(self.b, self.count, self.starts, self.steps) as starts:
            self._pieces(self._places(starts, pairs, at), pairs, lanes, count)

    def row_by_row(self, blocks: Any, number: Any, lanes: int, count: int) -> None:
        """Rotate all blocks of one row after the other; blocks: address of how many pairs each has; number: of them."""
        b, each_row = self.b, plain_loop(self.b, self.count, self.starts, self.steps)
        with each_row as starts, self._each_block(blocks, number, starts) as (pairs, places):
            self._pieces(places, pairs, lanes, count)
            at = b.and_(pairs, I64(-lanes * count))
            left = b.sub(pairs, at)
            with b.if_then(b.icmp_signed("!=", left, I64(0))):
                self._rest(places, at, left, lanes, lanes * count // 2)

    def stream(self, blocks: Any, number: Any, lanes: int, count: int) -> None:
        """Rotate all blocks of one row after the other and copy what is kept of it, each byte in its turn.

        A line that is also stored to in another way, or not filled at once, takes many times as long. The output is
        not the input, so that the last vector of a block may begin before the one before it ends.
        """
        b = self.b
        with plain_loop(b, self.count, self.starts, self.steps) as starts:
            with self._each_block(blocks, number, starts) as (pairs, places):
                self._pieces_past_caches(places, pairs, lanes, count)
                uneven = b.icmp_signed("!=", b.and_(pairs, I64(lanes - 1)), I64(0))
                with b.if_then(uneven), b.if_else(b.icmp_signed(">", pairs, I64(lanes))) as (fits, few):
                    with fits:
                        self._vectors(places, [b.sub(pairs, I64(lanes))], lanes)
                    with few:
                        self._rest(places, I64(0), pairs, lanes, lanes // 2)
            self._copy(*(b.add(start, self.rotated) for start in starts[:2]))

    def _copy(self, x: Any, out: Any) -> None:
        """Copy what is kept of a row in words of 8 bytes, the last of which may begin in the one before it."""
        b = self.b
        with b.if_then(b.icmp_signed("!=", self.kept, I64(0))):
            words = b.ashr(b.sub(self.kept, I64(1)), I64(3))
            with plain_loop(b, words, [x, out], [I64(8), I64(8)]) as word:
                self.memory.copy_word(*word)
            last = b.sub(self.kept, I64(8))
            self.memory.copy_word(b.add(x, last), b.add(out, last))

    @contextmanager
    def _each_block(self, blocks: Any, number: Any, starts: Sequence[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Emit a loop over the blocks of a row, whose body sees how many pairs there are and its addresses."""
        b, size, real_size = self.b, self.memory.format.size, self.memory.format.real_size
        moves = [I64(8)]
        with plain_loop(b, number, [blocks, *starts], moves) as (block, *of_block):
            pairs = b.load(b.inttoptr(block, I64.as_pointer()))
            moves += [b.mul(pairs, I64(width)) for width in (2 * size, 2 * size, real_size, real_size)]
            yield pairs, self._places(of_block, pairs, I64(0))

    def _pieces(self, places: Sequence[Any], pairs: Any, lanes: int, count: int, start: Any = None) -> None:
        """Rotate `count` vectors of pairs at a time, as often as they fit, from pair `start` on, or the first."""
        start = I64(0) if start is None else start
        b, whole = self.b, lanes * count
        with plain_loop(b, b.udiv(b.sub(pairs, start), I64(whole)), [start], [I64(whole)]) as (at,):
            self._vectors(places, [b.add(at, I64(n * lanes)) for n in range(count)], lanes, apart=True)

    def _pieces_past_caches(self, places: Sequence[Any], pairs: Any, lanes: int, count: int) -> None:
        """Rotate whole vectors of pairs, stored whole or 16 bytes at a time where these are aligned.

        One that is not aligned leaves a line unfinished, so that of halves `count` neighbours had better go together.
        """
        b, memory, together = self.b, self.memory, count if self.halves == 2 else 1
        addresses, unknown = reduce(b.or_, places[self.sides : 2 * self.sides]), memory.aligned

        def neighbours() -> None:
            self._pieces(places, pairs, lanes, together)
            if together > 1:
                self._pieces(places, pairs, lanes, 1, b.and_(pairs, I64(-lanes * together)))

        def aligned(size: int) -> Any:
            return b.icmp_signed("==", b.and_(addresses, I64(size - 1)), I64(0))

        whole = lanes * self.width * memory.format.size
        with b.if_else(aligned(whole)) as (fits, others):
            with fits:
                memory.aligned = whole
                self._pieces(places, pairs, lanes, 1)
            with others, b.if_else(aligned(16)) as (parts, words):
                with parts:
                    memory.aligned = 16
                    neighbours()
                with words:
                    memory.aligned = unknown
                    neighbours()

    def _rest(self, places: Sequence[Any], at: Any, pairs: Any, lanes: int, most: int) -> None:
        """Rotate the last pairs of a block, at most 2·most: `most` from the first on and as many to the last."""
        b, lanes = self.b, min(lanes, most)
        if most < FEW:
            with plain_loop(b, pairs, [at], [I64(1)]) as (i,):
                self._vectors(places, [i], 1)
            return
        with b.if_else(b.icmp_signed(reaches(most), pairs, I64(most))) as (fits, fewer):
            with fits:
                ends, ahead = b.add(at, b.sub(pairs, I64(most))), range(0, most, lanes)
                self._vectors(places, [b.add(start, I64(n)) for start in (at, ends) for n in ahead], lanes)
            with fewer:
                self._rest(places, at, pairs, lanes, most // 2)

    def _vectors(self, places: Sequence[Any], indices: Sequence[Any], lanes: int, apart: bool = False) -> None:
        self._fetch_ahead(places, indices[0], lanes * len(indices))
        self._rotate(places, indices, lanes, self._made_ready(places, indices, lanes), apart)

    def _places(self, starts: Sequence[Any], pairs: Any, at: Any) -> list[Any]:
        """Return the addresses of pair `at` of each block, from those of the first one's x, out, cos and sin."""
        b, size, real_size = self.b, self.memory.format.size, self.memory.format.real_size
        # Addresses apart for the two halves, so that all that is added to them in a loop are constants.
        apart = [b.mul(pairs, I64(side * size)) for side in range(self.sides)]
        skipped, passed = b.mul(at, I64(self.width * size)), b.mul(at, I64(real_size))
        places = [b.add(b.add(base, skipped), side) for base in starts[:2] for side in apart]
        for block in range(self.blocks):
            before = b.add(passed, b.mul(pairs, I64(block * real_size)))
            places += [b.add(base, before) for base in starts[2:]]
        return places

    def _made_ready(self, places: Sequence[Any], indices: Sequence[Any], lanes: int) -> list[list[Step]]:
        cos_sin = places[2 * self.sides :]
        return [
            [self.turn(self.memory, cos, sin, i, lanes) for i in indices]
            for cos, sin in zip(cos_sin[::2], cos_sin[1::2], strict=True)
        ]

    def _rotate(
        self, places: Sequence[Any], indices: Sequence[Any], lanes: int, ready: list[list[Step]], apart: bool
    ) -> None:
        """Rotate vectors of pairs of each block in one row; apart: they do not overlap.

        All are read before any is stored: vectors that overlap find what they read as it was. Both go line by line:
        with the halves in turn, what does not fit the last-level cache takes up to 1.4 times as long. Pairs side by
        side do so in any case, and had better be stored one vector after the other.
        """
        if apart and self.halves == self.blocks == 1 < len(indices):
            for i, step in zip(indices, *ready, strict=True):
                self._rotate(places, [i], lanes, [[step]], apart)
            return
        given = []
        for x in places[: self.sides]:
            given.append([self._load(x, i, lanes) for i in indices])
            _keep_order(self.b)
        turned: list[Sequence[Any]] = []
        for block, steps in enumerate(ready):
            halves = given[block * self.halves : (block + 1) * self.halves]
            turned += zip(*(step(values) for step, *values in zip(steps, *halves, strict=True)), strict=True)
        for out, values in zip(places[self.sides :], turned, strict=False):
            for i, value in zip(indices, values, strict=True):
                self.memory.store(value, out, self.b.mul(i, I64(self.width)))

    def _load(self, x: Any, i: Any, lanes: int) -> Any:
        return self.memory.load(x, self.b.mul(i, I64(self.width)), self.width * lanes)

    def _fetch_ahead(self, places: Sequence[Any], i: Any, count: int) -> None:
        """Ask for the elements of `count` pairs, where rows further on are to be fetched."""
        b = self.b
        with b.if_then(b.icmp_unsigned("!=", self.ahead, I64(0))):
            for x in places[: self.sides]:
                self.memory.prefetch(b.add(x, self.ahead), b.mul(i, I64(self.width)), self.width * count)


def _keep_order(b: Any) -> None:
    """Keep what is read before apart from what is read after, in LLVM's eyes."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


@contextmanager
def plain_loop(b: Any, times: Any, starts: Sequence[Any], moves: Sequence[Any]) -> Iterator[list[Any]]:
    """Emit a loop whose body sees `starts`, each further on by its move every time; the body may add to the moves.

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
