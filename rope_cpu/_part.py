"""The rotation of some pairs in all rows of a run, as the body of a function of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from rope_cpu._formats import I64, Memory
from rope_cpu._turn import Step, turn_half, turn_interleaved

# What the functions that rotate parts are told of a run, by a pointer: the places of the row and its cos and sin, the
# steps from row to row, how many rows there are, and how far on to fetch.
TOLD = 10


class Part:
    """Emits the body of a function that rotates some pairs of a block, or of equal ones in a row, in all rows of a run.

    The addresses are, of each block, those of a row's halves, or of the row; the same of the output; then of each block
    cos and sin.
    """

    def __init__(self, memory: Memory, half: bool, blocks: int, told: Any, at: Any, pairs: Any) -> None:
        b, size = memory.b, memory.format.size
        x, out, cos, sin, *steps, self.count, self.ahead = (
            b.load(cgutils.gep_inbounds(b, told, 0, place)) for place in range(TOLD)
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

    def rows(self, lanes: int, count: int, overlap: int = 0) -> None:
        """Rotate, in all rows and each block, `count` vectors of pairs; the last `overlap` of them end where it does."""
        b, rotated = self.b, 2 * self.sides
        indices = [I64(n * lanes) for n in range(count - overlap)]
        indices += [b.sub(b.sub(self.pairs, self.at), I64(n * lanes)) for n in range(overlap, 0, -1)]
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
                with plain_loop(b, self.count, self.starts[:rotated], self.moves[:rotated]) as places:
                    rotate(places, ready)
            with others, plain_loop(b, self.count, self.starts, self.moves) as places:
                rotate(places, made_ready(places))

    def row_by_row(self, lanes: int, count: int) -> None:
        """Rotate rows, `count` vectors at a time, then one by one; the last may overlap the one before."""
        b, whole = self.b, lanes * count
        done, last = b.and_(self.pairs, I64(-whole)), b.sub(self.pairs, I64(lanes))
        pieces, rest = b.udiv(self.pairs, I64(whole)), b.sub(self.pairs, done)
        vectors = b.udiv(b.add(rest, I64(lanes - 1)), I64(lanes))
        with plain_loop(b, self.count, self.starts, self.moves) as places:
            with plain_loop(b, pieces, [I64(0)], [I64(whole)]) as (i,):
                self._fetch_ahead(places, i, whole)
                for n in range(count):
                    self._rotate_at(places, b.add(i, I64(n * lanes)), lanes)
            with plain_loop(b, vectors, [done], [I64(lanes)]) as (i,):
                i = b.select(b.icmp_signed("<", i, last), i, last)
                self._fetch_ahead(places, i, lanes)
                self._rotate_at(places, i, lanes)

    def _rotate_at(self, places: Sequence[Any], i: Any, lanes: int) -> None:
        values = self._step(places, i, lanes)(places[: self.sides])
        self._store(values, places[self.sides : 2 * self.sides], i)

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
def plain_loop(b: Any, times: Any, starts: Sequence[Any], moves: Sequence[Any]) -> Iterator[list[Any]]:
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
