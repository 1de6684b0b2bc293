"""The exact reference: rotations computed far beyond float64, sharing no code with kernels or graphs.

A rotation by position p is the product of rotations by the powers of two that p is a sum of. Cos and sin of each are
summed as Taylor series in integers and squared; their products are sums of two float64. There is no reduction by 2π and
no library cosine. Results are good to about 2^-95.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.accuracy.tolerance import rotation_bound
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.spec import RopeSpec

# Integers count units of 2^-BITS. Each squaring doubles an error, and there are up to 200 of them: 100 bits are left.
BITS = 320
_ONE = 1 << BITS


@dataclass(frozen=True)
class Exact:
    """Numbers as the sum of two float64: `high` is the nearest, `low` what it leaves."""

    high: Float64
    low: Float64

    def __getitem__(self, index: Any) -> Exact:
        return Exact(self.high[index], self.low[index])

    def error(self, result: NDArray[Any]) -> Float64:
        """Return |result − exact|, infinite where a result is no number."""
        # The difference of neighbours is exact, so this holds to a last bit of itself.
        with np.errstate(invalid="ignore"):
            difference = np.abs((result.astype(np.float64) - self.high) - self.low)
        return np.nan_to_num(difference, nan=np.inf)


def rotation(
    spec: RopeSpec,
    x: NDArray[Any],
    positions: NDArray[Any],
    *,
    inverse: bool = False,
    dtype: Any = None,
) -> tuple[Exact, Float64]:
    """Return the exact rotation of x and the tolerance of each element, both shaped like x.

    spec: a rotation of one length. x: (batch, seq, heads, head_dim). positions: (batch or 1, seq), with several axes a
    trailing axis of coordinates. dtype: of the results that are judged, that of x by default.
    """
    factor = _factor(spec, inverse)
    cos, sin = cos_sin(spec, positions, inverse=inverse)
    first, second = spec.pair_elements()
    wide = x.astype(np.float64)
    exact, bound = Exact(wide.copy(), np.zeros_like(wide)), np.zeros_like(wide)
    frequency_heads = cos.high.shape[2]
    for head in range(x.shape[2]):  # the intermediate arrays of one head fit the cache
        group = head * frequency_heads // x.shape[2]
        c, s = cos[:, :, group], sin[:, :, group]
        x_a, x_b = wide[:, :, head, first], wide[:, :, head, second]
        rotated = _sum(_times(x_a, c), _times(-x_b, s)), _sum(_times(x_a, s), _times(x_b, c))
        for elements, value in zip((first, second), rotated, strict=True):
            exact.high[:, :, head, elements], exact.low[:, :, head, elements] = (
                value.high,
                value.low,
            )
            bound[:, :, head, elements] = rotation_bound(
                value.high, x_a, x_b, factor, dtype or x.dtype
            )
    return exact, bound


def cos_sin(
    spec: RopeSpec, positions: NDArray[Any], *, inverse: bool = False
) -> tuple[Exact, Exact]:
    """Return cos and sin, attention factor included, each (batch or 1, seq, heads or 1, pairs); −sin for the inverse.

    With angle_dtype "float32" the angle, cos, sin and their product with the factor are rounded to float32 each, as
    transformers does.
    """
    factor, inv_freq = _factor(spec, inverse), spec.inv_freq[0]
    position = positions.astype(np.float64).reshape(*positions.shape[:2], spec.axes)
    if spec.angle_dtype == "float32":
        products = position[..., None, None].astype(np.float32) * inv_freq.astype(np.float32)
        angle = products.sum(axis=2, dtype=np.float32)
        made = _rotations(np.ones((1, 1, 1)), angle.reshape(1, -1, 1).astype(np.float64))
        cos, sin = (
            (part.high.astype(np.float32) * np.float32(factor)).reshape(angle.shape)
            for part in made
        )
        exact = [Exact(part.astype(np.float64), np.zeros(angle.shape)) for part in (cos, sin)]
    else:
        exact = [_times(np.array(factor), part) for part in _rotations(inv_freq, position)]
    return (exact[0], Exact(-exact[1].high, -exact[1].low)) if inverse else (exact[0], exact[1])


def _factor(spec: RopeSpec, inverse: bool) -> float:
    factor = float(spec.attention_factor[0])
    return 1 / factor if inverse else factor


def _rotations(inv_freq: Float64, positions: Float64) -> tuple[Exact, Exact]:
    """Return cos and sin of Σ position·inv_freq over the axes, (batch, seq, heads, pairs).

    inv_freq: (axes, heads, pairs). positions: (batch, seq, axes).
    """
    axes, heads, pairs = inv_freq.shape
    shape = (*positions.shape[:2], heads, pairs)
    cos, sin = Exact(np.ones(shape), np.zeros(shape)), Exact(np.zeros(shape), np.zeros(shape))
    unit = 0  # positions are multiples of 2^-unit
    while (np.ldexp(positions, unit) % 1).any():
        unit += 1
    for axis in range(axes):
        count = np.ldexp(np.abs(positions[..., axis]), unit)
        bits = int(np.frexp(count.max(initial=0.0))[1])
        powers = [
            _squarings(Fraction(omega) / (1 << unit), bits)
            for omega in inv_freq[axis].reshape(-1).tolist()
        ]
        table = np.array(powers).reshape(heads, pairs, bits, 4)
        for bit in range(bits):
            rows = np.floor(np.ldexp(count, -bit)) % 2 == 1
            high_cos, low_cos, high_sin, low_sin = np.moveaxis(table[:, :, bit], -1, 0)
            sign = np.sign(positions[rows][:, axis, None, None])
            c, s = Exact(high_cos, low_cos), Exact(sign * high_sin, sign * low_sin)
            old_cos, old_sin = cos[rows], sin[rows]
            minus = Exact(-old_sin.high, -old_sin.low)
            new_cos = _sum(_product(old_cos, c), _product(minus, s))
            new_sin = _sum(_product(old_cos, s), _product(old_sin, c))
            for whole, part in ((cos, new_cos), (sin, new_sin)):
                whole.high[rows], whole.low[rows] = part.high, part.low
    return cos, sin


def _squarings(step: Fraction, bits: int) -> list[tuple[float, float, float, float]]:
    """Return cos and sin of step·2^n for each n below `bits`, each as two float64."""
    halvings = int(
        abs(step)
    ).bit_length()  # the series is for small angles; squaring brings back what halving took
    cos, sin = _series(step.numerator * _ONE // (step.denominator << halvings))
    found = []
    for squaring in range(halvings + bits):
        if squaring >= halvings:
            found.append((*_two_parts(cos), *_two_parts(sin)))
        cos, sin = (cos * cos - sin * sin) >> BITS, (2 * cos * sin) >> BITS
    return found


def _series(angle: int) -> tuple[int, int]:
    """Return cos and sin of an angle in radians, by their Taylor series."""
    sums, term, n = [0, 0, 0, 0], _ONE, 0
    while term:
        sums[n % 4] += term
        n += 1
        term = term * abs(angle) // (n * _ONE)
    sine = sums[1] - sums[3]
    return sums[0] - sums[2], sine if angle >= 0 else -sine


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


def _product(a: Exact, b: Exact) -> Exact:
    product = _times(a.high, b)
    return Exact(product.high, product.low + a.low * b.high)


def _sum(a: Exact, b: Exact) -> Exact:
    total = a.high + b.high
    of_b = total - a.high
    low = (a.high - (total - of_b)) + (b.high - of_b) + (a.low + b.low)
    high = total + low
    return Exact(high, low - (high - total))
