"""The reference of attention, in float64, and the tolerance of its results.

Every value comes with the variance of the error that an implementation may have in it. The variance
follows the value from step to step: the variance of a step's input grows by the square of its
derivative, and each operation adds u² times its result squared, as roundings are independent of
each other. A result may differ from the exact one by `DEVIATIONS` standard deviations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import Float64

# A known bound counts as this many standard deviations. (That of a rounding is 0.4 u, not u.)
DEVIATIONS = 6.0

# Numbers of roundings.
SCALE = 4  # the scale on queries and on keys
SOFTCAP = 4  # a quotient, a product, and tanh, of which onnxruntime's is off by 5.4 u at most
WEIGHT = 4  # exp, of which onnxruntime's is off by 1.7 u at most, and a quotient

# Largest error of a score whose weight is bounded; beyond it, the weight may have any error.
MAX_SCORE_ERROR = 30.0

# The variance u² of a rounding in float32.
UNIT_VARIANCE = 2.0**-48

# The smallest normal number of float32; a weight below it may be rounded to 0.
LEAST_WEIGHT = 2.0**-126


class Estimate(NamedTuple):
    """An array, and the variance of each element's error in an implementation."""

    value: Float64
    variance: Float64

    @property
    def exact(self) -> Exact:
        """The values for comparisons."""
        return Exact(self.value, np.zeros_like(self.value))

    def bound(self, dtype: DTypeLike | None = None) -> Float64:
        """Return the allowed difference of each element, with its rounding to a dtype."""
        bound = DEVIATIONS * np.sqrt(self.variance)
        return bound if dtype is None else bound + half_ulp(self.value, dtype)

    def compare(self, result: NDArray[Any]) -> tuple[float, float]:
        """Return the largest error of a result, and its largest ratio to the tolerance."""
        return compare(self.exact.error(result), self.bound(result.dtype))

    def rounded(self, dtype: DTypeLike) -> Estimate:
        """Return values that are rounded to a dtype, or not."""
        return Estimate(self.value, self.variance + half_ulp(self.value, dtype) ** 2 / 3)

    def by_head(self) -> Estimate:
        """Return (batch, tokens, heads, width) as (batch, heads, tokens, width), or back."""
        return Estimate(*(x.transpose(0, 2, 1, 3) for x in self))

    def reshape(self, *shape: int) -> Estimate:
        """Return both arrays in another shape."""
        return Estimate(*(x.reshape(*shape) for x in self))

    def repeated(self, count: int) -> Estimate:
        """Return arrays by head with each head as often as query heads share it."""
        return Estimate(*(np.repeat(x, count, axis=1) for x in self))


class Attended(NamedTuple):
    """Results of attention by head; the variance of `own` lacks the errors of the weights.

    sum_variance: that of the sum of the weights, relative to it.
    """

    own: Estimate
    weights: Estimate
    values: Float64
    sum_variance: float

    @property
    def result(self) -> Estimate:
        """The results, with the errors of the weights."""
        shift = self.weight_shift(self.values, self.own.value)
        return Estimate(self.own.value, self.own.variance + shift)

    def projected_shift(self, weight: Float64) -> Float64:
        """Return the variance that the weights' errors cause in a projection (heads, width, out).

        An error of a weight moves all elements of a head together, through the projection too.
        """
        by_head = self.weight_shift(self.values @ weight, self.own.value @ weight)
        total: Float64 = by_head.sum(axis=1)
        return total

    def weight_shift(self, value: Float64, result: Float64) -> Float64:
        """Return the variance that errors of the weights cause in a result, Σ weight·value.

        As weights have a sum of 1, an error ε of one moves the result by ε·(value − result), and
        errors of the sum that they are divided by move the whole.
        """
        variance = self.weights.variance
        shift = variance @ value**2 - 2 * result * (variance @ value)
        shift = shift + result**2 * variance.sum(axis=-1, keepdims=True)
        total: Float64 = np.maximum(shift, 0) + self.sum_variance * result**2
        return total


def unit_variance(dtype: DTypeLike) -> float:
    """Return the variance u² of a rounding in the arithmetic for a dtype.

    In float64 it is doubled: the reference itself rounds as much.
    """
    return 2 * 2.0**-106 if np.dtype(dtype) == np.float64 else UNIT_VARIANCE


def exactly(x: NDArray[Any]) -> Estimate:
    """Return an array that an implementation has without an error."""
    value = x.astype(np.float64)
    return Estimate(value, np.zeros_like(value))


def product(a: Float64, b: Float64, extra_roundings: int = 0) -> Estimate:
    """Return a · b, with its variance in units of u².

    extra_roundings: roundings of each product beside its own.

    The partial sums of n products go from 0 to their sum s. If the products come in no particular
    order, they differ from a straight line by √Σ(ab)² at most. So n roundings of them have a
    variance of n·(s² + Σ(ab)²).
    """
    result = a @ b
    roundings = a.shape[-1] + extra_roundings
    return Estimate(result, roundings * (result**2 + a**2 @ b**2))


def attention(
    q: Estimate,
    k: Estimate,
    v: Estimate,
    *,
    scale: float,
    mask: Float64,
    unit: float = UNIT_VARIANCE,
    softcap: float | None = None,
    sinks: Float64 | None = None,
) -> Attended:
    """Return softmax(scale · q · kᵀ + mask) · v, 0 for queries without any key.

    q: (batch, heads, tokens, width). k, v: (batch, kv_heads, keys, width). mask: added to the
    scores (batch, heads, tokens, keys), −inf where a key is hidden. unit: see `unit_variance`.
    sinks: (heads,), each a score without a value.
    """
    group = q.value.shape[1] // k.value.shape[1]
    v = v.repeated(group)
    scores = _scores(q, k.repeated(group), scale, softcap, unit)
    weights = _softmax(_masked(scores, mask, unit), sinks, unit)
    result = product(weights.value, v.value)
    variance = weights.value**2 @ v.variance + unit * result.variance
    # 2·n in terms of `product`; a sink's weight has no other part in the results.
    roundings = 2 * v.value.shape[2] + (0 if sinks is None else WEIGHT + 3)
    return Attended(Estimate(result.value, variance), weights, v.value, roundings * unit)


def causal_mask(queries: int, keys: int, window: int | None = None) -> Float64:
    """Return the mask of the last queries, each of which sees the keys up to its own."""
    query = np.arange(keys - queries, keys)[:, None]
    key = np.arange(keys)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    return np.where(seen, 0.0, -np.inf)


def _scores(q: Estimate, k: Estimate, scale: float, softcap: float | None, unit: float) -> Estimate:
    """Return scale · q · kᵀ, capped."""
    key = k.value.swapaxes(-1, -2)
    key_variance = k.variance.swapaxes(-1, -2)
    dot = product(q.value, key, SCALE)
    inherited = (q.value**2 + q.variance) @ key_variance + q.variance @ key**2
    scores = scale * dot.value
    variance = scale**2 * (inherited + unit * dot.variance)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        variance = variance + SOFTCAP * unit * scores**2
    return Estimate(scores, variance)


def _masked(scores: Estimate, mask: Float64, unit: float) -> Estimate:
    """Return scores with a mask added."""
    value = scores.value + mask
    rounding = unit * np.where(np.isfinite(value), value, 0) ** 2
    return Estimate(value, scores.variance + rounding)


def _softmax(scores: Estimate, sinks: Float64 | None, unit: float) -> Estimate:
    """Return the weights (batch, heads, tokens, keys)."""
    largest = np.maximum(scores.value.max(axis=-1, keepdims=True, initial=-np.inf), -1e300)
    sink_weight: Float64 | float = 0.0
    if sinks is not None:
        largest = np.maximum(largest, sinks[:, None, None])
        sink_weight = np.exp(sinks[:, None, None] - largest)
    exponentials = np.exp(scores.value - largest)
    total = exponentials.sum(axis=-1, keepdims=True) + sink_weight
    weights = exponentials / np.where(total == 0, 1, total)
    attended = np.isfinite(scores.value)
    distance = np.where(attended, scores.value - largest, 0)
    variance = scores.variance + unit * (distance**2 + WEIGHT)
    # An error δ of a score multiplies its weight by e^δ, which is more than 1 + δ.
    score_error = np.minimum(DEVIATIONS * np.sqrt(variance), MAX_SCORE_ERROR)
    relative = np.where(attended, (np.expm1(score_error) / DEVIATIONS) ** 2, 0)
    least = np.where(attended, LEAST_WEIGHT / DEVIATIONS, 0)
    return Estimate(weights, weights**2 * relative + least**2)
