"""The measurements of `rope-cpu verify`: each dtype and pairing, by NumPy and by ONNX."""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.accuracy import reference
from rope_cpu.accuracy.tolerance import beyond_rounding, half_ulp
from rope_cpu.array_types import DTYPES, Array
from rope_cpu.rotation.embedding import RotaryEmbedding

Pair = tuple[Array, Array]

# Makes a call of q, k and position ids that writes to preallocated arrays; returns it with these.
Prepare = Callable[[Array, Array, Array], tuple[Callable[[], object], Pair]]
# An implementation of the rotation. Arguments: the rotary embedding, the dtype, the numbers of
# query and of key heads, the number of positions. Raises ValueError if the rotation is unsupported.
Operation = Callable[[RotaryEmbedding, "np.dtype[Any]", tuple[int, int], int], Prepare]

# The axis order of ONNX, so that all operations do the same work on the same bytes.
LAYOUT = "bhsd"
TIMED_CALLS = 20


@dataclass(frozen=True)
class Figures:
    """Errors and times of one operation; an error is the larger one of prefill and decode step.

    max_error: largest |result − exact|. beyond_rounding: see the function of this name in
    `rope_cpu.accuracy.tolerance`; at most 1 for a correct result. from_numpy: largest difference
    from the result of the NumPy kernels. prefill_seconds, decode_seconds: the fastest call on q
    and k.
    """

    max_error: float
    beyond_rounding: float
    from_numpy: float
    prefill_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: the figures, or the reason why the operation is not offered."""

    dtype: str
    pairing: str
    operation: str
    figures: Figures | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """One of "ok", "FAIL" and "not offered"."""
        if self.figures is None:
            return "not offered"
        return "ok" if self.figures.beyond_rounding <= 1 else "FAIL"


@dataclass(frozen=True)
class Step:
    """Queries and keys (batch, heads, seq, head_dim), their position ids and their exact rotation.

    expected: for q and for k the exact result, the tolerance of each element, and the part of it
    that is the rounding of the result.
    """

    q_and_k: Pair
    ids: Array
    expected: list[tuple[reference.Exact, Array, Array]]

    def errors(self, results: Pair) -> tuple[float, float]:
        """Return the largest error, and the largest error beyond rounding."""
        errors = []
        for result, (exact, bound, rounding) in zip(results, self.expected, strict=True):
            error = exact.error(_bshd(result))
            errors.append((error.max(initial=0.0), beyond_rounding(error, bound, rounding)))
        return _column_maxima(errors)


def numpy_operation(
    rope: RotaryEmbedding, dtype: np.dtype[Any], heads: tuple[int, int], positions: int
) -> Prepare:
    """Rotate by the compiled kernels, through a plan."""

    def prepare(q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Pair]:
        out = (np.empty_like(q), np.empty_like(k))
        plan = rope.plan(ids, layout=LAYOUT)
        return partial(plan, q, k, out=out), out

    return prepare


def onnx_operation(
    target: str, rope: RotaryEmbedding, dtype: np.dtype[Any], heads: tuple[int, int], positions: int
) -> Prepare:
    """Rotate by the model exported for a target; its inputs and outputs are bound once."""
    from rope_cpu.export import bind, export_rope
    from rope_cpu.export.validation.session import open_session

    num_heads, num_kv_heads = heads
    model = export_rope(
        rope,
        target=target,
        dtype=dtype,
        layout=LAYOUT,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        max_positions=positions,
    )
    session = open_session(model)

    def prepare(q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Pair]:
        q_rot = np.empty_like(q)
        k_rot = np.empty_like(k)
        feeds = {"q": q, "k": k, "position_ids": ids[None].astype(np.int64)}
        call = bind(session, feeds, {"q_rot": q_rot, "k_rot": k_rot})
        return call, (q_rot, k_rot)

    return prepare


def rows(
    ropes: Mapping[str, RotaryEmbedding],
    heads: tuple[int, int],
    tokens: int,
    operations: Mapping[str, Operation],
) -> Iterator[Row]:
    """Yield a row for each dtype, pairing and operation.

    ropes: by pairing. tokens: of the prefill; a decode step of one token follows it. operations: by
    name; the others are compared with the first one.
    """
    for dtype_name, dtype in DTYPES.items():
        for pairing, rope in ropes.items():
            prefill = _step(rope, heads, range(tokens), dtype)
            decode = _step(rope, heads, range(tokens, tokens + 1), dtype)
            baseline: list[Pair] = []
            for name, operation in operations.items():
                try:
                    prepare = operation(rope, dtype, heads, tokens + 1)
                except ValueError as error:
                    yield Row(dtype_name, pairing, name, refused=str(error))
                    continue
                prefill_results, prefill_seconds = _timed(prepare, prefill)
                decode_results, decode_seconds = _timed(prepare, decode)
                results = [prefill_results, decode_results]
                if not baseline:
                    baseline = results
                max_error, beyond = _column_maxima(
                    [prefill.errors(prefill_results), decode.errors(decode_results)]
                )
                figures = Figures(
                    max_error=max_error,
                    beyond_rounding=beyond,
                    from_numpy=_largest_difference(results, baseline),
                    prefill_seconds=prefill_seconds,
                    decode_seconds=decode_seconds,
                )
                yield Row(dtype_name, pairing, name, figures)


def _step(
    rope: RotaryEmbedding, heads: tuple[int, int], positions: range, dtype: np.dtype[Any]
) -> Step:
    """Return random q and k at consecutive positions, the same on each axis."""
    ids = np.arange(positions.start, positions.stop)
    if rope.axes > 1:
        ids = np.repeat(ids[:, None], rope.axes, axis=1)
    random = np.random.default_rng(positions.start)
    q, k = (
        random.standard_normal((1, count, len(positions), rope.head_dim)).astype(dtype)
        for count in heads
    )
    expected = []
    for x in (q, k):
        exact, bound = reference.rotation(rope.spec, _bshd(x), ids[None])
        expected.append((exact, bound, half_ulp(exact.high, dtype)))
    return Step((q, k), ids, expected)


def _timed(prepare: Prepare, step: Step) -> tuple[Pair, float]:
    """Return the results of a step, and the seconds of the fastest call."""
    q, k = step.q_and_k
    call, results = prepare(q, k, step.ids)
    seconds = min(timeit.repeat(call, number=1, repeat=TIMED_CALLS))
    return results, seconds


def _largest_difference(results: list[Pair], baseline: list[Pair]) -> float:
    differences = [
        np.abs(x.astype(np.float64) - y.astype(np.float64)).max()
        for pair, baseline_pair in zip(results, baseline, strict=True)
        for x, y in zip(pair, baseline_pair, strict=True)
    ]
    return float(np.max(differences))  # unlike max(), keeps NaN


def _column_maxima(errors: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the largest of the first and of the second values; NaN if one is NaN."""
    largest, largest_fraction = np.max(errors, axis=0).tolist()
    return largest, largest_fraction


def _bshd(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3)
