"""Validation cases: shapes, positions and values chosen to break a wrong model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rope_cpu.array_types import Array


def consecutive(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids that increase by 1 from 0."""
    return np.broadcast_to(np.arange(seq) % limit, (batch, seq))


def shuffled(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return random ids."""
    return rng.integers(0, limit, (batch, seq))


def one_row(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return random ids of one batch row, which are shared by all."""
    return shuffled(rng, 1, seq, limit)


def one_token(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return random ids of one token per row, whatever the number of tokens."""
    return shuffled(rng, batch, 1, limit)


def two_rows(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return random ids of two batch rows, whatever the batch."""
    return shuffled(rng, 2, seq, limit)


def left_padded(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids that stay 0 for some tokens of each row and then increase by 1."""
    ids: Array = np.maximum(np.arange(seq)[None] - rng.integers(0, seq, (batch, 1)), 0) % limit
    return ids


def last(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return the largest ids below the limit."""
    return np.maximum(limit - 1 - rng.permutation(batch * seq).reshape(batch, seq), 0)


def too_large(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return random ids, the last of which is the limit."""
    ids = shuffled(rng, batch, seq, limit)
    ids[-1, -1] = limit
    return ids


def negative(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids below 0."""
    return -1 - shuffled(rng, batch, seq, limit)


@dataclass(frozen=True)
class Case:
    """One validation case.

    steps: number of tokens in each consecutive run of the model.
    ids: function of (rng, batch, tokens, limit) that returns the position ids; limit is the first
        id that is too large.
    must_fail: the model has to refuse to run.
    kept: for a shared cache, the number of tokens that each row keeps of the first step; the others
        are padding, which later steps overwrite. Empty: all.
    same_buffer: for a shared cache, whether past and present are the same memory.
    """

    name: str
    batch: int
    steps: tuple[int, ...]
    ids: Callable[[np.random.Generator, int, int, int], Array] = consecutive
    must_fail: bool = False
    kept: tuple[int, ...] = ()
    same_buffer: bool = True

    @property
    def tokens(self) -> int:
        """Number of tokens of a sequence over all steps, in a shared cache of the shortest row."""
        padding = self.steps[0] - min(self.kept) if self.kept else 0
        return sum(self.steps) - padding


def ids_by_axis(ids: Array, axes: int, rng: np.random.Generator | None = None) -> Array:
    """Return ids (batch, seq), with several axes (batch, seq, axes).

    The ids of the later axes are those of the first, permuted if `rng` is given.
    """
    if axes == 1:
        return np.ascontiguousarray(ids)
    later = [ids if rng is None else rng.permuted(ids, axis=-1) for _ in range(axes - 1)]
    return np.stack([ids, *later], axis=-1)


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return random queries or keys (…, head_dim): some normal, some large, small or constant."""
    x = rng.standard_normal(shape)
    scale = rng.choice([1.0, 1.0, 1.0, 1e3, 1e-3], size=(*shape[:-1], 1))
    is_constant = rng.random((*shape[:-1], 1)) < 0.1
    mixed: Array = np.where(is_constant, x[..., :1], x * scale)
    return mixed.astype(dtype)
