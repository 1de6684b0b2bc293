"""Rotated attention in float64, in one pass over all tokens, and how far arithmetic may take a model from it.

Every value comes with the variance of the error that it may have in a model. It follows the value from step to step:
what comes in grows by the square of the step's derivative, and each operation adds u² of its result squared, roundings
being independent of each other. A result may lie `DEVIATIONS` of their roots from the exact one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference, tolerance
from rope_cpu.array_types import Array, Float64

from ..attention_options import AttentionOptions
from ..graph import FLOAT64
from ..masks import INPUT
from .check import Drawn
from .rope_check import angle_rounding

# A value, and the variance of its error.
Known = tuple[Float64, Float64]
# The same, and what rounded angles of the graph's own may have moved the value by.
Ready = tuple[Float64, Float64, Float64]

# Where a bound is known, it counts as so many deviations. (A rounding itself deviates by 0.4 u, not by u.)
DEVIATIONS = 6.0

# Numbers of roundings. Of scores: the scale on queries and on keys. Softcap: a quotient, a product, and tanh, of which
# onnxruntime's errs by 5.4 u at most. Of weights: exp, of which onnxruntime's errs by 1.7 u at most, and a quotient.
# Of a norm beside its sum: mean, epsilon, root, quotient and weight.
SCALE, SOFTCAP, WEIGHT, NORM = 4, 4, 4, 6


def product(a: Float64, b: Float64, more: int = 0) -> Known:
    """Return a · b, and its variance in units of u²; more: roundings of each product beside its own.

    The partial sums of n products wander from 0 to their sum s, and by √Σ(ab)² at most from that way where they come in
    no particular order: n roundings of them vary by n·(s² + Σ(ab)²).
    """
    result = a @ b
    return result, (a.shape[-1] + more) * (result**2 + a**2 @ b**2)


def _summed(ready: Ready) -> Known:
    """Return what is known of q or k where it is summed: the one rounding of an angle lies anywhere in its bound."""
    exact, variance, angles = ready
    return exact, variance + angles**2 / 3


@dataclass(frozen=True)
class Reference:
    """What a model of attention has to give.

    arrays: its weights of projections and norms. drawn: what goes in.
    """

    rope: RotaryEmbedding
    options: AttentionOptions
    arrays: dict[str, Array]
    drawn: Drawn

    @property
    def unit(self) -> float:
        """The variance u² of a rounding of the model's arithmetic; in float64 the reference itself rounds as much."""
        return 2 * 2.0**-106 if self.options.dtype == FLOAT64 else 2.0**-48

    def outputs(self) -> dict[str, Known]:
        """Return each output: attention as (batch, tokens, heads, width) or (…, out), present keys and values by head.

        Each with its bound instead of a variance.
        """
        q, k, v = (self._ready(name) for name in "qkv")
        result, varies = self._attended(
            _summed(q), self._as_cached(k, "k"), self._as_cached(v, "v")
        )
        due = {
            "attention": (
                result,
                DEVIATIONS * np.sqrt(varies) + tolerance.half_ulp(result, self.options.dtype),
            )
        }
        for name, (exact, varies, _) in {"k": k, "v": v}.items() if self.options.past else ():
            bound = DEVIATIONS * np.sqrt(varies)
            rounded = (
                tolerance.half_ulp(exact, self.options.dtype) if self._is_rounded(name) else 0.0
            )
            due[{"k": "present_key", "v": "present_value"}[name]] = exact, bound + rounded
        return due

    def _is_rounded(self, name: str) -> bool:
        """Return True if keys or values are rounded to the cache's dtype, rather than computed or given in it."""
        return self.options.dtype != self.options.rotation.compute_dtype and (
            name == "k" or self.options.hidden is not None
        )

    def _as_cached(self, ready: Ready, name: str) -> Known:
        """Return the keys or values that are attended to, rounded as the cache is."""
        exact, variance = _summed(ready)
        return exact, variance + self._is_rounded(name) * tolerance.half_ulp(
            exact, self.options.dtype
        ) ** 2 / 3

    def _ready(self, name: str) -> Ready:
        """Return q, k or v as (batch, heads, tokens, width): projected, normed, rotated."""
        options, ids = self.options, self.drawn.ids
        if options.hidden is not None:
            hidden = self.drawn.tensors["hidden"].astype(np.float64)
            heads = options.num_heads if name == "q" else options.num_kv_heads
            made = self._projected(name, hidden, np.zeros_like(hidden))
            x, variance = (y.reshape(*y.shape[:2], heads, -1) for y in made)
        else:
            x = self.drawn.tensors[name].astype(np.float64)
            variance = np.zeros_like(x)
        if f"{name}_norm" in self.arrays:
            x, variance = self._normed(name, x, variance)
        angles = np.zeros_like(x)
        if name != "v":
            exact, bound = reference.rotation(
                self.rope.spec, x, ids, dtype=options.rotation.compute_dtype
            )
            angles = angles if options.rotation.tables else angle_rounding(self.rope, x, ids)
            x, bound = exact.high, bound + tolerance.half_ulp(exact.high, np.float64)
            variance = self._rotated(variance) + ((bound + angles) / DEVIATIONS) ** 2
        return x.transpose(0, 2, 1, 3), variance.transpose(0, 2, 1, 3), angles.transpose(0, 2, 1, 3)

    def _rotated(self, variance: Float64) -> Float64:
        """Return what a rotation makes of variances (…, head_dim): each element's, and its pair's."""
        first, second = self.rope.spec.pair_elements()
        both = self.rope.attention_factor**2 * (variance[..., first] + variance[..., second])
        variance = variance.copy()
        variance[..., first] = variance[..., second] = both
        return variance

    def _projected(self, name: str, x: Float64, variance: Float64) -> Known:
        weight = self.arrays[f"{name}_weight"].astype(np.float64)
        y, rounded = product(x, weight)
        y = y + self.arrays.get(f"{name}_bias", np.zeros(1)).astype(np.float64)
        return y, variance @ weight**2 + self.unit * (rounded + y**2)

    def _normed(self, name: str, x: Float64, variance: Float64) -> Known:
        weight, width = self.arrays[f"{name}_norm"].astype(np.float64), x.shape[-1]
        square = (x * x).mean(axis=-1, keepdims=True) + self.options.norm_epsilon
        y = x / np.sqrt(square) * weight
        came = (
            variance + (x / square) ** 2 * (x * x * variance).mean(axis=-1, keepdims=True) / width
        )
        # The root halves what the sum of squares is off by, 2·n in terms of `product`.
        return y, weight**2 / square * came + (width / 2 + NORM) * self.unit * y**2

    def _attended(self, q: Known, k: Known, v: Known) -> Known:
        """Return the weighted values (batch, tokens, heads, width), or what they are projected to."""
        group = self.options.num_heads // self.options.num_kv_heads
        (key, key_varies), (value, value_varies) = (
            [np.repeat(x, group, axis=1) for x in known] for known in (k, v)
        )
        scores, varies = self._scores(q, (key, key_varies))
        most = np.maximum(scores.max(axis=-1, keepdims=True), -1e300)
        weights = np.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        weights = np.where(total > 0, weights / np.where(total > 0, total, 1), 0)
        seen = np.isfinite(scores)
        varies = varies + self.unit * (np.where(seen, scores - most, 0) ** 2 + WEIGHT)
        # A score that is off by δ makes its weight e^δ of what it is, which is more than 1 + δ; from e^30 on, anything.
        most_off = np.minimum(DEVIATIONS * np.sqrt(varies), 30.0)
        varies = np.where(seen, (np.expm1(most_off) / DEVIATIONS) ** 2, 0)
        weights_vary, (result, rounded) = weights**2 * varies, product(weights, value)
        alone = weights**2 @ value_varies + self.unit * rounded
        merged = result.transpose(0, 2, 1, 3), alone.transpose(0, 2, 1, 3)
        if self.options.output is None:
            return merged[0], merged[1] + self._moved(weights_vary, value, result).transpose(
                0, 2, 1, 3
            )
        # A weight that is off moves all elements of a head together, and so through the projection.
        weight = self.arrays["o_weight"].astype(np.float64)
        by_head = weight.reshape(self.options.num_heads, self.options.v_head_dim, -1)
        y, apart = self._projected("o", *(x.reshape(*x.shape[:2], -1) for x in merged))
        return y, apart + self._moved(weights_vary, value @ by_head, result @ by_head).sum(axis=1)

    def _moved(self, weights_vary: Float64, value: Float64, result: Float64) -> Float64:
        """Return how far weights move a result, Σ weight·value.

        As weights have a sum of 1, one that is off by ε moves it by ε·(value − result), and the sum that they are
        divided by moves the whole: 2·n in terms of `product`.
        """
        away = weights_vary @ value**2 - 2 * result * (weights_vary @ value)
        away = away + result**2 * weights_vary.sum(axis=-1, keepdims=True)
        moved: Float64 = np.maximum(away, 0) + 2 * weights_vary.shape[-1] * self.unit * result**2
        return moved

    def _scores(self, q: Known, k: Known) -> Known:
        """Return the scores, (batch, heads, tokens, tokens), minus infinity where a key is not attended to."""
        options, allowed, added = self.options, *self._masks(q[0].shape[2])
        (query, query_varies), (key, key_varies) = q, [x.swapaxes(-1, -2) for x in k]
        scores, rounded = product(query, key, SCALE)
        varies = (
            (query**2 + query_varies) @ key_varies + query_varies @ key**2 + self.unit * rounded
        )
        scores, varies = options.scale * scores, options.scale**2 * varies
        if options.softcap is not None:
            scores = options.softcap * np.tanh(scores / options.softcap)
            varies = varies + SOFTCAP * self.unit * scores**2
        scores = np.where(allowed, scores + added, -np.inf)
        return scores, varies + self.unit * np.where(np.isfinite(scores), scores, 0) ** 2

    def _masks(self, tokens: int) -> tuple[Array, Array]:
        """Return where attention is allowed, and what is added to the scores, each as (batch, heads, seq, seq)."""
        options, query, key = self.options, np.arange(tokens)[:, None], np.arange(tokens)
        allowed = np.ones((1, 1, tokens, tokens), bool)
        if options.causal:
            allowed = allowed & (key <= query)
        if options.window is not None:
            allowed = allowed & (key > query - options.window)
        if options.mask == "none":
            return allowed, np.zeros(1)
        mask = self.drawn.feeds[INPUT]
        if options.mask == "float":
            return allowed, mask.astype(np.float64)
        return allowed & (mask[:, None, None, :] if options.mask == "padding" else mask), np.zeros(
            1
        )
