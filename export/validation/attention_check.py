"""The check of a model from `export_attention`: prefill, chunks and single steps against one pass in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy.reference import Exact
from rope_cpu.array_types import Array

from ..attention_options import AttentionOptions
from ..masks import INPUT
from ..targets import TARGETS
from .cases import Case, last, left_padded, on_axes, shuffled
from .check import Check, Drawn, from_layout, to_layout, unrounded
from .reference_attention import Reference
from .session import run

CASES = (
    Case("prefill", 1, (19,)),
    Case("prefill of a batch", 3, (11,)),
    Case("one token", 2, (1,)),
    Case("prefill, then single steps", 2, (9, 1, 1, 1, 1)),
    Case("chunked prefill", 1, (5, 7, 1, 4)),
    Case("chunks of a batch", 2, (4, 3, 6)),
    Case("single steps", 1, (1,) * 7),
)
IDS_CASES = (
    Case("shuffled ids", 2, (12, 1), shuffled),
    Case("left-padded ids", 2, (12, 1), left_padded),
    Case("last ids", 2, (12, 1), last),
)


class AttentionCheck(Check):
    """Runs sequences through a session step by step and compares every step with one pass over all tokens."""

    def __init__(
        self,
        opened: onnxruntime.InferenceSession,
        rope: RotaryEmbedding,
        options: AttentionOptions,
        arrays: dict[str, Array],
    ) -> None:
        """Hold what a case needs; arrays: the model's weights of projections and norms."""
        super().__init__(opened, rope, options.rotation)
        self.options, self.arrays = options, arrays

    def cases(self) -> list[Case]:
        """Return the cases that apply."""
        options = self.options
        chosen = [*CASES, *(IDS_CASES if options.positions == "position_ids" else ())]
        # Without a causal mask a token attends to later ones, which no earlier step has.
        several = options.past and options.causal
        chosen = [
            case
            for case in chosen
            if case.tokens <= self.limit and (several or len(case.steps) == 1)
        ]
        if not TARGETS[options.target].takes_chunks:
            chosen = [
                case for case in chosen if case.batch == 1 or max(case.steps[1:], default=1) == 1
            ]
        return chosen

    def draw(self, case: Case, rng: np.random.Generator) -> Drawn:
        """Return tensors, ids and mask of whole sequences."""
        options, batch, tokens = self.options, case.batch, case.tokens
        shapes: Any = (
            options.sizes(self.rope.head_dim)
            if options.hidden is None
            else {"hidden": (options.hidden,)}
        )
        tensors = {
            n: rng.standard_normal((batch, tokens, *shape)).astype(self.dtype)
            for n, shape in shapes.items()
        }
        given = options.positions == "position_ids"
        ids = on_axes(
            case.ids(rng, batch, tokens, self.limit), self.rope.axes, rng if given else None
        )
        return Drawn(
            tensors | ({"position_ids": ids} if given else {}) | self._mask(rng, batch, tokens),
            tensors,
            ids,
        )

    def _mask(self, rng: np.random.Generator, batch: int, tokens: int) -> dict[str, Array]:
        kind = self.options.mask
        if kind == "none":
            return {}
        if kind == "padding":  # on the left, so that the first queries have no key at all
            return {INPUT: np.arange(tokens) >= rng.integers(0, max(tokens // 2, 1), (batch, 1))}
        allowed = rng.random((batch, self.options.num_heads, tokens, tokens)) < 0.7
        if kind == "bool":
            return {INPUT: allowed}
        return {
            INPUT: np.where(allowed, rng.standard_normal(allowed.shape), -np.inf).astype(self.dtype)
        }

    def run(self, case: Case, drawn: Drawn) -> dict[str, Array]:
        """Run the steps one after another; return the results of all tokens, and what is cached in the end."""
        options, done, results = self.options, 0, []
        sizes = options.sizes(self.rope.head_dim)
        cached = (sizes["k"], sizes["v"]) if options.past else ()
        cache = [np.zeros((case.batch, heads, 0, width), self.dtype) for heads, width in cached]
        last = (
            (options.num_heads, options.v_head_dim) if options.output is None else (options.output,)
        )
        for count in case.steps:
            feeds = {name: self._of_step(name, x, done, count) for name, x in drawn.feeds.items()}
            feeds |= dict(zip(("past_key", "past_value"), cache, strict=False))
            done += count
            shape = (case.batch, count, *last)
            shapes = [to_layout(np.zeros(shape, np.int8), options.layout).shape]
            shapes += [(*x.shape[:2], done, x.shape[3]) for x in cache]
            y, *cache = run(self.session, feeds, shapes)
            results.append(from_layout(y, options.layout, shape))
        present = dict(zip(("present_key", "present_value"), cache, strict=False))
        return {"attention": np.concatenate(results, axis=1)} | present

    def _of_step(self, name: str, x: Array, done: int, count: int) -> Array:
        """Return the part of an input that `count` tokens after `done` are fed."""
        if name == INPUT:
            mask = x if self.options.mask == "padding" else x[:, :, done : done + count]
            return np.ascontiguousarray(mask[..., : done + count])
        part = x[:, done : done + count]
        return (
            np.ascontiguousarray(part)
            if name == "position_ids"
            else to_layout(part, self.options.layout)
        )

    def expected(self, drawn: Drawn) -> dict[str, tuple[Exact, Array]]:
        """Return each output as it has to be, and how far it may lie from that."""
        found = Reference(self.rope, self.options, self.arrays, drawn).outputs()
        return {name: (unrounded(value), bound) for name, (value, bound) in found.items()}
