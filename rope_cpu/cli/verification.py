"""What `rope-cpu verify` finds out: every dtype and pairing, by NumPy kernel and by ONNX, judged and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rope_cpu import machine
from rope_cpu.cli.verify_cases import Array, Step, steps
from rope_cpu.rotary import RotaryEmbedding
from rope_cpu.validation.arrays import DTYPES

LAYOUT = "bhsd"  # the axis order that ONNX has, so that all do the same work on the same bytes

TIMED_SECONDS, TIMED_CALLS = 0.05, 20


@dataclass(frozen=True)
class Figures:
    """What was measured of one way to rotate; errors are the larger of the prompt's and the decode step's.

    max_error: largest |result − exact|. of_bound: largest error as a fraction of what the tolerance allows that very
    element. from_numpy: largest difference from the NumPy kernel's result. prompt_seconds, decode_seconds: the
    fastest call on q and k.
    """

    max_error: float
    of_bound: float
    from_numpy: float
    prompt_seconds: float
    decode_seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the table: figures, or the reason why they cannot be had."""

    dtype: str
    pairing: str
    path: str
    figures: Figures | None = None
    refused: str = ""

    @property
    def verdict(self) -> str:
        """What to make of it."""
        if self.figures is None:
            return "not offered"
        return "ok" if self.figures.of_bound <= 1 else "FAIL"  # NaN fails


@dataclass(frozen=True)
class Outcome:
    """All that `rope-cpu verify` reports: of which model, its own pairing, its rotation, its heads, and the rows."""

    model: str
    pairing: str
    rope: RotaryEmbedding
    heads: tuple[int, int]
    rows: list[Row]

    @property
    def passed(self) -> bool:
        """Whether every row that could be had is within tolerance."""
        return all(row.verdict != "FAIL" for row in self.rows)


class Path(Protocol):
    """One way to rotate q and k of a dtype."""

    def prepare(self, q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Array, Array]:
        """Return a call that rotates q and k, and the arrays it writes to."""
        ...


class NumPyPath:
    """The compiled kernels, by a plan."""

    def __init__(self, rope: RotaryEmbedding) -> None:
        self.rope = rope

    def prepare(self, q: Array, k: Array, ids: Array) -> tuple[Callable[[], object], Array, Array]:
        """Plan for these ids; calls then serve every layer of a model."""
        plan, out = self.rope.plan(ids, layout=LAYOUT), (np.empty_like(q), np.empty_like(k))
        return lambda: plan(q, k, out=out), *out


def run(path: Path, step: Step) -> tuple[Array, float]:
    """Return what a path makes of a step, and the seconds its fastest call takes."""
    call, q_rot, k_rot = path.prepare(*step.q_and_k, step.ids)
    call()
    seconds = machine.seconds(call, TIMED_CALLS, TIMED_SECONDS)
    return np.concatenate([q_rot, k_rot], axis=1), seconds


def rows(
    ropes: dict[str, RotaryEmbedding],
    heads: tuple[int, int],
    tokens: int,
    paths: dict[str, Callable[[RotaryEmbedding, np.dtype[Any]], Path]],
) -> Iterator[Row]:
    """Yield a row for each dtype, pairing and path; the first path is the one that others are compared with.

    ropes: by pairing. paths: how to make each; it raises ValueError where it cannot express the rotation.
    """
    for dtype_name, dtype in DTYPES.items():
        for pairing, rope in ropes.items():
            parts = steps(rope, heads, tokens, dtype)
            baseline: list[Array] = []
            for name, make in paths.items():
                try:
                    path = make(rope, dtype)
                except ValueError as error:
                    yield Row(dtype_name, pairing, name, refused=str(error))
                    continue
                done = [run(path, part) for part in parts]
                baseline = baseline or [result for result, _ in done]
                yield Row(dtype_name, pairing, name, _figures(parts, done, baseline))


def _figures(parts: tuple[Step, Step], done: list[tuple[Array, float]], baseline: list[Array]) -> Figures:
    results, seconds = zip(*done, strict=True)
    errors, fractions = zip(*(part.judge(result) for part, result in zip(parts, results, strict=True)), strict=True)
    differences = [_difference(result, other) for result, other in zip(results, baseline, strict=True)]
    return Figures(_largest(errors), _largest(fractions), _largest(differences), *seconds)


def _largest(values: Sequence[float]) -> float:
    return float(np.max(values))  # unlike max(), keeps NaN


def _difference(a: Array, b: Array) -> float:
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
