"""What `rope-cpu verify` finds out: every dtype and pairing, by NumPy kernel and by ONNX, judged and timed."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import compare
from rope_cpu.array_types import DTYPES, Array
from rope_cpu.rotation.embedding import RotaryEmbedding

Pair = tuple[Array, Array]

# From q, k and position ids to a call that rotates them, and the arrays it writes to.
Prepare = Callable[[Array, Array, Array], tuple[Callable[[], object], Pair]]
# One way to rotate: from a rotary embedding, a dtype, the heads of q and of k, and a number of positions; raises
# ValueError where it cannot express the rotation.
Way = Callable[[RotaryEmbedding, "np.dtype[Any]", tuple[int, int], int], Prepare]

LAYOUT = "bhsd"  # the axis order that ONNX has, so that all do the same work on the same bytes
TIMED_CALLS = 20


@dataclass(frozen=True)
class Figures:
    """What was measured of one way to rotate; errors are the larger of the prefill's and the decode step's.

    max_error: largest |result − exact|. of_tolerance: largest error as a fraction of what the tolerance allows that
    very element. from_numpy: largest difference from the NumPy kernel's result. prefill_seconds, decode_seconds: the
    fastest call on q and k.
    """

    max_error: float
    of_tolerance: float
    from_numpy: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: figures, or the reason why they cannot be had."""

    dtype: str
    pairing: str
    way: str
    figures: Figures | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """What to make of it."""
        if self.figures is None:
            return "not offered"
        return "ok" if self.figures.of_tolerance <= 1 else "FAIL"


@dataclass(frozen=True)
class Step:
    """Queries and keys that are rotated together, and what must come out."""

    q_and_k: Pair
    ids: Array
    expected: list[tuple[reference.Exact, Array]]

    def error(self, results: Pair) -> tuple[float, float]:
        """Return the largest error, and the largest as a fraction of its tolerance."""
        found = [
            compare(exact.error(_bshd(x)), bound)
            for x, (exact, bound) in zip(results, self.expected, strict=True)
        ]
        return max(error for error, _ in found), max(fraction for _, fraction in found)


def numpy_way(
    rope: RotaryEmbedding, dtype: np.dtype[Any], heads: tuple[int, int], positions: int
) -> Prepare:
    """Rotate by the compiled kernels: a plan, which serves every layer of a model."""

    def prepare(q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Pair]:
        out = np.empty_like(q), np.empty_like(k)
        return partial(rope.plan(ids, layout=LAYOUT), q, k, out=out), out

    return prepare


def onnx_way(
    target: str, rope: RotaryEmbedding, dtype: np.dtype[Any], heads: tuple[int, int], positions: int
) -> Prepare:
    """Rotate by the model exported for a target, its inputs and outputs bound once."""
    from rope_cpu.export import export_rope
    from rope_cpu.export.validation.session import bind, open_session

    session = open_session(
        export_rope(
            rope,
            target=target,
            dtype=dtype,
            layout=LAYOUT,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            max_positions=positions,
        )
    )

    def prepare(q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Pair]:
        out = np.empty_like(q), np.empty_like(k)
        feeds = {"q": q, "k": k, "position_ids": ids[None].astype(np.int64)}
        return bind(session, feeds, {"q_rot": out[0], "k_rot": out[1]}), out

    return prepare


def rows(
    ropes: Mapping[str, RotaryEmbedding],
    heads: tuple[int, int],
    tokens: int,
    ways: Mapping[str, Way],
) -> Iterator[Row]:
    """Yield a row for each dtype, pairing and way; the first way is the one that others are compared with.

    ropes: by pairing. tokens: of the prefill; a decode step of one token follows it.
    """
    for dtype_name, dtype in DTYPES.items():
        for pairing, rope in ropes.items():
            steps = [
                _step(rope, heads, 0, tokens, dtype),
                _step(rope, heads, tokens, tokens + 1, dtype),
            ]
            baseline: list[Pair] = []
            for name, way in ways.items():
                try:
                    prepare = way(rope, dtype, heads, tokens + 1)
                except ValueError as error:
                    yield Row(dtype_name, pairing, name, refused=str(error))
                    continue
                done = [_timed(prepare, step) for step in steps]
                baseline = baseline or [results for results, _ in done]
                yield Row(dtype_name, pairing, name, _figures(steps, done, baseline))


def _step(
    rope: RotaryEmbedding, heads: tuple[int, int], first: int, last: int, dtype: np.dtype[Any]
) -> Step:
    """Return the tokens from `first` up to `last`; with several axes every coordinate of a token is its number."""
    ids = np.arange(first, last)
    ids = ids if rope.axes == 1 else np.repeat(ids[:, None], rope.axes, axis=1)
    random = np.random.default_rng(first)
    q, k = (
        random.standard_normal((1, count, last - first, rope.head_dim)).astype(dtype)
        for count in heads
    )
    return Step((q, k), ids, [reference.rotation(rope.spec, _bshd(x), ids[None]) for x in (q, k)])


def _timed(prepare: Prepare, step: Step) -> tuple[Pair, float]:
    """Return what a way makes of a step, and the seconds that its fastest call takes."""
    call, results = prepare(*step.q_and_k, step.ids)
    return results, min(timeit.repeat(call, number=1, repeat=TIMED_CALLS))


def _figures(steps: list[Step], done: list[tuple[Pair, float]], baseline: list[Pair]) -> Figures:
    errors = [step.error(results) for step, (results, _) in zip(steps, done, strict=True)]
    differences = [
        np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
        for (results, _), others in zip(done, baseline, strict=True)
        for x, y in zip(results, others, strict=True)
    ]
    return Figures(
        max(error for error, _ in errors),
        max(fraction for _, fraction in errors),
        float(np.max(differences)),  # unlike max(), keeps NaN
        *(seconds for _, seconds in done),
    )


def _bshd(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)
