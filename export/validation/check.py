"""One check of an exported model: draw a case, run it, and compare each result with the exact one."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.reference import Exact
from rope_cpu.tolerance import compare
from rope_cpu.validation.texts import first_line

from ..layouts import permutation
from ..options import RopeOptions
from .cases import Case
from .report import Outcome

Array = NDArray[Any]

# Positions are drawn up to here where angles are computed, and where tables are inputs, which then are that long.
COMPUTED_LIMIT = 1_000_000
FED_ROWS = 96


@dataclass(frozen=True)
class Drawn:
    """What a case is run on.

    feeds: the model's inputs. tensors: those that are rotated or projected, as (batch, tokens, heads, width) or
    (batch, tokens, in). ids: of the tokens.
    """

    feeds: dict[str, Array]
    tensors: dict[str, Array]
    ids: Array


class Check:
    """Runs cases through a session; each kind of model says what is drawn, how it is run, and what is exact."""

    def __init__(self, opened: onnxruntime.InferenceSession, rope: RotaryEmbedding, rotation: RopeOptions) -> None:
        """Hold what a case needs; rotation: the options of the rotation."""
        self.session, self.rope, self.rotation = opened, rope, rotation
        self.dtype = np.dtype(rotation.dtype)
        self.limit = rotation.max_positions or (FED_ROWS if rotation.table_inputs else COMPUTED_LIMIT)

    def cases(self) -> list[Case]:
        """Return the cases that apply."""
        raise NotImplementedError

    def draw(self, case: Case, rng: np.random.Generator) -> Drawn:
        """Return what the case is run on."""
        raise NotImplementedError

    def run(self, case: Case, drawn: Drawn) -> dict[str, Array]:
        """Run the model; return its results by name, with axes as in `Drawn.tensors`."""
        raise NotImplementedError

    def expected(self, drawn: Drawn) -> dict[str, tuple[Exact, Array]]:
        """Return the exact value of each result, and how far it may lie from that."""
        raise NotImplementedError

    def kernels(self, drawn: Drawn) -> dict[str, Array]:
        """Return the results that this package's NumPy kernels give, where there are such."""
        return {}

    def outcome(self, case: Case, seed: int) -> Outcome:
        """Run one case."""
        drawn = self._drawn(case, seed)
        outcome = Outcome(case.name, seed, next(iter(drawn.tensors.values())).shape, refused=case.must_fail)
        try:
            results = self.run(case, drawn)
        except Exception as error:  # onnxruntime's errors share no class of their own
            problem = "" if case.must_fail else f"failed to run: {first_line(error)[-160:]}"
            return replace(outcome, problem=problem)
        if case.must_fail:
            return replace(outcome, problem="ran, but these ids must be refused")
        kernels = self.kernels(drawn)
        for name, (exact, bound) in self.expected(drawn).items():
            if name not in results:
                return replace(outcome, problem=f"there is no output {name}")
            result = results[name]
            if result.shape != exact.high.shape or result.dtype != self.dtype:
                wanted = f"{self.dtype} {exact.high.shape}"
                return replace(outcome, problem=f"{name} is {result.dtype} {result.shape}; it must be {wanted}")
            outcome = _compared(outcome, result, exact, bound, kernels.get(name))
        return outcome

    def replay(self, outcome: Outcome) -> dict[str, Array]:
        """Run a case again; return its inputs, results, exact values and bounds, nothing where no model was run."""
        case = next((case for case in self.cases() if case.name == outcome.case), None)
        if case is None:
            return {}
        drawn = self._drawn(case, outcome.seed)
        found = dict(drawn.feeds)
        if not case.must_fail:
            found |= self.run(case, drawn)
            for name, (exact, bound) in self.expected(drawn).items():
                stem = name.removesuffix("_rot")
                found |= {f"{stem}_exact": exact.high, f"{stem}_bound": bound}
        return found

    def _drawn(self, case: Case, seed: int) -> Drawn:
        return self.draw(case, np.random.default_rng([seed, zlib.crc32(case.name.encode())]))


def unrounded(x: Array) -> Exact:
    """Return numbers of one float64 each as exact ones."""
    wide = x.astype(np.float64)
    return Exact(wide, np.zeros_like(wide))


def to_layout(x: Array, layout: str) -> Array:
    """Bring (batch, seq, heads, head_dim) into a layout; hidden states, of three axes, stay as they are."""
    if x.ndim == 3:
        return np.ascontiguousarray(x)
    batch, seq, heads, width = x.shape
    if layout in ("thd", "bsd"):
        return x.reshape((batch * seq, heads, width) if layout == "thd" else (batch, seq, heads * width))
    return np.ascontiguousarray(x.transpose(permutation("bshd", layout)))


def from_layout(x: Array, layout: str, shape: tuple[int, ...]) -> Array:
    """Bring a layout back into (batch, seq, heads, head_dim) of `shape`; hidden states stay as they are."""
    if layout in ("thd", "bsd"):
        return x.reshape(shape) if x.size == np.prod(shape) else x
    return x.transpose(permutation(layout, "bshd"))


def _compared(outcome: Outcome, result: Array, exact: Exact, bound: Array, kernels: Array | None) -> Outcome:
    """Return the outcome with one more result compared."""
    error, ratio = compare(exact.error(result), bound)
    outcome = replace(outcome, error=max(outcome.error, error), ratio=max(outcome.ratio, ratio))
    if kernels is None:
        return outcome
    gap, twice = compare(unrounded(kernels).error(result), 2 * bound)
    problem = "differs from NumPy" if outcome.ratio <= 1 < twice else outcome.problem
    return replace(outcome, against_numpy=float(np.fmax(outcome.against_numpy, gap)), problem=problem)
