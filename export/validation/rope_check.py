"""The check of a model from `export_rope`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference
from rope_cpu.accuracy.reference import Exact
from rope_cpu.array_types import Array

from .. import cos_sin_nodes as angle_ops
from .cases import Case, last, left_padded, negative, on_axes, shuffled, too_large, values
from .check import Check, Drawn, from_layout, to_layout
from .session import run

# The number of heads where any will do.
FREE_HEADS = (4, 2)

CASES = (
    Case("one token", 1, (1,), shuffled),
    Case("prefill", 1, (33,)),
    Case("decode step of a batch", 5, (1,), shuffled),
    Case("shuffled ids", 2, (29,), shuffled),
    Case("left-padded ids", 3, (17,), left_padded),
    Case("last ids", 2, (24,), last),
    Case(
        "one row of ids for a batch",
        3,
        (7,),
        lambda rng, batch, seq, limit: shuffled(rng, 1, seq, limit),
    ),
    Case("no tokens", 2, (0,), shuffled),
    Case("no batch", 0, (3,), shuffled),
)
TABLE_CASES = (
    Case("id past the table", 2, (5,), too_large, must_fail=True),
    Case("negative id", 2, (5,), negative, must_fail=True),
)
SHAPE_CASES = (
    Case(
        "too few ids",
        2,
        (6,),
        lambda rng, batch, seq, limit: shuffled(rng, batch, 1, limit),
        must_fail=True,
    ),
    Case(
        "ids of another batch",
        1,
        (6,),
        lambda rng, batch, seq, limit: shuffled(rng, 2, seq, limit),
        must_fail=True,
    ),
)
COMPUTED_CASES = (Case("negative ids", 2, (9,), negative),)


class RopeCheck(Check):
    """Compares with the exact rotation and with the NumPy kernels."""

    def cases(self) -> list[Case]:
        """Return the cases that apply."""
        options = self.rotation
        if options.positions != "position_ids":
            chosen = [case for case in CASES if "ids" not in case.name]
        else:
            chosen = [*CASES, *SHAPE_CASES, *(TABLE_CASES if options.tables else COMPUTED_CASES)]
        if options.layout == "thd" and options.positions == "position_ids":
            chosen = [
                case
                for case in chosen
                if "batch" not in case.name or case.name == "decode step of a batch"
            ]
        if options.max_positions == 1:  # the one token that fits has an id in any case
            chosen = [case for case in chosen if case.name != "too few ids"]
        # The fused operators refuse sequences longer than their table, whatever the ids.
        return [replace(case, steps=(min(case.tokens, self.limit),)) for case in chosen]

    def draw(self, case: Case, rng: np.random.Generator) -> Drawn:
        """Return queries and keys, ids, and whatever else the model is fed."""
        options, layout, axes = self.rotation, self.rotation.layout, self.rope.axes
        tensors = {}
        for index, (name, count) in enumerate(options.heads.items()):
            heads = count or FREE_HEADS[min(index, 1)] * self.rope.spec.inv_freq.shape[2]
            tensors[name] = values(
                rng, (case.batch, case.tokens, heads, self.rope.head_dim), self.dtype
            )
        feeds = {name: to_layout(x, layout) for name, x in tensors.items()}
        if options.positions == "position_ids":
            ids = on_axes(case.ids(rng, case.batch, case.tokens, self.limit), axes, rng)
            feeds["position_ids"] = _packed(ids, layout).astype(options.position_dtype)
        else:
            first = np.zeros(case.batch, np.int64)
            if options.positions == "offset":
                first = rng.integers(0, self.limit - case.tokens + 1, case.batch)
                feeds["offset"] = first.astype(options.position_dtype)
            ids = on_axes(first[:, None] + np.arange(case.tokens), axes)
        return Drawn(feeds | self._tables(ids), tensors, ids)

    def _tables(self, ids: Array) -> dict[str, Array]:
        """Return cos and sin where they are inputs."""
        if not self.rotation.table_inputs:
            return {}
        if self.rotation.token_tables:
            cos, sin = (
                _packed(x, self.rotation.layout)
                for x in self.rope.cos_sin(ids, self.rotation.compute_dtype)
            )
        else:
            cos, sin = angle_ops.tables(self.rope, self.limit, False, self.rotation.compute_dtype)
        return {"cos_cache": cos, "sin_cache": sin}

    def run(self, case: Case, drawn: Drawn) -> dict[str, Array]:
        """Run the model."""
        results = run(
            self.session, drawn.feeds, [drawn.feeds[name].shape for name in drawn.tensors]
        )
        return {
            f"{name}_rot": from_layout(result, self.rotation.layout, x.shape)
            for result, (name, x) in zip(results, drawn.tensors.items(), strict=True)
        }

    def expected(self, drawn: Drawn) -> dict[str, tuple[Exact, Array]]:
        """Return the exact rotation of each tensor, and how far a result may lie from it."""
        found, inverse = {}, self.rotation.inverse
        for name, x in drawn.tensors.items():
            exact, bound = reference.rotation(self.rope.spec, x, drawn.ids, inverse=inverse)
            if not self.rotation.tables:
                bound = bound + angle_rounding(self.rope, x, drawn.ids, inverse)
            found[f"{name}_rot"] = exact, bound
        return found

    def kernels(self, drawn: Drawn) -> dict[str, Array]:
        """Return the rotation of each tensor by the NumPy kernels."""
        inverse = self.rotation.inverse
        return {
            f"{n}_rot": self.rope.rotate(x, drawn.ids, inverse=inverse)
            for n, x in drawn.tensors.items()
        }


def angle_rounding(rope: RotaryEmbedding, x: Array, ids: Array, inverse: bool = False) -> Array:
    """Return how far angles that a graph computes in float64, and so rounds, may move the rotation of x.

    An angle over n axes rounds n products and n − 1 sums of them, each by 2^-53 of Σ|p·ω| at most; an element moves by
    that times A·(|x_a| + |x_b|). x: (batch, seq, heads, head_dim). ids: (batch, seq), with several axes (…, axes).
    """
    spec, inv_freq = rope.spec, rope.spec.inv_freq[0]
    position = ids.reshape(*ids.shape[:2], rope.axes, 1, 1)
    size = np.abs(position * inv_freq).sum(axis=2) * np.maximum((inv_freq != 0).sum(axis=0), 1)
    size = np.repeat(size, x.shape[2] // size.shape[2], axis=2) if size.shape[2] > 1 else size
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    (first, second), wide = spec.pair_elements(), np.abs(x.astype(np.float64))
    moved = np.zeros(x.shape)
    moved[..., first] = moved[..., second] = (
        size * 2.0**-53 * factor * (wide[..., first] + wide[..., second])
    )
    return moved


def _packed(x: Array, layout: str) -> Array:
    """Return ids, cos or sin (batch, seq, …) as (tokens, …) for packed tokens."""
    return x.reshape(-1, *x.shape[2:]) if layout == "thd" else x
