"""The prompt and the decode step that `rope-cpu verify` rotates, what must come out, and how far off a result is."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import reference
from rope_cpu.reference import Exact, Float64
from rope_cpu.rotary import RotaryEmbedding
from rope_cpu.tolerance import rotation_bound

Array = NDArray[Any]


@dataclass(frozen=True)
class Step:
    """Tokens that are rotated together, and what must come out: x (1, heads, tokens, head_dim), q above k."""

    x: Array
    q_heads: int
    ids: Array
    exact: Exact
    bound: Float64

    @property
    def q_and_k(self) -> tuple[Array, Array]:
        """The queries and the keys."""
        return np.ascontiguousarray(self.x[:, : self.q_heads]), np.ascontiguousarray(self.x[:, self.q_heads :])

    def judge(self, result: Array) -> tuple[float, float]:
        """Return the largest error, and the largest as a fraction of its bound."""
        error = self.exact.error(result)
        with np.errstate(invalid="ignore", divide="ignore"):
            fraction = np.where(error == 0, 0.0, error / self.bound)
        return float(error.max()), float(fraction.max())


def steps(rope: RotaryEmbedding, heads: tuple[int, int], tokens: int, dtype: np.dtype[Any]) -> tuple[Step, Step]:
    """Return a prompt and the one token after it, in a dtype, and the exact results for both.

    With several axes every coordinate of a token is its number.
    """
    omega = rope.spec.inv_freq[0]
    turns = [sum(map(Fraction, column), Fraction(0)) for column in omega.reshape(len(omega), -1).T.tolist()]
    cos, sin = reference.consecutive(turns, 0, tokens + 1, rope.attention_factor)
    random = np.random.default_rng(0)

    def step(first: int, last: int) -> Step:
        x = random.standard_normal((1, sum(heads), last - first, rope.head_dim)).astype(dtype)
        ids = np.arange(first, last)
        ids = ids if rope.axes == 1 else np.repeat(ids[:, None], rope.axes, axis=1)
        own = (Exact(part.high[first:last], part.low[first:last]) for part in (cos, sin))
        return Step(x, heads[0], ids, *_expected(rope, heads, x, *own))

    return step(0, tokens), step(tokens, tokens + 1)


def _expected(rope: RotaryEmbedding, heads: tuple[int, int], x: Array, cos: Exact, sin: Exact) -> tuple[Exact, Float64]:
    """Return the exact rotation of x and the bound on its error; cos, sin: (tokens, frequency heads · pairs)."""
    first, second = rope.spec.pair_elements()
    wide = x.astype(np.float64)
    exact, bound = Exact(wide.copy(), np.zeros_like(wide)), np.zeros_like(wide)
    frequency_heads = rope.spec.inv_freq.shape[2]
    groups = np.concatenate([np.arange(count) // (count // frequency_heads) for count in heads])
    # Head by head: what one head needs on the way fits the cache.
    for head, group in enumerate(groups):
        columns = slice(group * len(first), (group + 1) * len(first))
        c, s = (Exact(part.high[:, columns], part.low[:, columns]) for part in (cos, sin))
        x_a, x_b = wide[0, head][:, first], wide[0, head][:, second]
        for where, part in zip((first, second), reference.rotate(x_a, x_b, c, s), strict=True):
            exact.high[0, head][:, where], exact.low[0, head][:, where] = part.high, part.low
            bound[0, head][:, where] = rotation_bound(part.high, x_a, x_b, rope.attention_factor, x.dtype)
    return exact, bound
