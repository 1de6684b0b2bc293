"""Rotated attention in float64, in one pass over all tokens, with error bounds for a model.

Every value comes with the variance of the error that a model may have in it. The variance follows
the value from step to step: the variance of a step's input grows by the square of its derivative,
and each operation adds u² times its result squared, as roundings are independent of each other. A
result may differ from the exact one by `DEVIATIONS` standard deviations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference, tolerance
from rope_cpu.array_types import Array, Float64

from ..graph import FLOAT64
from ..nodes import MASK_INPUT
from ..options import AttentionOptions
from .check import CaseInputs
from .rope_check import angle_rounding

# A known bound counts as this many standard deviations. (That of a rounding is 0.4 u, not u.)
DEVIATIONS = 6.0

# Numbers of roundings.
SCALE = 4  # the scale on queries and on keys
SOFTCAP = 4  # a quotient, a product, and tanh, of which onnxruntime's is off by 5.4 u at most
WEIGHT = 4  # exp, of which onnxruntime's is off by 1.7 u at most, and a quotient
NORM = 6  # of a norm beside its sum: mean, epsilon, root, quotient, offset and weight

# The levels of an int8 cache.
INT8_RANGE = (-128, 127)
# Where either of two levels is right, a result moves by one level. It counts as two, because such
# moves of several keys add, while variances add by their squares: so it covers four of them.
LEVELS_APART = 2.0

# Largest error of a score whose weight is bounded; beyond it, the weight may have any error.
MAX_SCORE_ERROR = 30.0


class Estimate(NamedTuple):
    """An array, and the variance of each element's error in a model."""

    value: Float64
    variance: Float64

    def by_head(self) -> Estimate:
        """Return (batch, tokens, heads, width) as (batch, heads, tokens, width), or back."""
        return Estimate(self.value.transpose(0, 2, 1, 3), self.variance.transpose(0, 2, 1, 3))

    def reshape(self, *shape: int) -> Estimate:
        """Return both arrays in another shape."""
        return Estimate(self.value.reshape(*shape), self.variance.reshape(*shape))


class RotatedEstimate(NamedTuple):
    """Queries, keys or values (batch, heads, tokens, width), ready for attention.

    angle_bound: largest shift of each element by angles that are rounded in the graph.
    """

    value: Float64
    variance: Float64
    angle_bound: Float64


class BoundedOutput(NamedTuple):
    """An output, and the allowed difference of each element in a model."""

    value: Float64
    bound: Float64


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


def _with_angle_variance(rotated: RotatedEstimate) -> Estimate:
    """Return an estimate for sums: an angle has one rounding, anywhere within its bound."""
    return Estimate(rotated.value, rotated.variance + rotated.angle_bound**2 / 3)


@dataclass(frozen=True)
class Reference:
    """The outputs that a model of attention must have.

    arrays: the model's weights of projections and norms, sinks, and scales of an int8 cache.
    inputs: those of the case.
    """

    rope: RotaryEmbedding
    options: AttentionOptions
    arrays: dict[str, Array]
    inputs: CaseInputs

    @property
    def unit(self) -> float:
        """The variance u² of a rounding in the model's arithmetic.

        In float64 it is doubled: the reference itself rounds as much.
        """
        return 2 * 2.0**-106 if self.options.dtype == FLOAT64 else 2.0**-48

    def outputs(self) -> dict[str, BoundedOutput]:
        """Return each output with its bound.

        Attention is (batch, tokens, heads, width) or (batch, tokens, out); present keys and values
        are by head.
        """
        q = self._attention_input("q")
        k = self._attention_input("k")
        v = self._attention_input("v")
        result = self._attend(
            _with_angle_variance(q), self._as_cached(k, "k"), self._as_cached(v, "v")
        )
        bound = DEVIATIONS * np.sqrt(result.variance) + self._half_ulp(result.value)
        outputs = {"attention": BoundedOutput(result.value, bound)}
        if self.options.past:
            outputs["present_key"] = self._present(k, "k")
            outputs["present_value"] = self._present(v, "v")
        return outputs

    def _present(self, rotated: RotatedEstimate, name: str) -> BoundedOutput:
        """Return present keys or values; those of an int8 cache in units of their scale."""
        if self.options.cache_dtype is not None:
            nearest, is_halfway = self._levels(rotated, name)
            return BoundedOutput(nearest, is_halfway.astype(np.float64))
        bound = DEVIATIONS * np.sqrt(rotated.variance)
        if self._is_rounded(name):
            bound = bound + self._half_ulp(rotated.value)
        return BoundedOutput(rotated.value, bound)

    def _half_ulp(self, value: Float64) -> Float64:
        """Return the error of one rounding to the model's dtype."""
        return tolerance.half_ulp(value, self.options.dtype)

    def _is_rounded(self, name: str) -> bool:
        """Return True if keys or values are rounded to the cache's dtype.

        They are not if they are computed in that dtype, or come in it.
        """
        if self.options.dtype == self.options.rotation.compute_dtype:
            return False
        return name == "k" or self.options.hidden is not None

    def _as_cached(self, rotated: RotatedEstimate, name: str) -> Estimate:
        """Return the keys or values that are attended to, rounded as the cache is."""
        if self.options.cache_dtype is not None:
            return self._from_int8(rotated, name)
        estimate = _with_angle_variance(rotated)
        if not self._is_rounded(name):
            return estimate
        rounding = self._half_ulp(estimate.value) ** 2 / 3
        return Estimate(estimate.value, estimate.variance + rounding)

    def _levels(self, rotated: RotatedEstimate, name: str) -> tuple[Float64, Array]:
        """Return the levels of an int8 cache, and where a level next to it is right too.

        The rounding to whole levels is no error: the model has to do the same. But where the exact
        value is halfway between two levels, up to its error, either is right.
        """
        scale = self.arrays[f"{name}_scale"]
        levels = np.clip(rotated.value / scale, *INT8_RANGE)
        error = (DEVIATIONS * np.sqrt(rotated.variance) + rotated.angle_bound) / scale
        error = error + 2 * np.sqrt(self.unit) * np.abs(levels)  # of the division
        nearest = np.rint(levels)
        return nearest, np.abs(levels - nearest) >= 0.5 - error

    def _from_int8(self, rotated: RotatedEstimate, name: str) -> Estimate:
        """Return the keys or values of an int8 cache."""
        scale = self.arrays[f"{name}_scale"]
        nearest, is_halfway = self._levels(rotated, name)
        variance = np.where(is_halfway, (LEVELS_APART * scale / DEVIATIONS) ** 2, 0)
        value = nearest * scale
        return Estimate(value, variance + self.unit * value**2)

    def _attention_input(self, name: str) -> RotatedEstimate:
        """Return q, k or v as (batch, heads, tokens, width): projected, normed, rotated."""
        estimate = self._input_vectors(name)
        if f"{name}_norm" in self.arrays:
            estimate = self._normed(name, estimate)
        angle_bound = np.zeros_like(estimate.value)
        if name != "v":
            rotation = self.options.rotation
            x = estimate.value
            ids = self.inputs.ids
            exact, bound = reference.rotation(self.rope.spec, x, ids, dtype=rotation.compute_dtype)
            if not rotation.tables:
                angle_bound = angle_rounding(self.rope, x, ids)
            bound = bound + tolerance.half_ulp(exact.high, np.float64)
            variance = self._rotated_variance(estimate.variance)
            variance = variance + ((bound + angle_bound) / DEVIATIONS) ** 2
            estimate = Estimate(exact.high, variance)
        by_head = estimate.by_head()
        return RotatedEstimate(by_head.value, by_head.variance, angle_bound.transpose(0, 2, 1, 3))

    def _input_vectors(self, name: str) -> Estimate:
        """Return q, k or v (batch, tokens, heads, width), projected if there are hidden states."""
        if self.options.hidden is None:
            x = self.inputs.tensors[name].astype(np.float64)
            return Estimate(x, np.zeros_like(x))
        hidden = self.inputs.tensors["hidden"].astype(np.float64)
        heads = self.options.num_heads if name == "q" else self.options.num_kv_heads
        projected = self._projected(name, Estimate(hidden, np.zeros_like(hidden)))
        return projected.reshape(*hidden.shape[:2], heads, -1)

    def _rotated_variance(self, variance: Float64) -> Float64:
        """Return variances (…, head_dim) after a rotation: those of both elements of a pair add."""
        first, second = self.rope.spec.pair_elements()
        pair_sum = self.rope.attention_factor**2 * (variance[..., first] + variance[..., second])
        rotated = variance.copy()
        rotated[..., first] = pair_sum
        rotated[..., second] = pair_sum
        return rotated

    def _projected(self, name: str, x: Estimate) -> Estimate:
        weight = self.arrays[f"{name}_weight"].astype(np.float64)
        y = product(x.value, weight)
        bias = self.arrays.get(f"{name}_bias", np.zeros(1)).astype(np.float64)
        value = y.value + bias
        rounding = self.unit * (y.variance + value**2)
        return Estimate(value, x.variance @ weight**2 + rounding)

    def _normed(self, name: str, x: Estimate) -> Estimate:
        weight = self.arrays[f"{name}_norm"].astype(np.float64)
        width = x.value.shape[-1]
        square = (x.value * x.value).mean(axis=-1, keepdims=True) + self.options.norm_epsilon
        y = x.value / np.sqrt(square) * weight
        shared = (x.value * x.value * x.variance).mean(axis=-1, keepdims=True) / width
        inherited = x.variance + (x.value / square) ** 2 * shared
        # The root halves the error of the sum of squares, which is 2·n in terms of `product`.
        rounding = (width / 2 + NORM) * self.unit * y**2
        return Estimate(y, weight**2 / square * inherited + rounding)

    def _attend(self, q: Estimate, k: Estimate, v: Estimate) -> Estimate:
        """Return the weighted values (batch, tokens, heads, width), projected if there is an o."""
        group = self.options.num_heads // self.options.num_kv_heads
        k = Estimate(np.repeat(k.value, group, axis=1), np.repeat(k.variance, group, axis=1))
        v = Estimate(np.repeat(v.value, group, axis=1), np.repeat(v.variance, group, axis=1))
        scores = self._scores(q, k)
        if "sinks" in self.arrays:
            scores, v = self._with_sinks(scores, v)
        weights = self._softmax(scores)
        result = product(weights.value, v.value)
        # Without the variance of the weights, which moves all elements of a head together.
        own_variance = weights.value**2 @ v.variance + self.unit * result.variance
        merged = Estimate(result.value, own_variance).by_head()
        if self.options.output is None:
            shift = self._weight_shift(weights.variance, v.value, result.value)
            return Estimate(merged.value, merged.variance + shift.transpose(0, 2, 1, 3))
        # The shift by a weight goes through the projection as a whole, head by head.
        weight = self.arrays["o_weight"].astype(np.float64)
        by_head = weight.reshape(self.options.num_heads, self.options.v_head_dim, -1)
        y = self._projected("o", merged.reshape(*merged.value.shape[:2], -1))
        shift = self._weight_shift(weights.variance, v.value @ by_head, result.value @ by_head)
        return Estimate(y.value, y.variance + shift.sum(axis=1))

    def _with_sinks(self, scores: Estimate, v: Estimate) -> tuple[Estimate, Estimate]:
        """Return scores with one more column, the sinks, and values with a row of zeros for it."""
        sinks = self.arrays["sinks"].astype(np.float64)[:, None, None]
        column = np.broadcast_to(sinks, (*scores.value.shape[:-1], 1))
        zeros = np.zeros_like(column)
        row = np.zeros_like(v.value[:, :, :1])
        scores = Estimate(
            np.concatenate([scores.value, column], axis=-1),
            np.concatenate([scores.variance, zeros], axis=-1),
        )
        values = Estimate(
            np.concatenate([v.value, row], axis=2), np.concatenate([v.variance, row], axis=2)
        )
        return scores, values

    def _softmax(self, scores: Estimate) -> Estimate:
        """Return the weights (batch, heads, tokens, tokens), 0 for queries without any key."""
        largest = np.maximum(scores.value.max(axis=-1, keepdims=True), -1e300)
        weights = np.exp(scores.value - largest)
        total = weights.sum(axis=-1, keepdims=True)
        weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
        attended = np.isfinite(scores.value)
        distance = np.where(attended, scores.value - largest, 0)
        variance = scores.variance + self.unit * (distance**2 + WEIGHT)
        # An error δ of a score multiplies its weight by e^δ, which is more than 1 + δ.
        score_error = np.minimum(DEVIATIONS * np.sqrt(variance), MAX_SCORE_ERROR)
        relative = np.where(attended, (np.expm1(score_error) / DEVIATIONS) ** 2, 0)
        return Estimate(weights, weights**2 * relative)

    def _weight_shift(self, weight_variance: Float64, value: Float64, result: Float64) -> Float64:
        """Return the variance that errors of the weights cause in a result, Σ weight·value.

        As weights have a sum of 1, an error ε of one moves the result by ε·(value − result), and
        errors of the sum that they are divided by move the whole: 2·n in terms of `product`.
        """
        shift = weight_variance @ value**2 - 2 * result * (weight_variance @ value)
        shift = shift + result**2 * weight_variance.sum(axis=-1, keepdims=True)
        rounding = 2 * weight_variance.shape[-1] * self.unit * result**2
        variance: Float64 = np.maximum(shift, 0) + rounding
        return variance

    def _scores(self, q: Estimate, k: Estimate) -> Estimate:
        """Return the scores (batch, heads, tokens, tokens), −inf where a key is not attended to."""
        options = self.options
        key = k.value.swapaxes(-1, -2)
        key_variance = k.variance.swapaxes(-1, -2)
        dot = product(q.value, key, SCALE)
        inherited = (q.value**2 + q.variance) @ key_variance + q.variance @ key**2
        variance = inherited + self.unit * dot.variance
        scores = options.scale * dot.value
        variance = options.scale**2 * variance
        if options.softcap is not None:
            scores = options.softcap * np.tanh(scores / options.softcap)
            variance = variance + SOFTCAP * self.unit * scores**2
        tokens = q.value.shape[2]
        scores = np.where(self._boolean_mask(tokens), scores + self._added_mask(), -np.inf)
        rounding = self.unit * np.where(np.isfinite(scores), scores, 0) ** 2
        return Estimate(scores, variance + rounding)

    def _boolean_mask(self, tokens: int) -> Array:
        """Return a mask (batch or 1, heads or 1, seq, seq), true where a query attends to a key."""
        options = self.options
        query = np.arange(tokens)[:, None]
        key = np.arange(tokens)
        mask = np.ones((1, 1, tokens, tokens), bool)
        if options.causal:
            mask = mask & (key <= query)
        if options.window is not None:
            mask = mask & (key > query - options.window)
        if options.mask == "padding":
            mask = mask & self.inputs.feeds[MASK_INPUT][:, None, None, :]
        elif options.mask == "bool":
            mask = mask & self.inputs.feeds[MASK_INPUT]
        return mask

    def _added_mask(self) -> Float64:
        """Return the mask that is added to the scores, 0 without one."""
        if self.options.mask == "float":
            return self.inputs.feeds[MASK_INPUT].astype(np.float64)
        return np.zeros(1)
