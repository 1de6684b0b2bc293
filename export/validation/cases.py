"""Shapes, positions and values drawn to break an exported rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..options import RopeOptions

Array = NDArray[Any]

# Where angles are computed, positions are drawn up to here.
COMPUTED_LIMIT = 1_000_000


@dataclass(frozen=True)
class Case:
    """One draw: batch, tokens, and the ids, made from (rng, batch, seq, limit); limit: the first id that is too large.

    must_fail: the model has to refuse these ids when it runs.
    """

    name: str
    batch: int
    seq: int
    ids: Callable[[np.random.Generator, int, int, int], Array]
    must_fail: bool = False


def _consecutive(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    return np.broadcast_to(np.arange(seq) % limit, (batch, seq))


def _drawn(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    return rng.integers(0, limit, (batch, seq))


def _left_padded(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    ids: Array = np.maximum(np.arange(seq)[None] - rng.integers(0, seq, (batch, 1)), 0) % limit
    return ids


def _at_the_end(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    return np.maximum(limit - 1 - rng.permutation(batch * seq).reshape(batch, seq), 0)


def _too_large(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    ids = _drawn(rng, batch, seq, limit)
    ids[-1, -1] = limit
    return ids


def _negative(rng: np.random.Generator, batch: int, seq: int, limit: int) -> Array:
    return -1 - _drawn(rng, batch, seq, limit)


IDS_CASES = (
    Case("one token", 1, 1, _drawn),
    Case("prompt", 1, 33, _consecutive),
    Case("decode step of a batch", 5, 1, _drawn),
    Case("shuffled ids", 2, 29, _drawn),
    Case("left-padded ids", 3, 17, _left_padded),
    Case("last ids", 2, 24, _at_the_end),
    Case("one row of ids for a batch", 3, 7, lambda rng, batch, seq, limit: _drawn(rng, 1, seq, limit)),
    Case("no tokens", 2, 0, _drawn),
    Case("no batch", 0, 3, _drawn),
)
TABLE_CASES = (
    Case("id past the table", 2, 5, _too_large, must_fail=True),
    Case("negative id", 2, 5, _negative, must_fail=True),
)
SHAPE_CASES = (
    Case("too few ids", 2, 6, lambda rng, batch, seq, limit: _drawn(rng, batch, 1, limit), must_fail=True),
    Case("ids of another batch", 1, 6, lambda rng, batch, seq, limit: _drawn(rng, 2, seq, limit), must_fail=True),
)
COMPUTED_CASES = (Case("negative ids", 2, 9, _negative),)
COUNTED_CASES = tuple(case for case in IDS_CASES if "ids" not in case.name)


def cases_of(options: RopeOptions) -> list[Case]:
    """Return the cases that apply to an export."""
    if options.positions != "position_ids":
        return list(COUNTED_CASES)
    chosen = [*IDS_CASES, *SHAPE_CASES, *(TABLE_CASES if options.tables else COMPUTED_CASES)]
    if options.layout == "thd":
        chosen = [case for case in chosen if "batch" not in case.name or case.name == "decode step of a batch"]
    if options.max_positions == 1:  # the one token that fits has an id in any case
        chosen = [case for case in chosen if case.name != "too few ids"]
    return chosen


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Draw queries or keys (…, head_dim): normal, very large, very small and equal elements too."""
    x = rng.standard_normal(shape)
    scale = rng.choice([1.0, 1.0, 1.0, 1e3, 1e-3], size=(*shape[:-1], 1))
    equal = rng.random((*shape[:-1], 1)) < 0.1
    drawn: Array = np.where(equal, x[..., :1], x * scale)
    return drawn.astype(dtype)
