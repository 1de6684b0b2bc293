"""The rotation of some pairs in all rows of a run, as the body of a function of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.builder import element
from rope_cpu._kernels.flow import plain_loop, when, whether
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.memory import Memory
from rope_cpu._kernels.turn import Step, turn_half, turn_interleaved

# What the functions that rotate parts are told of a run, by a pointer: the places of the row and its cos and sin, the
# steps from row to row, how many rows there are, how far on to fetch, and how many bytes of a row are rotated and how
# many are kept as they are.
TOLD = 12
# Fewer pairs go one by one.
FEW = 4


def two_of(pairs: Integer, lanes: int) -> Integer:
    """Tell whether pairs, at most 2·lanes, are rotated as two vectors of so many that may overlap.

    FEW pairs are twice the same vector, which costs less than going one by one; of more, two shorter ones do as well.
    """
    return pairs > lanes if lanes > FEW else pairs >= lanes


class Part:
    """Emits the body of a function that rotates, in all rows of a run, some pairs of a block or all blocks.

    The addresses are, of each block, those of a row's halves, or of the row; the same of the output; then of each block
    cos and sin. told: LLVM pointer to what is told of the run. blocks: how many equal ones are rotated at a time.
    """

    def __init__(self, memory: Memory, half: bool, told: Any, blocks: int = 1) -> None:
        b = memory.b
        values = [Integer(b, b.load(element(b, told, place))) for place in range(TOLD)]
        self.starts, self.steps = values[:4], values[4:8]
        self.count, self.ahead, self.rotated, self.kept = values[8:]
        self.b, self.memory, self.size, self.real_size = b, memory, memory.format.size, memory.format.real_size
        self.turn, self.width = (turn_half, 1) if half else (turn_interleaved, 2)
        self.blocks, self.halves = blocks, 2 if half else 1
        self.sides = blocks * self.halves

    def rows(self, at: Integer, pairs: Integer, lanes: int, count: int, overlap: int = 0) -> None:
        """Rotate, in all rows, `count` vectors of pairs from pair `at` on of a block, or of each of equal ones.

        pairs: of a block; the last `overlap` vectors end where it does.
        """
        rotated = 2 * self.sides
        indices: list[Integer | int] = [n * lanes for n in range(count - overlap)]
        indices += [pairs - at - n * lanes for n in range(overlap, 0, -1)]
        starts = self._places(self.starts, pairs, at)
        moves = [step for step in self.steps[:2] for _ in range(self.sides)] + [*self.steps[2:]] * self.blocks
        with whether((self.steps[2] | self.steps[3]) == 0) as (shared, others):
            with shared:
                ready = self._made_ready(starts, indices, lanes)
                with plain_loop(self.count, starts[:rotated], moves[:rotated]) as places:
                    self._fetch_ahead(places, 0, lanes * count)
                    self._rotate(places, indices, lanes, ready, overlap)
            with others, plain_loop(self.count, starts, moves) as places:
                self._fetch_ahead(places, 0, lanes * count)
                self._rotate(places, indices, lanes, self._made_ready(places, indices, lanes), overlap)

    def pieces_row_by_row(self, at: Integer, pairs: Integer, lanes: int, count: int) -> None:
        """Rotate a block of one row after the other, `count` vectors at a time, as often as they fit."""
        with plain_loop(self.count, self.starts, self.steps) as starts:
            self._pieces(self._places(starts, pairs, at), pairs, lanes, count)

    def row_by_row(self, blocks: Integer, number: Integer, lanes: int, count: int) -> None:
        """Rotate all blocks of one row after the other; blocks: address of how many pairs each has; number: of them."""
        each_row = plain_loop(self.count, self.starts, self.steps)
        with each_row as starts, self._each_block(blocks, number, starts) as (pairs, places):
            self._pieces(places, pairs, lanes, count)
            at = pairs & -(lanes * count)
            left = pairs - at
            with when(left != 0):
                self._rest(places, at, left, lanes, lanes * count // 2)

    def stream(self, blocks: Integer, number: Integer, lanes: int, count: int) -> None:
        """Rotate all blocks of one row after the other and copy what is kept of it, each byte in its turn.

        A line that is also stored to in another way, or not filled at once, takes many times as long. The output is
        not the input, so that the last vector of a block may begin before the one before it ends.
        """
        with plain_loop(self.count, self.starts, self.steps) as starts:
            with self._each_block(blocks, number, starts) as (pairs, places):
                self._pieces_past_caches(places, pairs, lanes, count)
                with when(pairs & (lanes - 1) != 0), whether(pairs > lanes) as (fits, few):
                    with fits:
                        self._vectors(places, [pairs - lanes], lanes)
                    with few:
                        self._rest(places, 0, pairs, lanes, lanes // 2)
            self._copy(*(start + self.rotated for start in starts[:2]))

    def _copy(self, x: Integer, out: Integer) -> None:
        """Copy what is kept of a row in words of 8 bytes, the last of which may begin in the one before it."""
        with when(self.kept != 0):
            with plain_loop((self.kept - 1) >> 3, [x, out], [8, 8]) as word:
                self.memory.copy_word(*word)
            last = self.kept - 8
            self.memory.copy_word(x + last, out + last)

    @contextmanager
    def _each_block(
        self, blocks: Integer, number: Integer, starts: Sequence[Integer]
    ) -> Iterator[tuple[Integer, list[Integer]]]:
        """Emit a loop over the blocks of a row, whose body sees how many pairs there are and its addresses."""
        moves: list[Integer | int] = [8]
        with plain_loop(number, [blocks, *starts], moves) as (block, *of_block):
            (pairs,) = block.words(1)
            moves += [pairs * width for width in (2 * self.size, 2 * self.size, self.real_size, self.real_size)]
            yield pairs, self._places(of_block, pairs, 0)

    def _pieces(
        self, places: Sequence[Integer], pairs: Integer, lanes: int, count: int, start: Integer | int = 0
    ) -> None:
        """Rotate `count` vectors of pairs at a time, as often as they fit, from pair `start` on, or the first."""
        whole = lanes * count
        with plain_loop((pairs - start) // whole, [start], [whole]) as (at,):
            self._vectors(places, [at + n * lanes for n in range(count)], lanes)

    def _pieces_past_caches(self, places: Sequence[Integer], pairs: Integer, lanes: int, count: int) -> None:
        """Rotate whole vectors of pairs, stored whole or 16 bytes at a time where these are aligned.

        One that is not aligned leaves a line unfinished, so that of halves `count` neighbours had better go together.
        """
        memory, together = self.memory, count if self.halves == 2 else 1
        addresses, unknown = reduce(or_, places[self.sides : 2 * self.sides]), memory.aligned

        def neighbours() -> None:
            self._pieces(places, pairs, lanes, together)
            if together > 1:
                self._pieces(places, pairs, lanes, 1, pairs & -(lanes * together))

        def aligned(size: int) -> Integer:
            return addresses & (size - 1) == 0

        whole = lanes * self.width * self.size
        with whether(aligned(whole)) as (fits, others):
            with fits:
                memory.aligned = whole
                self._pieces(places, pairs, lanes, 1)
            with others, whether(aligned(16)) as (parts, words):
                with parts:
                    memory.aligned = 16
                    neighbours()
                with words:
                    memory.aligned = unknown
                    neighbours()

    def _rest(self, places: Sequence[Integer], at: Integer | int, pairs: Integer, lanes: int, most: int) -> None:
        """Rotate the last pairs of a block, at most 2·most: `most` from the first on and as many to the last."""
        lanes = min(lanes, most)
        if most < FEW:
            with plain_loop(pairs, [at], [1]) as (i,):
                self._vectors(places, [i], 1)
            return
        with whether(two_of(pairs, most)) as (fits, fewer):
            with fits:
                ends, ahead = pairs - most + at, range(0, most, lanes)
                self._vectors(places, [start + n for start in (at, ends) for n in ahead], lanes, len(ahead))
            with fewer:
                self._rest(places, at, pairs, lanes, most // 2)

    def _vectors(
        self, places: Sequence[Integer], indices: Sequence[Integer | int], lanes: int, overlap: int = 0
    ) -> None:
        self._fetch_ahead(places, indices[0], lanes * len(indices))
        self._rotate(places, indices, lanes, self._made_ready(places, indices, lanes), overlap)

    def _places(self, starts: Sequence[Integer], pairs: Integer, at: Integer | int) -> list[Integer]:
        """Return the addresses of pair `at` of each block, from those of the first one's x, out, cos and sin."""
        # Addresses apart for the two halves, so that all that is added to them in a loop are constants.
        apart = [pairs * (side * self.size) if side else 0 for side in range(self.sides)]
        places = [base + at * (self.width * self.size) + side for base in starts[:2] for side in apart]
        for block in range(self.blocks):
            before = pairs * (block * self.real_size) if block else 0
            places += [base + at * self.real_size + before for base in starts[2:]]
        return places

    def _made_ready(self, places: Sequence[Integer], indices: Sequence[Integer | int], lanes: int) -> list[list[Step]]:
        cos_sin, size = places[2 * self.sides :], self.real_size
        return [
            [self.turn(self.memory, cos + i * size, sin + i * size, lanes) for i in indices]
            for cos, sin in zip(cos_sin[::2], cos_sin[1::2], strict=True)
        ]

    def _rotate(
        self,
        places: Sequence[Integer],
        indices: Sequence[Integer | int],
        lanes: int,
        ready: list[list[Step]],
        overlap: int,
    ) -> None:
        """Rotate vectors of pairs of each block in one row; overlap: the last so many may lie over as many before them.

        Pairs side by side had better be stored one vector after the other, and halves too where registers do not hold
        them all; but not past the caches, where each may leave a line unfinished.
        """
        few = self.memory.few_registers and not self.memory.stream
        one_by_one = self.blocks == 1 and (few or (self.halves == 1 and not overlap))
        alone = len(indices) - 2 * overlap if one_by_one else 0
        for n in range(alone):
            self._rotate_together(places, indices[n : n + 1], lanes, [ready[0][n : n + 1]])
        if alone < len(indices):
            self._rotate_together(places, indices[alone:], lanes, [steps[alone:] for steps in ready])

    def _rotate_together(
        self, places: Sequence[Integer], indices: Sequence[Integer | int], lanes: int, ready: list[list[Step]]
    ) -> None:
        """Read all of these vectors before any is stored: those that overlap find what they read as it was.

        Both go line by line: with the halves in turn, what does not fit the last-level cache takes up to 1.4 times as
        long.
        """
        pair, given = self.width * self.size, []
        for x in places[: self.sides]:
            given.append([self.memory.load(x + i * pair, self.width * lanes) for i in indices])
            _keep_order(self.b)
        turned: list[Sequence[Any]] = []
        for block, steps in enumerate(ready):
            halves = given[block * self.halves : (block + 1) * self.halves]
            turned += zip(*(step(values) for step, *values in zip(steps, *halves, strict=True)), strict=True)
        for out, values in zip(places[self.sides :], turned, strict=False):
            for i, value in zip(indices, values, strict=True):
                self.memory.store(value, out + i * pair)

    def _fetch_ahead(self, places: Sequence[Integer], i: Integer | int, count: int) -> None:
        """Ask for the elements of `count` pairs, where rows further on are to be fetched."""
        pair = self.width * self.size
        with when(self.ahead != 0):
            for x in places[: self.sides]:
                self.memory.prefetch(x + self.ahead + i * pair, count * pair)


def _keep_order(b: Any) -> None:
    """Keep what is read before apart from what is read after, in LLVM's eyes."""
    b.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
