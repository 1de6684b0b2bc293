"""The judge: rotations computed far beyond float64, by another road than the kernels and sharing no code with them.

Turning by position p is turning p times by position 1. So cos and sin of one step are summed as Taylor series in
integers, and every further position is one more complex product of integers: no reduction by 2π, no library cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

# Integers count units of 2^-BITS. A step loses two of them at most, so 2^20 steps still leave 100 bits and more.
BITS = 160
_ONE = 1 << BITS


@dataclass(frozen=True)
class Exact:
    """Numbers as the sum of two float64: `high` is the nearest, `low` what it leaves."""

    high: Float64
    low: Float64

    def error(self, result: NDArray[np.generic]) -> Float64:
        """Return |result − exact|; the difference of neighbours is exact, so this holds to a last bit of itself."""
        difference: Float64 = np.abs((result.astype(np.float64) - self.high) - self.low)
        return difference


def consecutive(steps: list[Fraction], first: int, count: int, factor: float) -> tuple[Exact, Exact]:
    """Return factor·cos and factor·sin of positions first, first + 1, …, each (count, pairs).

    steps: the angle of one position, by pair, in radians.
    """
    numerator, denominator = factor.as_integer_ratio()
    cos = np.empty((2, count, len(steps)))
    sin = np.empty((2, count, len(steps)))
    for pair, step in enumerate(steps):
        # The series is for small angles; squaring brings back what halving took.
        halvings = int(abs(step)).bit_length()
        turn = _power(_circle(step.numerator * _ONE // (step.denominator << halvings)), 1 << halvings)
        at = _power(turn, first)
        for row in range(count):
            cos[:, row, pair] = _two_parts(at[0] * numerator // denominator)
            sin[:, row, pair] = _two_parts(at[1] * numerator // denominator)
            at = _product(at, turn)
    return Exact(*cos), Exact(*sin)


def rotate(x_a: Float64, x_b: Float64, cos: Exact, sin: Exact) -> tuple[Exact, Exact]:
    """Return x_a·cos − x_b·sin and x_a·sin + x_b·cos to about 2^-100; all arrays broadcast."""
    return _sum(_times(x_a, cos), _times(-x_b, sin)), _sum(_times(x_a, sin), _times(x_b, cos))


def _circle(angle: int) -> tuple[int, int]:
    """Return cos and sin of an angle in radians, by their series."""
    sums, term, n = [0, 0, 0, 0], _ONE, 0
    while term:
        sums[n % 4] += term
        n += 1
        term = term * abs(angle) // (n * _ONE)
    sine = sums[1] - sums[3]
    return sums[0] - sums[2], sine if angle >= 0 else -sine


def _product(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return (a[0] * b[0] - a[1] * b[1]) >> BITS, (a[0] * b[1] + a[1] * b[0]) >> BITS


def _power(turn: tuple[int, int], times: int) -> tuple[int, int]:
    result = _ONE, 0
    while times:
        if times & 1:
            result = _product(result, turn)
        turn, times = _product(turn, turn), times >> 1
    return result


def _two_parts(value: int) -> tuple[float, float]:
    high = value / _ONE
    return high, (value - int(math.ldexp(high, BITS))) / _ONE


def _split(x: Float64) -> tuple[Float64, Float64]:
    """Cut a float64 into two halves of 26 bits, whose products are exact (Veltkamp)."""
    shifted = x * 134217729.0
    high = shifted - (shifted - x)
    return high, x - high


def _times(x: Float64, exact: Exact) -> Exact:
    product = x * exact.high
    (x1, x2), (y1, y2) = _split(x), _split(exact.high)
    return Exact(product, ((x1 * y1 - product) + x1 * y2 + x2 * y1) + x2 * y2 + x * exact.low)


def _sum(a: Exact, b: Exact) -> Exact:
    total = a.high + b.high
    of_b = total - a.high
    low = (a.high - (total - of_b)) + (b.high - of_b) + (a.low + b.low)
    high = total + low
    return Exact(high, low - (high - total))
