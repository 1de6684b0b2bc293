"""Cos and sin of the angles of one token, in explicit vectors: several go through the same long chain side by side.

Each step of a chain waits for the one before, four cycles and more, and a processor looks ahead for less than a hundred
steps; so what LLVM makes of a loop over single vectors leaves half of the time unused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rope_cpu._kernels.builder import kept
from rope_cpu._kernels.chains import KINDS, Kind, State
from rope_cpu._kernels.codegen import target
from rope_cpu._kernels.flow import plain_loop, whether
from rope_cpu._kernels.formats import F64, register_size, take
from rope_cpu._kernels.integers import Integer, smaller
from rope_cpu._kernels.lanes import Lanes
from rope_cpu._kernels.memory import Memory


class Token(NamedTuple):
    """What is computed of one token in one head: addresses, and bytes from one to the next.

    positions: its first coordinate; step: to another (0: one serves all). turns: what is kept of the first axis, see
    `parts_of` in `rope_cpu.angles`; turn_step: to another. owners: how many axes share out the pairs, each of which
    turns with the coordinate of one; 1: all with the first. sign: −1 turns back. cos, sin: where to write.
    """

    positions: Integer
    step: Integer
    turns: Integer
    turn_step: Integer
    axes: Integer
    owners: Integer
    pairs: Integer
    sign: Integer
    cos: Integer
    sin: Integer


def write_cos_sin(token: Token, factor: Integer, kind: str, dtype: str) -> None:
    """Write factor·cos and sign·factor·sin of the angles of a token.

    factor: address of it. kind: a key of KINDS; dtype: of FORMATS, what is written.
    """
    _Writer(token, factor, KINDS[kind], dtype).emit()


class _Writer:
    """Emits the loops over the pairs of a token; arguments as in `write_cos_sin`."""

    def __init__(self, token: Token, factor: Integer, kind: Kind, dtype: str) -> None:
        self.b, self.token, self.kind, self.target = factor.b, token, kind, target()
        self.double, self.table = (Memory(self.b, name, self.target, False) for name in ("float64", dtype))
        self.factor, self.sign = self.double.load(factor, 1), self.b.sitofp(token.sign.value, F64)

    def emit(self) -> None:
        """Emit loops over many, over some and over single pairs, of which one is run."""
        many = 32 if register_size(self.target) == 64 else 16  # four vectors or, of shorter ones, up to eight
        self._loops([many, many // 4, 1])

    def _loops(self, choices: list[int]) -> None:
        lanes, *fewer = choices
        if not fewer:
            self._loop(lanes)
            return
        with whether(self.token.pairs >= lanes) as (enough, others):
            with enough:
                self._loop(lanes)
            with others:
                self._loops(fewer)

    def _loop(self, lanes: int) -> None:
        """Write `lanes` pairs at a time; the last ones end where all do, and are in part written twice."""
        form, token = self.table.format, self.token
        with plain_loop((token.pairs + (lanes - 1)) // lanes, [0], [lanes]) as (n,):
            first = smaller(n, token.pairs - lanes)
            written = self.kind.finish(self._angle(first, lanes), self._all(self.factor, lanes))
            for place, numbers in zip((token.cos, token.sin), written, strict=True):
                narrow = numbers.to_odd() if form.size == 2 else numbers
                value = take(self.b, narrow.to(form.real).value, self.table.order(lanes))
                self.table.store(value, place + first * form.size)

    def _angle(self, first: Integer, lanes: int) -> State:
        """Return the sum over the axes."""
        state = self.kind.start(self._own_position(first, lanes), *self._turns(0, first, lanes))
        add = self.kind.add
        if add is None:
            return state

        def another(state: State, axis: Integer) -> State:
            return add(state, self._all(self._position(axis), lanes), *self._turns(axis, first, lanes))

        return self._steps(self.token.axes, state, another)

    def _own_position(self, first: Integer, lanes: int) -> Lanes:
        """Return for each pair the coordinate of the axis it turns with, or for all of them the first one."""
        start = self._all(self._position(0), lanes)

        def taken(state: State, axis: Integer) -> State:
            # Bits take other units than those that multiply.
            mask = self._kept(self.token.turns + self.token.pairs * 8 * (axis + 1) + first * 8, lanes)
            return (state[0] ^ (mask & (self._all(self._position(axis), lanes) ^ start)),)

        (position,) = self._steps(self.token.owners, (start,), taken)
        return position

    def _steps(self, axes: Integer, state: State, step: Callable[[State, Integer], State]) -> State:
        """Return what becomes of a state by one step for each axis but the first."""
        places = [kept(self.b, number.value) for number in state]

        def now() -> State:
            return tuple(Lanes(self.b, self.b.load(place), self.target) for place in places)

        with plain_loop(axes - 1, [1], [1]) as (axis,):
            for place, number in zip(places, step(now(), axis), strict=True):
                self.b.store(number.value, place)
        return now()

    def _position(self, axis: Integer | int) -> Any:
        """Return a coordinate, or the opposite to turn back."""
        return self.b.fmul(self.sign, self.double.load(self.token.positions + self.token.step * axis, 1))

    def _turns(self, axis: Integer | int, first: Integer, lanes: int) -> tuple[Lanes, Lanes]:
        """Return both parts of the turns of an axis."""
        at = self.token.turns + self.token.turn_step * axis + first * 8
        return self._kept(at, lanes), self._kept(at + self.token.pairs * 8, lanes)

    def _kept(self, at: Integer, lanes: int) -> Lanes:
        return Lanes(self.b, self.double.load(at, lanes), self.target)

    def _all(self, number: Any, lanes: int) -> Lanes:
        """Return a float64 in every lane."""
        return Lanes(self.b, take(self.b, number, [0] * lanes), self.target)
