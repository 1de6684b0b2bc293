"""Chains of steps from a position and turns to cos and sin, one for each kind of table.

Angles are kept as turns, ω/2π = high + low, so that whole ones can be dropped before anything is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial
from typing import NamedTuple

from rope_cpu._kernels.formats import F32, F64
from rope_cpu._kernels.lanes import Lanes, exact_sum

# 2π, and what float64 leaves of it; the Taylor coefficients of sin and cos, enough for an angle of ⅛ turn.
_TWO_PI, _TWO_PI_REST = 6.283185307179586, 2.4492935982947064e-16
_SIN = tuple((-1.0) ** n / factorial(2 * n + 1) for n in range(8, 0, -1))
_COS = tuple((-1.0) ** n / factorial(2 * n) for n in range(8, 0, -1))
# The polynomials in r² nearest to √2·sin(πr) / r, to 1.5e-16, and to √2·cos(πr), to 1.7e-16, for |r| up to ¼ and a
# little beyond.
_HALF_SIN = (
    0.0006527051042696048, -0.010422784576813171, 0.11617180229392508, -0.8474880242757871, 3.606476571465094,
    -7.308249499995417, 4.442882938158366,
)  # fmt: skip
_HALF_COS = (
    0.0026970456269754936, -0.03649377681572068, 0.3328076579231254, -1.8883467147128599, 5.739885734924223,
    -6.978864199638807, 1.4142135623730951,
)  # fmt: skip
# 1 / 2π in three float64: the turns of an angle of one radian (OEIS A086201).
RADIAN = (0.15915494309189535, -9.839338337591243e-18, -5.360718141446502e-34)

# Added to a number up to 2^50 and taken off again, they leave the nearest whole number or multiple of ½; the last bits
# of the sum are those of how many these are.
_WHOLE, _HALVES = 1.5 * 2.0**52, 1.5 * 2.0**51

# Where frequencies are at most SLOW and positions at most NEAR, an angle has less than 2^33 turns. What is left of it
# without half turns lies within a quarter but for 2^-20, within _QUARTER, and need not be rounded once more.
SLOW, NEAR, _QUARTER = 16.0, 2.0**31, 0.25 + 2.0**-20

# What is known of an angle before all axes are added: numbers that add up to it, or what is left and what is dropped.
State = tuple[Lanes, ...]


class Kind(NamedTuple):
    """How angles are computed and what of them is written.

    start: (position, high, low) of the first axis → state. finish: (state, factor) → factor·cos and factor·sin. add:
    (state, position, high, low) of another axis; None: there is none.
    """

    start: Callable[[Lanes, Lanes, Lanes], State]
    finish: Callable[[State, Lanes], tuple[Lanes, Lanes]]
    add: Callable[[State, Lanes, Lanes, Lanes], State] | None = None


def _polynomials(z: Lanes, *coefficients: tuple[float, ...]) -> list[Lanes]:
    """Return polynomials in z, step by step side by side; each is given by its coefficients from the highest on."""
    steps = zip(*coefficients, strict=True)
    results = [z.all(highest) for highest in next(steps)]
    for step in steps:
        results = [result.muladd(z, number).in_turn() for result, number in zip(results, step, strict=True)]
    return results


def _turns(position: Lanes | float, high: Lanes, low: Lanes) -> State:
    """Return position·(high + low), less whole turns, in two parts."""
    product, lost = high.product(position)
    return product - product.rounded(), low.muladd(position, lost)


def _add_exactly(state: State, position: Lanes | float, high: Lanes, low: Lanes) -> State:
    """Add position·(high + low), less whole turns; what rounding loses of the sum goes to the rest.

    Whole turns are dropped of the sum as well, so that the rest stays as small as that of one axis.
    """
    (turns, rest), (part, more) = state, _turns(position, high, low)
    total, lost = exact_sum(turns, part)
    return total - total.rounded(), rest + (lost + more)


def _exactly(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin to 1.25 units of 2^-53."""
    turns, rest = state
    total = turns + rest
    tail = (turns - total) + rest
    quarters = total.muladd(4.0, _WHOLE)
    r = (quarters - _WHOLE).muladd(-0.25, total)
    z, lost = r.product(_TWO_PI)
    dz = r.muladd(_TWO_PI_REST, lost) + tail * _TWO_PI
    z2 = z * z
    s, c = _polynomials(z2, _SIN, _COS)
    sine, cosine = z + (z * z2).muladd(s, dz), z2.muladd(c, -z * dz) + 1.0
    # A quarter turn swaps the two and negates the cosine, a half turn negates both.
    odd, half = quarters.bit(0), quarters.bit(1)
    cosine, sine = odd.choose(sine, cosine) ^ half ^ odd, odd.choose(cosine, sine) ^ half
    return factor * cosine, factor * sine


def _near(position: Lanes, high: Lanes, low: Lanes) -> State:
    """Return position·(high + low), less half turns, as one number within _QUARTER, and −0 where these are odd.

    It is rounded twice, by 2^-56 and at most 2^-55 of a turn, far below what float32 rounds away.
    """
    total = high.muladd(position, _HALVES)
    # What is taken off is +0 where it is none, so that −0 and it are +0.
    return low.muladd(position, high.plus_once(position, _HALVES - total)), total.bit(0)


def _any(position: Lanes, high: Lanes, low: Lanes) -> State:
    """Return the same number, bit for bit where turns are few, and what was dropped less whole turns, 0 or ±½."""
    # With the sign of the product, so that the sum has no smaller bits than ½.
    halves = (high * position & high.all(-0.0)) ^ high.all(_HALVES)
    taken = halves - high.muladd(position, halves)
    return low.muladd(position, high.plus_once(position, taken)), taken - taken.rounded()


def _add(state: State, position: Lanes, high: Lanes, low: Lanes) -> State:
    """Add the same of another axis."""
    return tuple(number + more for number, more in zip(state, _any(position, high, low), strict=True))


def _half(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return cos and sin to 1e-15 of the factor, from those of half the angle, which lies within an eighth of a turn.

    Both are those of a half by √2: cos 2a = 1 − (√2·sin a)², sin 2a = √2·sin a · √2·cos a. An odd half turn negates.
    """
    r, odd = state
    factor = factor ^ odd
    s, c = _polynomials(r * r, _HALF_SIN, _HALF_COS)
    s = r * s
    scaled = s * factor
    return (-s).muladd(scaled, factor), scaled * c


def _half_of_any(state: State, factor: Lanes) -> tuple[Lanes, Lanes]:
    """Return what `_half` does, of an angle of any size: less half turns, unless it lies within _QUARTER."""
    turns, halves = state
    more = turns.below(_QUARTER, turns.all(0.0), (turns + turns).rounded() * 0.5)
    halves = halves + more
    # The difference is 0 or ±½, of which the latter alone has bit 61, in its exponent.
    return _half((turns - more, (halves - halves.rounded()).bit(61)), factor)


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


# Of float32 tables: of near positions and pairs that turn with one axis each, slowly; of any others, where those keep
# their bits. Of other tables; of models.
KINDS = {
    "usual": Kind(_near, _half),
    "any": Kind(_any, _half_of_any, _add),
    "exact": Kind(_turns, _exactly, _add_exactly),
    "model": Kind(_model_start, _of_model, _model_add),
}
