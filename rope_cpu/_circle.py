"""Cos and sin of the angles of one token, in explicit vectors: several go through the same long chain side by side.

Each step of a chain waits for the one before, four cycles and more, and a processor looks ahead for less than a hundred
steps; so what LLVM makes of a loop over single vectors leaves half of the time unused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from rope_cpu._flow import plain_loop, whether
from rope_cpu._formats import F32, F64, I32, I64, Memory, vector
from rope_cpu._integers import Integer, smaller
from rope_cpu._lanes import Lanes, exact_sum
from rope_cpu._words import target

# 2π, and what float64 leaves of it; the Taylor coefficients of sin and cos, enough for an angle of ⅛ turn.
_TWO_PI, _TWO_PI_REST = 6.283185307179586, 2.4492935982947064e-16
_SIN = tuple((-1.0) ** n / factorial(2 * n + 1) for n in range(8, 0, -1))
_COS = tuple((-1.0) ** n / factorial(2 * n) for n in range(8, 0, -1))
# The polynomials in r² nearest to sin(πr) / r, to 6e-16, and to cos(πr), to 1.2e-16 in float64, for |r| up to ½.
_HALF_SIN = (
    -2.1133801443867396e-05, 0.00046598716815069677, -0.007370364378905986, 0.08214587882523941,
    -0.5992645288260054, 2.5501640398619, -5.167712780049786, 3.1415926535897927,
)  # fmt: skip
_HALF_COS = (
    4.1495917001716555e-06, -0.00010456658073600429, 0.0019295562835931208, -0.025806888739352957,
    0.23533063012980837, -1.3352627688434646, 4.058712126416498, -4.934802200544676, 1.0,
)  # fmt: skip
# 1 / 2π in three float64: the turns of an angle of one radian (OEIS A086201).
RADIAN = (0.15915494309189535, -9.839338337591243e-18, -5.360718141446502e-34)

# What is known of an angle before all axes are added: numbers that add up to it.
State = tuple[Lanes, ...]


class Kind(NamedTuple):
    """How angles are computed and what of them is written.

    start: (position, high, low) of the first axis → state. add: (state, position, high, low) of another. finish:
    (state, factor) → factor·cos and factor·sin.
    """

    start: Callable[[Lanes, Lanes, Lanes], State]
    add: Callable[[State, Lanes, Lanes, Lanes], State]
    finish: Callable[[State, Lanes], tuple[Lanes, Lanes]]


def _polynomial(z: Lanes, coefficients: tuple[float, ...]) -> Lanes:
    """Return the polynomial in z, given by its coefficients from the highest on."""
    result = z.muladd(*coefficients[:2])
    for coefficient in coefficients[2:]:
        result = result.muladd(z, coefficient)
    return result


def _turns(position: Lanes | float, high: Lanes, low: Lanes) -> State:
    """Return position·(high + low), less whole turns, in two parts."""
    product, lost = high.product(position)
    return product - product.rounded(), low.muladd(position, lost)


def _add_exactly(state: State, position: Lanes | float, high: Lanes, low: Lanes) -> State:
    """Add position·(high + low), less whole turns; what rounding loses of the sum goes to the rest."""
    (turns, rest), (part, more) = state, _turns(position, high, low)
    total, lost = exact_sum(turns, part)
    return total, rest + (lost + more)


def _exactly(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin to 1.25 units of 2^-53."""
    turns, rest = state
    total = turns + rest
    tail = (turns - total) + rest
    quarter = (total * 4.0).rounded()
    r = quarter.muladd(-0.25, total)
    z, lost = r.product(_TWO_PI)
    dz = r.muladd(_TWO_PI_REST, lost) + tail * _TWO_PI
    z2 = z * z
    sine = z + (z * z2).muladd(_polynomial(z2, _SIN), dz)
    cosine = z2.muladd(_polynomial(z2, _COS), -z * dz) + 1.0
    # A quarter turn swaps the two and a half turn negates both.
    quarter -= (quarter * 0.25).rounded() * 4.0
    square = quarter * quarter
    even = square.muladd(-0.5, 1.0)
    cosine, sine = square.where(1.0, -quarter * sine, even * cosine), square.where(1.0, quarter * cosine, even * sine)
    return factor * cosine, factor * sine


def _sum(position: Lanes, high: Lanes, low: Lanes) -> State:
    """Return the same as one number: what rounding loses, 2^-54 of a turn, is far below what float32 rounds away."""
    return (low.muladd(position, high.less_whole(position)),)


def _add(state: State, position: Lanes, high: Lanes, low: Lanes) -> State:
    """Add the same to one number."""
    return (state[0] + _sum(position, high, low)[0],)


def _nearly(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin to 2.5e-15 of the factor, from those of half the angle, which lies within a quarter turn."""
    r = state[0] - state[0].rounded()
    z = r * r
    s, c = r * _polynomial(z, _HALF_SIN), _polynomial(z, _HALF_COS)
    twice = s * (factor + factor)
    return (-s).muladd(twice, factor), twice * c


def _model_start(position: Lanes, frequency: Lanes, _: Lanes) -> State:
    """Return the float32 product position·frequency, as a float32 model has it."""
    return (position.to(F32) * frequency.to(F32),)


def _model_add(state: State, position: Lanes, frequency: Lanes, _: Lanes) -> State:
    """Add the same, in float32."""
    return (state[0] + position.to(F32) * frequency.to(F32),)


def _of_model(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin rounded to float32 and multiplied there, as a float32 model has them."""
    angle = state[0].to(F64)
    none = angle.all(0.0)
    exact = _add_exactly(_turns(RADIAN[0], angle, none), RADIAN[1], angle, none)
    cos, sin = _exactly(exact, factor.all(1.0))
    return cos.to(F32) * factor.to(F32), sin.to(F32) * factor.to(F32)


_KINDS = {
    "float32": Kind(_sum, _add, _nearly),
    "float64": Kind(_turns, _add_exactly, _exactly),
    "model": Kind(_model_start, _model_add, _of_model),
}


def write_circles(token: Sequence[Integer], factor: Integer, kind: str, dtype: str) -> None:
    """Write factor·cos and sign·factor·sin of the angles of a token in one head.

    token: positions, step, turns, turn_step, axes, pairs, sign, cos, sin: the address of its first coordinate and the
    bytes to that of the next axis (0: one serves all); the address of the turns of the first axis, high parts and then
    as many low ones, and the bytes to those of the next; addresses to write to. factor: address of it. kind: a key of
    _KINDS; dtype: of FORMATS, what is written.
    """
    _Token(_KINDS[kind], dtype, factor, *token).emit()


class _Token:
    """Emits the loop over the pairs of a token; arguments as in `write_circles`."""

    def __init__(self, kind: Kind, dtype: str, factor: Integer, *token: Integer) -> None:
        self.b, self.kind, self.target = factor.b, kind, target()
        self.double, self.table = (Memory(self.b, name, self.target, False) for name in ("float64", dtype))
        self.positions, self.step, self.turns, self.turn_step, self.axes, self.pairs, sign, *self.places = token
        self.factor, self.sign = self.double.load(factor, 1), self.b.sitofp(sign.value, F64)

    def emit(self) -> None:
        """Emit loops over many, over some and over single pairs, of which one is run."""
        many = 32 if "+avx512f" in self.target[2].split(",") else 16  # four vectors or, of shorter ones, up to eight
        self._loops([many, many // 4, 1])

    def _loops(self, choices: list[int]) -> None:
        lanes, *fewer = choices
        if not fewer:
            self._loop(lanes)
            return
        with whether(self.pairs >= lanes) as (enough, others):
            with enough:
                self._loop(lanes)
            with others:
                self._loops(fewer)

    def _loop(self, lanes: int) -> None:
        """Write `lanes` pairs at a time; the last ones end where all do, and are in part written twice."""
        form = self.table.format
        with plain_loop((self.pairs + (lanes - 1)) // lanes, [0], [lanes]) as (n,):
            first = smaller(n, self.pairs - lanes)
            written = self.kind.finish(self._angle(first, lanes), self._all(self.factor, lanes))
            for place, numbers in zip(self.places, written, strict=True):
                narrow = numbers.to_odd() if form.size == 2 else numbers
                self.table.store(narrow.to(form.real).value, place + first * form.size)

    def _angle(self, first: Integer, lanes: int) -> State:
        """Return the sum over the axes."""
        b = self.b
        state = self.kind.start(*self._axis(0, first, lanes))
        kept = [cgutils.alloca_once_value(b, number.value) for number in state]
        with plain_loop(self.axes - 1, [1], [1]) as (axis,):
            before = tuple(Lanes(b, b.load(place), self.target) for place in kept)
            for place, number in zip(kept, self.kind.add(before, *self._axis(axis, first, lanes)), strict=True):
                b.store(number.value, place)
        return tuple(Lanes(b, b.load(place), self.target) for place in kept)

    def _axis(self, axis: Integer | int, first: Integer, lanes: int) -> tuple[Lanes, Lanes, Lanes]:
        """Return the coordinate of an axis, or the opposite to turn back, and the parts of its turns."""
        at = self.turns + self.turn_step * axis + first * 8
        position = self.b.fmul(self.sign, self.double.load(self.positions + self.step * axis, 1))
        high, low = (Lanes(self.b, self.double.load(part, lanes), self.target) for part in (at, at + self.pairs * 8))
        return self._all(position, lanes), high, low

    def _all(self, number: Any, lanes: int) -> Lanes:
        """Return a float64 in every lane."""
        if lanes > 1:
            several = vector(F64, lanes)
            one = self.b.insert_element(ir.Constant(several, ir.Undefined), number, I64(0))
            number = self.b.shuffle_vector(one, one, ir.Constant(vector(I32, lanes), [0] * lanes))
        return Lanes(self.b, number, self.target)
