"""The reference of attention, in float64, and the tolerance of its results.

Every value comes with a bound on the error that an implementation may have in it. With u the unit
roundoff, a sum of n products is off by n·u·Σ|a·b| at most, in whatever order it is added, and an
error of an operand grows as in the exact product. A score that is off by δ changes each weight of
the softmax by a factor of e^2δ at most.

This is the worst case, in which all roundings of a sum have one direction. Of some 200 exported
models in float32, half were off by 0.3 % of it at most, and nine of ten by 2 %. So it passes faults
of that size: a scale that is wrong by 1e-5, and by 1e-4 behind projections.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare, half_ulp
from rope_cpu.array_types import Float64

# Numbers of roundings, in u.
SCALE = 4  # the scale on queries and on keys
SOFTCAP = 12  # a quotient, a product, and tanh, of which onnxruntime's is off by 5.4 u at most
SOFTMAX = 8  # a quotient, and exp above and below it, of which onnxruntime's is off by 1.7 u

# Largest error of a score whose weight is bounded; beyond it, the weight may have any error.
MAX_SCORE_ERROR = 30.0

# The smallest normal number of float32; a weight below it may be rounded to 0.
LEAST_WEIGHT = 2.0**-126

# The roundoff of float32.
UNIT = 2.0**-24


class Estimate(NamedTuple):
    """An array, and the largest error of each element in an implementation."""

    value: Float64
    error: Float64

    @property
    def exact(self) -> Exact:
        """The values for comparisons."""
        return Exact(self.value, np.zeros_like(self.value))

    def bound(self, dtype: DTypeLike) -> Float64:
        """Return the allowed difference of each element, with its rounding to a dtype."""
        return self.error + half_ulp(self.value, dtype)

    def compare(self, result: NDArray[np.generic]) -> tuple[float, float]:
        """Return the largest error of a result, and its largest ratio to the tolerance."""
        return compare(self.exact.error(result), self.bound(result.dtype))

    def by_head(self) -> Estimate:
        """Return (batch, tokens, heads, width) as (batch, heads, tokens, width), or back."""
        return Estimate(*(x.transpose(0, 2, 1, 3) for x in self))

    def reshape(self, *shape: int) -> Estimate:
        """Return both arrays in another shape."""
        return Estimate(*(x.reshape(*shape) for x in self))


def unit_of(dtype: DTypeLike) -> float:
    """Return the roundoff u of the arithmetic for a dtype.

    In float64 it is doubled: the reference itself rounds as much.
    """
    return 2.0**-52 if np.dtype(dtype) == np.float64 else UNIT


def exactly(x: NDArray[np.generic]) -> Estimate:
    """Return an array that an implementation has without an error."""
    value = x.astype(np.float64)
    return Estimate(value, np.zeros_like(value))


def product(a: Estimate, b: Estimate, unit: float, extra_roundings: int = 0) -> Estimate:
    """Return a · b; extra_roundings: of each product of elements beside its own."""
    a_size = np.abs(a.value)
    b_size = np.abs(b.value)
    roundings = (a.value.shape[-1] + extra_roundings) * unit
    inherited = a.error @ b_size + (a_size + a.error) @ b.error
    return Estimate(a.value @ b.value, inherited + roundings * (a_size @ b_size))


def attention(
    q: Estimate,
    k: Estimate,
    v: Estimate,
    *,
    scale: float,
    mask: Float64,
    unit: float = UNIT,
    softcap: float | None = None,
    sinks: Float64 | None = None,
) -> Estimate:
    """Return softmax(scale · q · kᵀ + mask) · v, 0 for queries without any key.

    q: (batch, heads, tokens, width). k, v: (batch, kv_heads, keys, width). mask: added to the
    scores (batch, heads, tokens, keys), −inf where a key is hidden. unit: see `unit_of`. sinks:
    (heads,), each a score without a value.
    """
    group = q.value.shape[1] // k.value.shape[1]
    keys = Estimate(*(np.repeat(x, group, axis=1).swapaxes(-1, -2) for x in k))
    values = Estimate(*(np.repeat(x, group, axis=1) for x in v))
    dot = product(q, keys, unit, SCALE)
    scores = scale * dot.value
    error = scale * dot.error
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
        error = error + SOFTCAP * unit * np.abs(scores)
    scores = scores + mask
    sink = np.full((1, 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    largest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-1e300), sink)
    exponents = scores - largest
    attended = np.isfinite(scores)
    error = np.where(attended, error + unit * (np.abs(scores) + np.abs(exponents)), 0)
    exponentials = np.exp(exponents)
    total = exponentials.sum(axis=-1, keepdims=True) + np.exp(sink - largest)
    weights = exponentials / np.where(total == 0, 1, total)
    score_error = np.minimum(error.max(axis=-1, keepdims=True, initial=0), MAX_SCORE_ERROR)
    change = np.expm1(2 * score_error) + (scores.shape[-1] + SOFTMAX) * unit
    return product(Estimate(weights, change * weights + LEAST_WEIGHT), values, unit)


def causal_mask(queries: int, keys: int, window: int | None = None) -> Float64:
    """Return the mask of the last queries, each of which sees the keys up to its own."""
    query = np.arange(keys - queries, keys)[:, None]
    key = np.arange(keys)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    return np.where(seen, 0.0, -np.inf)
