"""The exact reference: rotations computed far beyond float64.

It is the oracle of kernels and graphs and shares no code with them, on purpose: its error-free
arithmetic exists a second time in `rope_cpu.rotation.cos_sin`, so that no error is common to both.

A rotation by position p is the product of rotations by the powers of two whose sum is p. Cos and
sin of each power are Taylor series in integer arithmetic, then squared; their products are sums of
two float64. There is no reduction by 2π and no library cosine. Results are good to about 2^-95.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu.accuracy.tolerance import rotation_bound
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.spec import RopeSpec

# Integers count units of 2^-BITS. Each squaring doubles an error, and there are up to 200 of them:
# 100 bits are left.
BITS = 320
_ONE = 1 << BITS


@dataclass(frozen=True)
class Exact:
    """Numbers as the sum of two float64: `high` is the nearest float64, `low` the remainder."""

    high: Float64
    low: Float64

    def __getitem__(self, index: Any) -> Exact:
        return Exact(self.high[index], self.low[index])

    def __setitem__(self, index: Any, value: Exact) -> None:
        self.high[index] = value.high
        self.low[index] = value.low

    def __neg__(self) -> Exact:
        return Exact(-self.high, -self.low)

    def error(self, result: NDArray[Any]) -> Float64:
        """Return |result − exact|, infinite where a result is NaN."""
        # The difference of neighbouring floats is exact, so the error itself is precise.
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
    """Return the exact rotation of x and the tolerance of each element, both of the shape of x.

    spec: a rotation of one length.
    x: (batch, seq, heads, head_dim).
    positions: (batch or 1, seq), with several axes a trailing axis of coordinates.
    dtype: dtype of the judged results, by default that of x.
    """
    factor = _factor(spec, inverse)
    cos, sin = cos_sin(spec, positions, inverse=inverse)
    first, second = spec.pair_elements()
    x_float64 = x.astype(np.float64)
    exact = Exact(x_float64.copy(), np.zeros_like(x_float64))
    bound = np.zeros_like(x_float64)
    heads = cos.high.shape[2]
    by_head = (slice(None), slice(None), np.repeat(np.arange(heads), x.shape[2] // heads))
    cos = cos[by_head]
    sin = sin[by_head]
    x_a = x_float64[..., first]
    x_b = x_float64[..., second]
    y_a = _add(_multiply_float64(x_a, cos), _multiply_float64(-x_b, sin))
    y_b = _add(_multiply_float64(x_a, sin), _multiply_float64(x_b, cos))
    for elements, y in ((first, y_a), (second, y_b)):
        exact[..., elements] = y
        bound[..., elements] = rotation_bound(y.high, x_a, x_b, factor, dtype or x.dtype)
    return exact, bound


def cos_sin(
    spec: RopeSpec, positions: NDArray[Any], *, inverse: bool = False
) -> tuple[Exact, Exact]:
    """Return cos and sin times the attention factor, each (batch or 1, seq, heads or 1, pairs).

    The sine is negated for the inverse. With angle_dtype "float32" the angle, cos, sin and their
    product with the factor are each rounded to float32, as in transformers.
    """
    factor = _factor(spec, inverse)
    inv_freq = spec.inv_freq[0]
    positions = positions.astype(np.float64).reshape(*positions.shape[:2], spec.axes)
    if spec.angle_dtype == "float32":
        cos, sin = _float32_cos_sin(inv_freq, positions, factor)
    else:
        exact_cos, exact_sin = _exact_cos_sin(inv_freq, positions)
        cos = _multiply_float64(np.array(factor), exact_cos)
        sin = _multiply_float64(np.array(factor), exact_sin)
    return cos, -sin if inverse else sin


def _factor(spec: RopeSpec, inverse: bool) -> float:
    """Return the attention factor A, or 1/A for the inverse."""
    factor = float(spec.attention_factor[0])
    return 1 / factor if inverse else factor


def _float32_cos_sin(inv_freq: Float64, positions: Float64, factor: float) -> tuple[Exact, Exact]:
    """Return cos and sin times the factor, each step rounded to float32 as in transformers."""
    products = positions[..., None, None].astype(np.float32) * inv_freq.astype(np.float32)
    angles = products.sum(axis=2, dtype=np.float32)
    rotations = _exact_cos_sin(np.ones((1, 1, 1)), angles.reshape(1, -1, 1).astype(np.float64))
    cos, sin = (_round_to_float32(part, factor, angles.shape) for part in rotations)
    return cos, sin


def _round_to_float32(exact: Exact, factor: float, shape: tuple[int, ...]) -> Exact:
    """Return float32(float32(exact) · float32(factor)) of a shape."""
    rounded = (exact.high.astype(np.float32) * np.float32(factor)).reshape(shape)
    return Exact(rounded.astype(np.float64), np.zeros(shape))


def _exact_cos_sin(inv_freq: Float64, positions: Float64) -> tuple[Exact, Exact]:
    """Return cos and sin of Σ position·inv_freq over the axes, (batch, seq, heads, pairs).

    inv_freq: (axes, heads, pairs). positions: (batch, seq, axes).
    """
    axes, heads, pairs = inv_freq.shape
    shape = (*positions.shape[:2], heads, pairs)
    cos = Exact(np.ones(shape), np.zeros(shape))
    sin = Exact(np.zeros(shape), np.zeros(shape))
    unit = 0  # positions are multiples of 2^-unit
    while (np.ldexp(positions, unit) % 1).any():
        unit += 1
    for axis in range(axes):
        count = np.ldexp(np.abs(positions[..., axis]), unit)
        bits = int(np.frexp(count.max(initial=0.0))[1])
        powers = [
            _cos_sin_of_powers(Fraction(omega) / (1 << unit), bits)
            for omega in inv_freq[axis].reshape(-1).tolist()
        ]
        table = np.array(powers).reshape(heads, pairs, bits, 4)
        for bit in range(bits):
            rows = np.floor(np.ldexp(count, -bit)) % 2 == 1
            high_cos, low_cos, high_sin, low_sin = np.moveaxis(table[:, :, bit], -1, 0)
            sign = np.sign(positions[rows][:, axis, None, None])
            bit_cos = Exact(high_cos, low_cos)
            bit_sin = Exact(sign * high_sin, sign * low_sin)
            old_cos = cos[rows]
            old_sin = sin[rows]
            cos[rows] = _add(_multiply(old_cos, bit_cos), _multiply(-old_sin, bit_sin))
            sin[rows] = _add(_multiply(old_cos, bit_sin), _multiply(old_sin, bit_cos))
    return cos, sin


@lru_cache(maxsize=1024)
def _cos_sin_of_powers(step: Fraction, bits: int) -> list[tuple[float, float, float, float]]:
    """Return cos and sin of step·2^n for each n below `bits`, each as two float64."""
    # The series is for small angles; squarings undo the halvings.
    halvings = int(abs(step)).bit_length()
    cos, sin = _taylor_series(step.numerator * _ONE // (step.denominator << halvings))
    powers = []
    for squaring in range(halvings + bits):
        if squaring >= halvings:
            powers.append((*_two_float64(cos), *_two_float64(sin)))
        double_cos = (cos * cos - sin * sin) >> BITS
        double_sin = (2 * cos * sin) >> BITS
        cos = double_cos
        sin = double_sin
    return powers


def _taylor_series(angle: int) -> tuple[int, int]:
    """Return cos and sin of an angle in radians, all in units of 2^-BITS."""
    sums = [0, 0, 0, 0]  # of the terms n ≡ 0, 1, 2, 3 (mod 4)
    term = _ONE
    n = 0
    while term:
        sums[n % 4] += term
        n += 1
        term = term * abs(angle) // (n * _ONE)
    cos = sums[0] - sums[2]
    sin = sums[1] - sums[3]
    return cos, sin if angle >= 0 else -sin


def _two_float64(value: int) -> tuple[float, float]:
    """Return an integer in units of 2^-BITS as the sum of two float64."""
    high = value / _ONE
    return high, (value - int(math.ldexp(high, BITS))) / _ONE


def _split(x: Float64) -> tuple[Float64, Float64]:
    """Split a float64 into two halves of 26 bits, whose products are exact (Veltkamp)."""
    shifted = x * 134217729.0  # 2^27 + 1
    high = shifted - (shifted - x)
    return high, x - high


def two_product(x: Float64, y: Float64) -> Exact:
    """Return x·y and its rounding error (Dekker, "A floating-point technique", 1971)."""
    product = x * y
    x_high, x_low = _split(x)
    y_high, y_low = _split(y)
    error = ((x_high * y_high - product) + x_high * y_low + x_low * y_high) + x_low * y_low
    return Exact(product, error)


def two_sum(x: Float64, y: Float64) -> Exact:
    """Return x + y and its rounding error (Knuth, The Art of Computer Programming, 4.2.2)."""
    total = x + y
    y_part = total - x
    return Exact(total, (x - (total - y_part)) + (y - y_part))


def _multiply_float64(x: Float64, y: Exact) -> Exact:
    """Return x·y."""
    product = two_product(x, y.high)
    return Exact(product.high, product.low + x * y.low)


def _multiply(x: Exact, y: Exact) -> Exact:
    """Return x·y without the product of the low parts."""
    product = _multiply_float64(x.high, y)
    return Exact(product.high, product.low + x.low * y.high)


def _add(x: Exact, y: Exact) -> Exact:
    """Return x + y, normalised."""
    total = two_sum(x.high, y.high)
    low = total.low + (x.low + y.low)
    high = total.high + low
    return Exact(high, low - (high - total.high))
