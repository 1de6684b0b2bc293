"""The steps of every validation, draw, run and compare; and that of a model from `export_rope`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnxruntime

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.reference import Exact
from rope_cpu.accuracy.tolerance import compare
from rope_cpu.arguments.texts import first_line
from rope_cpu.array_types import Array, Float64

from ..graph import permutation
from ..nodes import length_factor
from ..options import RopeOptions
from .cases import Case, ids_by_axis, rope_cases, values
from .report import Outcome
from .session import run

# Positions are drawn below this limit where cos and sin are computed in the graph.
COMPUTED_LIMIT = 1_000_000
# Number of heads of the first input, and of the others, where a model takes any number.
ANY_HEADS = (4, 2)


@dataclass(frozen=True)
class CaseInputs:
    """The inputs of one case.

    feeds: the model's inputs. tensors: those to rotate or to project, as (batch, tokens, heads,
    width) or (batch, tokens, in). ids: positions of the tokens. arrays: weights, sinks and scales
    of attention.
    """

    feeds: dict[str, Array]
    tensors: dict[str, Array]
    ids: Array
    arrays: dict[str, Float64] = field(default_factory=dict)


class Expected(NamedTuple):
    """The exact values of an output, and the allowed difference of each element."""

    name: str
    exact: Exact
    bound: Array


class Validation:
    """Runs cases through a session; subclasses define cases, inputs, runs and exact results."""

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

    def expected(self, inputs: CaseInputs, results: dict[str, Array]) -> Iterator[Expected]:
        """Yield each output; later ones may depend on results that were compared before."""
        raise NotImplementedError

    @np.errstate(all="ignore")  # a wrong model may return infinities
    def outcome(self, case: Case, seed: int) -> Outcome:
        """Run one case and compare its results."""
        # The inputs of a case depend on its name and the seed alone.
        inputs = self.draw(case, np.random.default_rng([seed, zlib.crc32(case.name.encode())]))
        tensors = list(inputs.tensors.values())
        inputs_to = max(float(np.abs(x.astype(np.float64)).max(initial=0)) for x in tensors)
        outcome = Outcome(
            case.name, seed, tensors[0].shape, refused=case.must_fail, largest_input=inputs_to
        )
        try:
            results = self.run(case, inputs)
        except Exception as error:  # onnxruntime's errors have no common class of their own
            if case.must_fail:
                return outcome
            message = first_line(error)[-160:]
            return replace(outcome, problem=f"failed to run: {message}")
        if case.must_fail:
            return replace(outcome, problem="ran, but these ids must be refused")
        for expected in self.expected(inputs, results):
            result = results[expected.name]
            shape = expected.exact.high.shape
            if result.shape != shape or result.dtype != self.dtype:
                found = f"{expected.name} is {result.dtype} {result.shape}"
                return replace(outcome, problem=f"{found}; it must be {self.dtype} {shape}")
            largest, ratio = compare(expected.exact.error(result), expected.bound)
            outcome = replace(
                outcome, error=max(outcome.error, largest), ratio=max(outcome.ratio, ratio)
            )
        return outcome


class RopeValidation(Validation):
    """Compares with the exact rotation."""

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        # The fused operators refuse sequences longer than their table, whatever the ids.
        return [
            replace(case, steps=(min(case.tokens, self.limit),))
            for case in rope_cases(self.rotation)
        ]

    def draw(self, case: Case, rng: np.random.Generator) -> CaseInputs:
        """Return queries and keys, and ids."""
        options = self.rotation
        axes = self.rope.axes
        tensors = self._draw_tensors(case, rng)
        feeds = {name: to_layout(x, options.layout) for name, x in tensors.items()}
        if options.positions == "position_ids":
            ids = case.ids(rng, case.batch, case.tokens, self.limit)
            ids = ids_by_axis(ids, axes, rng)
            feeds["position_ids"] = ids
            if options.layout == "thd":
                feeds["position_ids"] = ids.reshape(-1, *ids.shape[2:])
        else:
            first = np.zeros(case.batch, np.int64)
            if options.positions == "offset":
                first = rng.integers(0, self.limit - case.tokens + 1, case.batch)
                feeds["offset"] = first
            ids = ids_by_axis(first[:, None] + np.arange(case.tokens), axes)
        return CaseInputs(feeds, tensors, ids)

    def _draw_tensors(self, case: Case, rng: np.random.Generator) -> dict[str, Array]:
        """Return queries and keys, so small that no rotated one is beyond the dtype."""
        largest = float(ml_dtypes.finfo(self.dtype).max)
        limit = largest / 4 / max(1.0, length_factor(self.rope, self.rotation.inverse))
        tensors = {}
        for index, (name, count) in enumerate(self.rotation.heads.items()):
            heads = count
            if heads is None:
                heads = ANY_HEADS[min(index, 1)] * self.rope.spec.inv_freq.shape[2]
            x = values(rng, (case.batch, case.tokens, heads, self.rope.head_dim), self.dtype)
            tensors[name] = np.clip(x.astype(np.float64), -limit, limit).astype(self.dtype)
        return tensors

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the model."""
        shapes = [inputs.feeds[name].shape for name in inputs.tensors]
        results = run(self.session, inputs.feeds, shapes)
        return {
            f"{name}_rot": from_layout(result, self.rotation.layout, x.shape)
            for result, (name, x) in zip(results, inputs.tensors.items(), strict=True)
        }

    def expected(self, inputs: CaseInputs, results: dict[str, Array]) -> Iterator[Expected]:
        """Yield the exact rotation of each tensor."""
        inverse = self.rotation.inverse
        for name, x in inputs.tensors.items():
            exact, bound = reference.rotation(self.rope.spec, x, inputs.ids, inverse=inverse)
            if self.rotation.max_positions is None:
                bound = bound + angle_rounding(self.rope, x, inputs.ids, inverse)
            yield Expected(f"{name}_rot", exact, bound)


def angle_rounding(rope: RotaryEmbedding, x: Array, ids: Array, inverse: bool = False) -> Array:
    """Return the largest shift of a rotation of x by angles that are rounded to float64 in a graph.

    An angle over n axes rounds n products and n − 1 sums of them, each by 2^-53 of Σ|p·ω| at most;
    an element moves by that times A·(|x_a| + |x_b|).

    x: (batch, seq, heads, head_dim). ids: (batch, seq), with several axes (batch, seq, axes).
    """
    inv_freq = rope.spec.inv_freq[0]  # (axes, heads or 1, pairs)
    position = ids.reshape(*ids.shape[:2], rope.axes, 1, 1)
    terms = np.maximum((inv_freq != 0).sum(axis=0), 1)
    size = np.abs(position * inv_freq).sum(axis=2) * terms  # (batch, seq, heads or 1, pairs)
    size = np.repeat(size, x.shape[2] // size.shape[2], axis=2)
    first, second = rope.spec.pair_elements()
    magnitude = np.abs(x.astype(np.float64))
    pair_size = magnitude[..., first] + magnitude[..., second]
    pair_shift = size * 2.0**-53 * length_factor(rope, inverse) * pair_size
    shift = np.zeros(x.shape)
    shift[..., first] = pair_shift
    shift[..., second] = pair_shift
    return shift


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
