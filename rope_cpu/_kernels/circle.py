"""Cos and sin of the angles of one token, in explicit vectors: several go through the same long chain side by side.

Each step of a chain waits for the one before, four cycles and more, and a processor looks ahead for less than a hundred
steps; so what LLVM makes of a loop over single vectors leaves half of the time unused.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from rope_cpu._kernels.flow import plain_loop, whether
from rope_cpu._kernels.formats import F32, F64, I32, I64, Memory, vector
from rope_cpu._kernels.integers import Integer, smaller
from rope_cpu._kernels.lanes import Lanes, exact_sum
from rope_cpu._kernels.words import target

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

# Where frequencies are at most SLOW and positions below NEAR, an angle has less than 2^33 turns. What is left of it
# without whole turns is then within ½ + 2^-21, and need not be rounded once more.
SLOW, NEAR = 16.0, 2.0**31

# What is known of an angle before all axes are added: numbers that add up to it.
State = tuple[Lanes, ...]


class Kind(NamedTuple):
    """How angles are computed and what of them is written.

    start: (position, high, low) of the first axis → state. finish: (state, factor) → factor·cos and factor·sin. add:
    (state, position, high, low) of another axis; None: there is none. near: what to do where turns are few.
    """

    start: Callable[[Lanes, Lanes, Lanes], State]
    finish: Callable[[State, Lanes], tuple[Lanes, Lanes]]
    add: Callable[[State, Lanes, Lanes, Lanes], State] | None = None
    near: Kind | None = None


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


def _near(position: Lanes, high: Lanes, low: Lanes) -> State:
    """Return the same where turns are few; it lies within half a turn."""
    return (low.muladd(position, high.less_whole(position, near=True)),)


def _add(state: State, position: Lanes, high: Lanes, low: Lanes) -> State:
    """Add the same to one number."""
    return (state[0] + _sum(position, high, low)[0],)


def _half(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin to 2.5e-15 of the factor, from those of half the angle, which lies within a quarter turn."""
    (r,) = state
    z = r * r
    s, c = r * _polynomial(z, _HALF_SIN), _polynomial(z, _HALF_COS)
    twice = s * (factor + factor)
    return (-s).muladd(twice, factor), twice * c


def _half_of_any(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return the same of an angle of any size."""
    return _half((state[0] - state[0].rounded(),), factor)


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


KINDS = {
    "usual": Kind(_sum, _half_of_any, near=Kind(_near, _half)),
    "any": Kind(_sum, _half_of_any, _add),
    "exact": Kind(_turns, _exactly, _add_exactly),
    "model": Kind(_model_start, _of_model, _model_add),
}


class Token(NamedTuple):
    """What is computed of one token in one head: addresses, and bytes from one to the next.

    positions: its first coordinate; step: to another (0: one serves all). turns: what is kept of the first axis, see
    `angles.parts`; turn_step: to another. weights: how many axes share out the pairs, of which each turns with the
    coordinate of one; 0: all with the first. near: whether all coordinates are below NEAR. sign: −1 turns back. cos,
    sin: where to write.
    """

    positions: Integer
    step: Integer
    turns: Integer
    turn_step: Integer
    axes: Integer
    weights: Integer
    pairs: Integer
    near: Integer
    sign: Integer
    cos: Integer
    sin: Integer


def write_circles(token: Token, factor: Integer, kind: str, dtype: str) -> None:
    """Write factor·cos and sign·factor·sin of the angles of a token.

    factor: address of it. kind: a key of KINDS; dtype: of FORMATS, what is written.
    """
    _Writer(token, factor, KINDS[kind], dtype).emit()


class _Writer:
    """Emits the loops over the pairs of a token; arguments as in `write_circles`."""

    def __init__(self, token: Token, factor: Integer, kind: Kind, dtype: str) -> None:
        self.b, self.token, self.kind, self.target = factor.b, token, kind, target()
        self.double, self.table = (Memory(self.b, name, self.target, False) for name in ("float64", dtype))
        self.factor, self.sign = self.double.load(factor, 1), self.b.sitofp(token.sign.value, F64)

    def emit(self) -> None:
        """Emit loops over many, over some and over single pairs, of which one is run.

        Where there is something else to do for near positions, many pairs are for these alone.
        """
        many = 32 if "+avx512f" in self.target[2].split(",") else 16  # four vectors or, of shorter ones, up to eight
        kind, enough = self.kind, self.token.pairs >= many
        with whether(enough & (self.token.near != 0) if kind.near else enough) as (yes, no):
            with yes:
                self._loop(many, kind.near or kind)
            with no, whether(self.token.pairs >= many // 4) as (some, single):
                with some:
                    self._loop(many // 4, kind)
                with single:
                    self._loop(1, kind)

    def _loop(self, lanes: int, kind: Kind) -> None:
        """Write `lanes` pairs at a time; the last ones end where all do, and are in part written twice."""
        form, token = self.table.format, self.token
        with plain_loop((token.pairs + (lanes - 1)) // lanes, [0], [lanes]) as (n,):
            first = smaller(n, token.pairs - lanes)
            written = kind.finish(self._angle(kind, first, lanes), self._all(self.factor, lanes))
            for place, numbers in zip((token.cos, token.sin), written, strict=True):
                narrow = numbers.to_odd() if form.size == 2 else numbers
                self.table.store(narrow.to(form.real).value, place + first * form.size)

    def _angle(self, kind: Kind, first: Integer, lanes: int) -> State:
        """Return the sum over the axes."""
        state = kind.start(self._own_position(first, lanes), *self._turns(0, first, lanes))
        add = kind.add
        if add is None:
            return state

        def another(state: State, axis: Integer) -> State:
            return add(state, self._all(self._position(axis), lanes), *self._turns(axis, first, lanes))

        return self._steps(1, self.token.axes, state, another)

    def _own_position(self, first: Integer, lanes: int) -> Lanes:
        """Return for each pair the coordinate of the axis it turns with, or for all of them the first one."""
        b, weights = self.b, self.token.weights
        start = b.select((weights == 0).value, self._position(0), F64(0.0))

        def weighed(state: State, axis: Integer) -> State:
            # One weight is 1 and the others are 0, so that nothing is rounded.
            weight = self._kept(self.token.turns + self.token.pairs * 8 * (axis + 2) + first * 8, lanes)
            return (weight.muladd(self._all(self._position(axis), lanes), *state),)

        (position,) = self._steps(0, weights, (self._all(start, lanes),), weighed)
        return position

    def _steps(self, first: int, end: Integer, state: State, step: Callable[[State, Integer], State]) -> State:
        """Return what becomes of a state by one step for each number from `first` to before `end`."""
        places = [cgutils.alloca_once_value(self.b, number.value) for number in state]

        def now() -> State:
            return tuple(Lanes(self.b, self.b.load(place), self.target) for place in places)

        with plain_loop(end - first, [first], [1]) as (n,):
            for place, number in zip(places, step(now(), n), strict=True):
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
        if lanes > 1:
            several = vector(F64, lanes)
            one = self.b.insert_element(ir.Constant(several, ir.Undefined), number, I64(0))
            number = self.b.shuffle_vector(one, one, ir.Constant(vector(I32, lanes), [0] * lanes))
        return Lanes(self.b, number, self.target)
