"""Validation cases: shapes, positions and values chosen to break a wrong model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.array_types import Array

from ..options import RopeOptions


def consecutive(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    """Return ids that increase by 1 from 0."""
    return np.broadcast_to(np.arange(seq) % limit, (batch, seq))


def shuffled(
    rng: np.random.Generator, batch: int, seq: int, limit: int, rows: int = 0, tokens: int = 0
) -> Array:
    """Return random ids, of another number of batch rows or tokens if that is given."""
    return rng.integers(0, limit, (rows or batch, tokens or seq))


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

    def tokens_of_steps(self) -> Iterator[tuple[Array, Array]]:
        """Yield the tokens (batch, count) that each row processes in a step, and which are padding.

        Rows that have all their tokens repeat the last ones.
        """
        kept = np.array(self.kept or (self.steps[0],) * self.batch)
        start = np.zeros(self.batch, np.int64)
        end = kept[:, None]
        for count in self.steps:
            start = np.minimum(start, self.tokens - count)
            token = start[:, None] + np.arange(count)
            yield token, token >= end
            start = np.minimum(start + count, end[:, 0])
            end = np.full_like(end, self.tokens)


ROPE_CASES = (
    Case("one token", 1, (1,), shuffled),
    Case("prefill", 1, (33,)),
    Case("decode step of a batch", 5, (1,), shuffled),
    Case("shuffled ids", 2, (29,), shuffled),
    Case("left-padded ids", 3, (17,), left_padded),
    Case("last ids", 2, (24,), last),
    Case("one row of ids for a batch", 3, (7,), partial(shuffled, rows=1)),
    Case("no tokens", 2, (0,), shuffled),
    Case("no batch", 0, (3,), shuffled),
)
TABLE_CASES = (
    Case("id past the table", 2, (5,), too_large, must_fail=True),
    Case("negative id", 2, (5,), negative, must_fail=True),
)
COMPUTED_CASES = (Case("negative ids", 2, (9,), negative),)
SHAPE_CASES = (
    Case("too few ids", 2, (6,), partial(shuffled, tokens=1), must_fail=True),
    Case("ids of another batch", 1, (6,), partial(shuffled, rows=2), must_fail=True),
)
# About the batch axis, which packed tokens do not have.
BATCH_CASES = ("one row of ids for a batch", "no batch", "ids of another batch")

ATTENTION_CASES = (
    Case("prefill", 1, (19,)),
    Case("prefill of a batch", 3, (11,)),
    Case("one token", 2, (1,)),
    Case("prefill, then single steps", 2, (9, 1, 1, 1, 1)),
    Case("chunked prefill", 1, (5, 7, 1, 4)),
    Case("chunks of a batch", 2, (4, 3, 6)),
    Case("single steps", 1, (1,) * 7),
    Case("shuffled ids", 2, (12, 1), shuffled),
    Case("left-padded ids", 2, (12, 1), left_padded),
    Case("last ids", 2, (12, 1), last),
)
SHARED_CACHE_CASES = (
    Case("rows of different length", 3, (7, *(1,) * 5), kept=(7, 2, 4)),
    Case("chunks of such rows", 3, (8, 3, 3, 2), kept=(8, 2, 5)),
    Case("present beside the past", 2, (6, 1, 1, 1), kept=(6, 3), same_buffer=False),
)


def rope_cases(options: RopeOptions) -> list[Case]:
    """Return the cases of a rotation."""
    if options.positions != "position_ids":
        return [case for case in ROPE_CASES if "ids" not in case.name]
    further = COMPUTED_CASES if options.max_positions is None else TABLE_CASES
    cases = [*ROPE_CASES, *SHAPE_CASES, *further]
    if options.layout == "thd":
        cases = [case for case in cases if case.name not in BATCH_CASES]
    if options.max_positions == 1:  # cases have one token then, so that one id is enough
        cases = [case for case in cases if case.name != "too few ids"]
    return cases


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
