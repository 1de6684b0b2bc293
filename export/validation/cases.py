"""Shapes, positions and values drawn to break an exported model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_cpu.array_types import Array


def consecutive(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids that count from 0."""
    return np.broadcast_to(np.arange(seq) % limit, (batch, seq))


def shuffled(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids in no order."""
    return rng.integers(0, limit, (batch, seq))


def left_padded(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids that stay 0 for some tokens of each row, then count."""
    ids: Array = np.maximum(np.arange(seq)[None] - rng.integers(0, seq, (batch, 1)), 0) % limit
    return ids


def last(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return the largest ids below the limit."""
    return np.maximum(limit - 1 - rng.permutation(batch * seq).reshape(batch, seq), 0)


def too_large(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids of which one is the limit."""
    ids = shuffled(rng, batch, seq, limit)
    ids[-1, -1] = limit
    return ids


def negative(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids below 0."""
    return -1 - shuffled(rng, batch, seq, limit)


@dataclass(frozen=True)
class Case:
    """One draw.

    steps: the numbers of tokens that a model is fed one after another. ids: from (rng, batch, tokens, limit) to the
    position_ids, limit being the first one that is too large. must_fail: the model has to refuse to run.
    """

    name: str
    batch: int
    steps: tuple[int, ...]
    ids: Callable[[np.random.Generator, int, int, int], Array] = consecutive
    must_fail: bool = False

    @property
    def tokens(self) -> int:
        """Number of all tokens of a sequence."""
        return sum(self.steps)


def on_axes(ids: Array, axes: int, rng: np.random.Generator | None = None) -> Array:
    """Return ids (batch, seq), with several axes (…, axes): the same on all, or permuted by `rng` on the later ones."""
    if axes == 1:
        return np.ascontiguousarray(ids)
    later = [ids if rng is None else rng.permuted(ids, axis=-1) for _ in range(axes - 1)]
    return np.stack([ids, *later], axis=-1)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw queries or keys (…, head_dim): normal, very large, very small and equal elements too."""
    x = rng.standard_normal(shape)
    scale = rng.choice([1.0, 1.0, 1.0, 1e3, 1e-3], size=(*shape[:-1], 1))
    equal = rng.random((*shape[:-1], 1)) < 0.1
    drawn: Array = np.where(equal, x[..., :1], x * scale)
    return drawn.astype(dtype)
