"""The check of a model from `export_rope`: draws, runs, and compares each case."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding, reference
from rope_cpu.tolerance import compare

from .. import angles as angle_ops
from ..graph import compute_dtype_of
from ..layouts import LAYOUTS, back
from ..options import RopeOptions
from .cases import COMPUTED_LIMIT, Case, cases_of, values
from .report import Outcome
from .session import BFLOAT16, run

Array = NDArray[Any]

# Table length that is fed where tables are inputs, and the number of heads where any will do.
FED_ROWS = 96
FREE_HEADS = (4, 2)


class RopeCheck:
    """Runs cases through a session and compares them with the float64 reference and the NumPy kernels."""

    def __init__(self, opened: onnxruntime.InferenceSession, rope: RotaryEmbedding, options: RopeOptions) -> None:
        """Hold what a case needs."""
        self.session, self.rope, self.options = opened, rope, options
        self.dtype = BFLOAT16 if options.dtype == "bfloat16" else np.dtype(options.dtype)
        self.compute_dtype = compute_dtype_of(self.dtype)
        fed = FED_ROWS if options.table_inputs else COMPUTED_LIMIT
        self.limit = options.max_positions or fed
        unit = rope.spec.inv_freq.shape[2]
        self.heads = [count or unit * FREE_HEADS[min(index, 1)] for index, count in enumerate(options.heads)]

    def cases(self) -> list[Case]:
        """Return the cases that apply."""
        return cases_of(self.options)

    def again(self, case: Case, seed: int) -> dict[str, Array]:
        """Run a case; return its inputs, results, exact values and bounds."""
        feeds, ids, tensors = self._draw(case, seed)
        found = dict(feeds)
        if not case.must_fail:
            results = self._run(feeds, tensors)
            for (name, x), result in zip(tensors.items(), results, strict=True):
                exact, bound = self._exact(x, ids)
                found |= {f"{name}_rot": result, f"{name}_exact": exact.high, f"{name}_bound": bound}
        return found

    def outcome(self, case: Case, seed: int) -> Outcome:
        """Run one case."""
        feeds, ids, tensors = self._draw(case, seed)
        about: dict[str, Any] = {
            "case": case.name,
            "seed": seed,
            "shape": next(iter(tensors.values())).shape,
            "refused": case.must_fail,
        }
        try:
            results = self._run(feeds, tensors)
        except Exception as error:  # onnxruntime's errors share no class of their own
            if case.must_fail:
                return Outcome(**about)
            return Outcome(**about, problem=f"failed to run: {str(error).splitlines()[0][-160:]}")
        if case.must_fail:
            return Outcome(**about, problem="ran, but these ids must be refused")
        return self._compared(about, ids, tensors, results)

    def _compared(self, about: dict[str, Any], ids: Array, tensors: dict[str, Array], results: list[Array]) -> Outcome:
        error = ratio = against = 0.0
        for x, result in zip(tensors.values(), results, strict=True):
            if result.shape != x.shape or result.dtype != x.dtype:
                return Outcome(**about, problem=f"gave {result.dtype} {result.shape} for {x.dtype} {x.shape}")
            exact, bound = self._exact(x, ids)
            kernels = self.rope.rotate(x, ids, inverse=self.options.inverse).astype(np.float64)
            off, allowed = compare(exact.error(result), bound)
            gap, twice = compare(reference.Exact(kernels, np.zeros_like(kernels)).error(result), 2 * bound)
            error, ratio, against = max(error, off), max(ratio, allowed), max(against, gap)
            if ratio <= 1 < twice:
                return Outcome(**about, error=error, ratio=ratio, against_numpy=against, problem="differs from NumPy")
        return Outcome(**about, error=error, ratio=ratio, against_numpy=against)

    def _exact(self, x: Array, ids: Array) -> tuple[reference.Exact, Array]:
        exact, bound = reference.rotation(self.rope.spec, x, ids, inverse=self.options.inverse)
        if self.options.tables:
            return exact, bound
        return exact, bound + angle_rounding(self.rope, x, ids, self.options.inverse)

    def _draw(self, case: Case, seed: int) -> tuple[dict[str, Array], Array, dict[str, Array]]:
        """Return feeds, the ids that the tokens have, and the tensors as (batch, seq, heads, head_dim)."""
        rng = np.random.default_rng([seed, zlib.crc32(case.name.encode())])
        # The fused operators refuse sequences longer than their table, whatever the ids.
        case = replace(case, seq=min(case.seq, self.limit))
        options, axes = self.options, self.rope.axes
        tensors = {
            name: values(rng, (case.batch, case.seq, heads, self.rope.head_dim), self.dtype)
            for name, heads in zip(options.inputs, self.heads, strict=True)
        }
        feeds = {name: to_layout(x, options.layout) for name, x in tensors.items()}
        first = rng.integers(0, self.limit - case.seq + 1, case.batch)
        if options.positions == "position_ids":
            ids = case.ids(rng, case.batch, case.seq, self.limit)
            if axes > 1:
                ids = np.stack([ids, *(rng.permuted(ids, axis=-1) for _ in range(axes - 1))], axis=-1)
            packed = ids.reshape(-1, *ids.shape[2:]) if options.layout == "thd" else ids
            feeds["position_ids"] = packed.astype(options.position_dtype)
        else:
            offset = options.positions == "offset"
            ids = np.arange(case.seq) + (first[:, None] if offset else np.zeros((case.batch, 1), np.int64))
            if offset:
                feeds["offset"] = first.astype(options.position_dtype)
            if axes > 1:
                ids = np.repeat(ids[..., None], axes, axis=-1)
        return feeds | self._tables(ids), np.ascontiguousarray(ids), tensors

    def _tables(self, ids: Array) -> dict[str, Array]:
        if not self.options.table_inputs:
            return {}
        if not self.options.token_tables:
            cos, sin = angle_ops.tables(self.rope, FED_ROWS, False, self.compute_dtype)
        else:
            cos, sin = self.rope.cos_sin(ids, self.compute_dtype)
            if self.options.layout == "thd":
                cos, sin = cos.reshape(-1, cos.shape[-1]), sin.reshape(-1, sin.shape[-1])
        return {"cos_cache": cos, "sin_cache": sin}

    def _run(self, feeds: dict[str, Array], tensors: dict[str, Array]) -> list[Array]:
        shapes = [feeds[name].shape for name in tensors]
        results = run(self.session, feeds, shapes)
        return [
            from_layout(result, self.options.layout, x.shape)
            for result, x in zip(results, tensors.values(), strict=True)
        ]


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
    moved[..., first] = moved[..., second] = size * 2.0**-53 * factor * (wide[..., first] + wide[..., second])
    return moved


def to_layout(x: Array, layout: str) -> Array:
    """Bring (batch, seq, heads, head_dim) into a layout."""
    batch, seq, heads, width = x.shape
    if layout in ("thd", "bsd"):
        return x.reshape((batch * seq, heads, width) if layout == "thd" else (batch, seq, heads * width))
    order = LAYOUTS[layout].to_bhsd or (0, 1, 2, 3)
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3).transpose(back(order)))


def from_layout(x: Array, layout: str, shape: tuple[int, ...]) -> Array:
    """Bring a layout back into (batch, seq, heads, head_dim) of `shape`."""
    if layout in ("thd", "bsd"):
        return x.reshape(shape) if x.size == np.prod(shape) else x
    order = LAYOUTS[layout].to_bhsd or (0, 1, 2, 3)
    return x.transpose(order).transpose(0, 2, 1, 3)
