"""The check of a model from `export_rope`."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.array_types import Array

from ..nodes import length_factor
from .cases import (
    Case,
    ids_by_axis,
    last,
    left_padded,
    negative,
    one_row,
    one_token,
    shuffled,
    too_large,
    two_rows,
    values,
)
from .check import CaseInputs, Check, ExpectedResult, from_layout, to_layout
from .session import run

# Number of heads of the first input, and of the others, where a model takes any number.
ANY_HEADS = (4, 2)

CASES = (
    Case("one token", 1, (1,), shuffled),
    Case("prefill", 1, (33,)),
    Case("decode step of a batch", 5, (1,), shuffled),
    Case("shuffled ids", 2, (29,), shuffled),
    Case("left-padded ids", 3, (17,), left_padded),
    Case("last ids", 2, (24,), last),
    Case("one row of ids for a batch", 3, (7,), one_row),
    Case("no tokens", 2, (0,), shuffled),
    Case("no batch", 0, (3,), shuffled),
)
TABLE_CASES = (
    Case("id past the table", 2, (5,), too_large, must_fail=True),
    Case("negative id", 2, (5,), negative, must_fail=True),
)
SHAPE_CASES = (
    Case("too few ids", 2, (6,), one_token, must_fail=True),
    Case("ids of another batch", 1, (6,), two_rows, must_fail=True),
)
COMPUTED_CASES = (Case("negative ids", 2, (9,), negative),)


class RopeCheck(Check):
    """Compares with the exact rotation and with the NumPy kernels."""

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        options = self.rotation
        if options.positions == "position_ids":
            cases = [*CASES, *SHAPE_CASES, *(TABLE_CASES if options.tables else COMPUTED_CASES)]
            if options.layout == "thd":
                cases = [case for case in cases if _applies_to_packed_tokens(case)]
        else:
            cases = [case for case in CASES if "ids" not in case.name]
        if options.max_positions == 1:  # cases have one token then, so that one id is enough
            cases = [case for case in cases if case.name != "too few ids"]
        # The fused operators refuse sequences longer than their table, whatever the ids.
        return [replace(case, steps=(min(case.tokens, self.limit),)) for case in cases]

    def draw(self, case: Case, rng: np.random.Generator) -> CaseInputs:
        """Return queries and keys, and ids."""
        options = self.rotation
        axes = self.rope.axes
        tensors = self._draw_tensors(case, rng)
        feeds = {name: to_layout(x, options.layout) for name, x in tensors.items()}
        if options.positions == "position_ids":
            ids = case.ids(rng, case.batch, case.tokens, self.limit)
            ids = ids_by_axis(ids, axes, rng)
            packed = _pack_tokens(ids, options.layout)
            feeds["position_ids"] = packed
        else:
            first = np.zeros(case.batch, np.int64)
            if options.positions == "offset":
                first = rng.integers(0, self.limit - case.tokens + 1, case.batch)
                feeds["offset"] = first
            ids = ids_by_axis(first[:, None] + np.arange(case.tokens), axes)
        return CaseInputs(feeds, tensors, ids)

    def _draw_tensors(self, case: Case, rng: np.random.Generator) -> dict[str, Array]:
        tensors = {}
        for index, (name, count) in enumerate(self.rotation.heads.items()):
            heads = count
            if heads is None:
                heads = ANY_HEADS[min(index, 1)] * self.rope.spec.inv_freq.shape[2]
            shape = (case.batch, case.tokens, heads, self.rope.head_dim)
            tensors[name] = self._limited(values(rng, shape, self.dtype))
        return tensors

    def _limited(self, x: Array) -> Array:
        """Return x, cut where its rotation would be beyond the dtype."""
        largest = float(ml_dtypes.finfo(self.dtype).max)
        limit = largest / 4 / max(1.0, length_factor(self.rope, self.rotation.inverse))
        return np.clip(x.astype(np.float64), -limit, limit).astype(self.dtype)

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the model."""
        shapes = [inputs.feeds[name].shape for name in inputs.tensors]
        results = run(self.session, inputs.feeds, shapes)
        return {
            f"{name}_rot": from_layout(result, self.rotation.layout, x.shape)
            for result, (name, x) in zip(results, inputs.tensors.items(), strict=True)
        }

    def expected(self, inputs: CaseInputs) -> dict[str, ExpectedResult]:
        """Return the exact rotation of each tensor."""
        inverse = self.rotation.inverse
        expected = {}
        for name, x in inputs.tensors.items():
            exact, bound = reference.rotation(self.rope.spec, x, inputs.ids, inverse=inverse)
            if not self.rotation.tables:
                bound = bound + angle_rounding(self.rope, x, inputs.ids, inverse)
            expected[f"{name}_rot"] = ExpectedResult(exact, bound)
        return expected

    def numpy_results(self, inputs: CaseInputs) -> dict[str, Array]:
        """Return the rotation of each tensor by the NumPy kernels."""
        inverse = self.rotation.inverse
        return {
            f"{name}_rot": self.rope.rotate(x, inputs.ids, inverse=inverse)
            for name, x in inputs.tensors.items()
        }


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
    frequency_heads = size.shape[2]
    if frequency_heads > 1:
        size = np.repeat(size, x.shape[2] // frequency_heads, axis=2)
    first, second = rope.spec.pair_elements()
    magnitude = np.abs(x.astype(np.float64))
    pair_size = magnitude[..., first] + magnitude[..., second]
    pair_shift = size * 2.0**-53 * length_factor(rope, inverse) * pair_size
    shift = np.zeros(x.shape)
    shift[..., first] = pair_shift
    shift[..., second] = pair_shift
    return shift


def _applies_to_packed_tokens(case: Case) -> bool:
    """Return True unless a case is about the batch axis, which packed tokens do not have."""
    return "batch" not in case.name or case.name == "decode step of a batch"


def _pack_tokens(x: Array, layout: str) -> Array:
    """Return ids (batch, seq, …), for packed tokens as (tokens, …)."""
    return x.reshape(-1, *x.shape[2:]) if layout == "thd" else x
