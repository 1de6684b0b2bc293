"""The check of a model from `export_attention`: prompts, chunks and single steps against one pass in float64."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from rope_cpu import RotaryEmbedding
from rope_cpu.reference import Exact
from rope_cpu.tolerance import compare

from ..attention_options import AttentionOptions
from ..targets import TARGETS
from .cases import COMPUTED_LIMIT
from .reference_attention import Reference
from .report import Outcome
from .rope import from_layout, to_layout
from .session import run

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """One draw: a batch, and the numbers of tokens that go in step by step; ids: how position_ids are drawn."""

    name: str
    batch: int
    steps: tuple[int, ...]
    ids: str = "consecutive"


CASES = (
    Case("prompt", 1, (19,)),
    Case("prompt of a batch", 3, (11,)),
    Case("one token", 2, (1,)),
    Case("prompt, then single steps", 2, (9, 1, 1, 1, 1)),
    Case("chunked prompt", 1, (5, 7, 1, 4)),
    Case("chunks of a batch", 2, (4, 3, 6)),
    Case("single steps", 1, (1,) * 7),
)
IDS_CASES = (
    Case("shuffled ids", 2, (12, 1), "shuffled"),
    Case("left-padded ids", 2, (12, 1), "left-padded"),
    Case("far ids", 2, (12, 1), "far"),
)


class AttentionCheck:
    """Runs sequences through a session step by step and compares every step with one pass over all tokens."""

    def __init__(
        self,
        opened: onnxruntime.InferenceSession,
        rope: RotaryEmbedding,
        options: AttentionOptions,
        tables: dict[str, Array],
    ) -> None:
        """Hold what a case needs; tables: the model's initializers, of which its own weights are part."""
        self.session, self.rope, self.options, self.tables = opened, rope, options, tables
        self.dtype = np.dtype(options.rope.dtype)
        self.limit = options.rope.max_positions or COMPUTED_LIMIT

    def cases(self) -> list[Case]:
        """Return the cases that apply."""
        options = self.options
        chosen = [*CASES, *(IDS_CASES if options.rope.positions == "position_ids" else ())]
        # Without a causal mask a token attends to later ones, which no earlier step has.
        several = options.past and options.causal
        chosen = [case for case in chosen if sum(case.steps) <= self.limit and (several or len(case.steps) == 1)]
        if not TARGETS[options.rope.target].takes_chunks:
            chosen = [case for case in chosen if case.batch == 1 or max(case.steps[1:], default=1) == 1]
        return chosen

    def again(self, case: Case, seed: int) -> dict[str, Array]:
        """Run a case; return its inputs, results, exact values and bounds."""
        drawn = self._draw(case, seed)
        found, due = self._run(case, drawn), self._due(drawn)
        for name in list(found):
            found[f"{name}_exact"], found[f"{name}_bound"] = due[name]
        return drawn | found

    def outcome(self, case: Case, seed: int) -> Outcome:
        """Run one case."""
        drawn = self._draw(case, seed)
        about: dict[str, Any] = {"case": case.name, "seed": seed, "shape": (case.batch, *case.steps)}
        try:
            found = self._run(case, drawn)
        except Exception as error:  # onnxruntime's errors share no class of their own
            return Outcome(**about, problem=f"failed to run: {str(error).splitlines()[0][-160:]}")
        due, worst, ratio = self._due(drawn), 0.0, 0.0
        for name, value in found.items():
            exact, bound = due[name]
            if value.shape != exact.shape or value.dtype != self.dtype:
                problem = f"gave {name} {value.dtype} {value.shape} where {self.dtype} {exact.shape} is due"
                return Outcome(**about, problem=problem)
            off, allowed = compare(Exact(exact, np.zeros_like(exact)).error(value), bound)
            worst, ratio = max(worst, off), max(ratio, allowed)
        return Outcome(**about, error=worst, ratio=ratio)

    def _draw(self, case: Case, seed: int) -> dict[str, Array]:
        """Return tensors (batch, all tokens, heads, width), ids and mask of a whole sequence."""
        rng, options = np.random.default_rng([seed, zlib.crc32(case.name.encode())]), self.options
        total, width, batch = sum(case.steps), self.rope.head_dim, case.batch
        if options.hidden is not None:
            shapes: dict[str, tuple[int, ...]] = {"hidden": (options.hidden,)}
        else:
            kv_heads = options.kv_heads
            shapes = {"q": (options.heads, width), "k": (kv_heads, width), "v": (kv_heads, options.v_head_dim)}
        drawn = {n: rng.standard_normal((batch, total, *shape)).astype(self.dtype) for n, shape in shapes.items()}
        drawn["ids"] = self._ids(rng, case, total)
        return drawn | self._mask(rng, batch, total)

    def _ids(self, rng: np.random.Generator, case: Case, total: int) -> Array:
        counted: Array = np.broadcast_to(np.arange(total), (case.batch, total))
        if case.ids == "shuffled":
            counted = rng.permuted(counted, axis=-1)
        elif case.ids == "left-padded":
            counted = np.maximum(counted - rng.integers(0, total, (case.batch, 1)), 0)
        elif case.ids == "far":
            counted = self.limit - total + counted
        return np.ascontiguousarray(self._on_axes(rng, counted, case.ids == "consecutive"))

    def _on_axes(self, rng: np.random.Generator, ids: Array, alike: bool) -> Array:
        """Return ids with a trailing axis of coordinates where the rotary has several axes."""
        if self.rope.axes == 1:
            return ids
        return np.stack([ids if alike else rng.permuted(ids, axis=-1) for _ in range(self.rope.axes)], axis=-1)

    def _mask(self, rng: np.random.Generator, batch: int, total: int) -> dict[str, Array]:
        kind = self.options.mask
        if kind == "none":
            return {}
        if kind == "padding":  # on the left, so that the first queries have no key at all
            return {"attention_mask": np.arange(total) >= rng.integers(0, max(total // 2, 1), (batch, 1))}
        allowed = rng.random((batch, self.options.heads, total, total)) < 0.7
        if kind == "bool":
            return {"attention_mask": allowed}
        added = np.where(allowed, rng.standard_normal(allowed.shape), -np.inf)
        return {"attention_mask": added.astype(self.dtype)}

    def _run(self, case: Case, drawn: dict[str, Array]) -> dict[str, Array]:
        """Run the steps one after another; return the results of all tokens, and what is cached in the end."""
        options, done, results = self.options, 0, []
        width, values = self.rope.head_dim, options.v_head_dim
        cache = {
            "past_key": np.zeros((case.batch, options.kv_heads, 0, width), self.dtype),
            "past_value": np.zeros((case.batch, options.kv_heads, 0, values), self.dtype),
        }
        for count in case.steps:
            span = slice(done, done + count)
            feeds: dict[str, Array] = {
                n: self._laid_out(n, drawn[n][:, span]) for n in ("hidden", "q", "k", "v") if n in drawn
            }
            if options.rope.positions == "position_ids":
                feeds["position_ids"] = np.ascontiguousarray(drawn["ids"][:, span])
            if "attention_mask" in drawn:
                mask = drawn["attention_mask"]
                mask = mask[:, : done + count] if options.mask == "padding" else mask[:, :, span, : done + count]
                feeds["attention_mask"] = np.ascontiguousarray(mask)
            done += count
            feeds |= cache if options.past else {}
            shapes = [
                self._result_shape(case.batch, count),
                *((case.batch, options.kv_heads, done, w) for w in (width, values)),
            ]
            made = run(self.session, feeds, shapes[: 3 if options.past else 1])
            results.append(self._result(made[0], case.batch, count))
            if options.past:
                cache = dict(zip(cache, made[1:], strict=True))
        present = {"present_key": cache["past_key"], "present_value": cache["past_value"]} if options.past else {}
        return {"attention": np.concatenate(results, axis=1)} | present

    def _laid_out(self, name: str, x: Array) -> Array:
        return np.ascontiguousarray(x if name == "hidden" else to_layout(x, self.options.layout))

    def _result_shape(self, batch: int, count: int) -> tuple[int, ...]:
        if self.options.output is not None:
            return batch, count, self.options.output
        zeros = np.zeros((batch, count, self.options.heads, self.options.v_head_dim), np.int8)
        return to_layout(zeros, self.options.layout).shape

    def _result(self, y: Array, batch: int, count: int) -> Array:
        if self.options.output is not None:
            return y
        return from_layout(y, self.options.layout, (batch, count, self.options.heads, self.options.v_head_dim))

    def _due(self, drawn: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
        """Return what each output has to be, exact, and how far it may lie from that."""
        return Reference(self.rope, self.options, self.tables, drawn).outputs()
