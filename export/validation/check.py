"""The steps of every check: draw inputs for a case, run the model, compare with exact results."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnxruntime

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare
from rope_cpu.arguments.texts import first_line
from rope_cpu.array_types import Array

from ..graph import permutation
from ..options import RopeOptions
from .cases import Case
from .validation_report import Outcome

# Positions are drawn below this limit where cos and sin are computed in the graph.
COMPUTED_LIMIT = 1_000_000


@dataclass(frozen=True)
class CaseInputs:
    """The inputs of one case.

    feeds: the model's inputs. tensors: those to rotate or to project, as (batch, tokens, heads,
    width) or (batch, tokens, in). ids: positions of the tokens.
    """

    feeds: dict[str, Array]
    tensors: dict[str, Array]
    ids: Array


class ExpectedResult(NamedTuple):
    """The exact values of a result, and the allowed difference of each element."""

    exact: Exact
    bound: Array


class Check:
    """Runs cases through a session; subclasses define the inputs and the exact results."""

    def __init__(
        self, session: onnxruntime.InferenceSession, rope: RotaryEmbedding, rotation: RopeOptions
    ) -> None:
        """Store the session; rotation: the options of the rotation."""
        self.session = session
        self.rope = rope
        self.rotation = rotation
        self.dtype = np.dtype(rotation.dtype)
        # The first position that is too large.
        self.limit = rotation.max_positions or COMPUTED_LIMIT

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        raise NotImplementedError

    def draw(self, case: Case, rng: np.random.Generator) -> CaseInputs:
        """Return random inputs for a case."""
        raise NotImplementedError

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the model; return its results by name, with axes as in `CaseInputs.tensors`."""
        raise NotImplementedError

    def expected(self, inputs: CaseInputs) -> dict[str, ExpectedResult]:
        """Return the exact results by name."""
        raise NotImplementedError

    def numpy_results(self, inputs: CaseInputs) -> dict[str, Array]:
        """Return the results of this package's NumPy kernels, if there are kernels for this."""
        return {}

    def outcome(self, case: Case, seed: int) -> Outcome:
        """Run one case and compare its results."""
        inputs = self._draw_seeded(case, seed)
        shape = next(iter(inputs.tensors.values())).shape
        largest = max(
            float(np.abs(x.astype(np.float64)).max(initial=0)) for x in inputs.tensors.values()
        )
        outcome = Outcome(case.name, seed, shape, refused=case.must_fail, largest_input=largest)
        try:
            results = self.run(case, inputs)
        except Exception as error:  # onnxruntime's errors have no common class of their own
            if case.must_fail:
                return outcome
            message = first_line(error)[-160:]
            return replace(outcome, problem=f"failed to run: {message}")
        if case.must_fail:
            return replace(outcome, problem="ran, but these ids must be refused")
        numpy_results = self.numpy_results(inputs)
        for name, expected in self.expected(inputs).items():
            problem = self._shape_problem(name, results.get(name), expected)
            if problem is not None:
                return replace(outcome, problem=problem)
            outcome = _compare(outcome, results[name], expected, numpy_results.get(name))
        return outcome

    def _shape_problem(
        self, name: str, result: Array | None, expected: ExpectedResult
    ) -> str | None:
        """Return why a result cannot be compared, None if it can."""
        if result is None:
            return f"there is no output {name}"
        shape = expected.exact.high.shape
        if result.shape != shape or result.dtype != self.dtype:
            return f"{name} is {result.dtype} {result.shape}; it must be {self.dtype} {shape}"
        return None

    def replay(self, outcome: Outcome) -> dict[str, Array]:
        """Run a case again; return its inputs, results, exact values and bounds by name.

        Nothing is returned for an outcome that is of no case, such as the static checks.
        """
        case = next((case for case in self.cases() if case.name == outcome.case), None)
        if case is None:
            return {}
        inputs = self._draw_seeded(case, outcome.seed)
        arrays = dict(inputs.feeds)
        if not case.must_fail:
            arrays |= self.run(case, inputs)
            for name, expected in self.expected(inputs).items():
                stem = name.removesuffix("_rot")
                arrays[f"{stem}_exact"] = expected.exact.high
                arrays[f"{stem}_bound"] = expected.bound
        return arrays

    def _draw_seeded(self, case: Case, seed: int) -> CaseInputs:
        """Return the inputs of a case, which depend on its name and the seed alone."""
        return self.draw(case, np.random.default_rng([seed, zlib.crc32(case.name.encode())]))


def as_exact(x: Array) -> Exact:
    """Return numbers that are exact in float64 as `Exact`."""
    wide = x.astype(np.float64)
    return Exact(wide, np.zeros_like(wide))


def to_layout(x: Array, layout: str) -> Array:
    """Return (batch, seq, heads, head_dim) in a layout; hidden states, of three axes, unchanged."""
    if x.ndim == 3:
        return np.ascontiguousarray(x)
    batch, seq, heads, width = x.shape
    if layout == "thd":
        return x.reshape(batch * seq, heads, width)
    if layout == "bsd":
        return x.reshape(batch, seq, heads * width)
    return np.ascontiguousarray(x.transpose(permutation("bshd", layout)))


def from_layout(x: Array, layout: str, shape: tuple[int, ...]) -> Array:
    """Return a tensor of a layout as (batch, seq, heads, head_dim), or hidden states, of `shape`.

    A tensor of another size is returned unchanged, so that its shape can be reported.
    """
    if layout in ("thd", "bsd"):
        return x.reshape(shape) if x.size == np.prod(shape) else x
    return x.transpose(permutation(layout, "bshd"))


def _compare(
    outcome: Outcome, result: Array, expected: ExpectedResult, numpy_result: Array | None
) -> Outcome:
    """Return the outcome with one more result compared."""
    error, ratio = compare(expected.exact.error(result), expected.bound)
    outcome = replace(outcome, error=max(outcome.error, error), ratio=max(outcome.ratio, ratio))
    if numpy_result is None:
        return outcome
    # Both results may be off by the bound, so their difference may be twice that.
    difference = as_exact(numpy_result).error(result)
    numpy_error, numpy_ratio = compare(difference, 2 * expected.bound)
    problem = outcome.problem
    if outcome.ratio <= 1 < numpy_ratio:
        problem = "differs from NumPy"
    against_numpy = float(np.fmax(outcome.against_numpy, numpy_error))
    return replace(outcome, against_numpy=against_numpy, problem=problem)
