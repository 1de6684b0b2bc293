"""The check of a model from `export_attention`: several steps against one pass in float64."""

from __future__ import annotations

import numpy as np
import onnxruntime

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Array

from ..nodes import MASK_INPUT
from ..options import SCALES, AttentionOptions
from .cases import Case, ids_by_axis, last, left_padded, shuffled
from .check import CaseInputs, Check, ExpectedResult, as_exact, from_layout, to_layout
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
    """Runs sequences step by step and compares every step with one pass over all tokens."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        rope: RotaryEmbedding,
        options: AttentionOptions,
        arrays: dict[str, Array],
    ) -> None:
        """Store the session; arrays: the model's weights of projections, norms and sinks."""
        super().__init__(session, rope, options.rotation)
        self.options = options
        self.arrays = arrays

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        return [case for case in (*CASES, *IDS_CASES) if self.applies(case)]

    def applies(self, case: Case) -> bool:
        """Return True if the model can run a case."""
        options = self.options
        if case in IDS_CASES and options.positions != "position_ids":
            return False
        if case.tokens > self.limit:
            return False
        # Without a causal mask a token attends to later ones, which earlier steps do not have.
        takes_steps = options.past and options.causal
        if len(case.steps) > 1 and not takes_steps:
            return False
        has_chunks = max(case.steps[1:], default=1) > 1
        return case.batch == 1 or not has_chunks or bool(options.batch_chunks)

    def draw(self, case: Case, rng: np.random.Generator) -> CaseInputs:
        """Return tensors, ids and mask of whole sequences."""
        options = self.options
        shapes: dict[str, tuple[int, ...]] = {}
        if options.hidden is None:
            shapes |= options.sizes(self.rope.head_dim)
        else:
            shapes["hidden"] = (options.hidden,)
        tensors = {
            name: rng.standard_normal((case.batch, case.tokens, *shape)).astype(self.dtype)
            for name, shape in shapes.items()
        }
        feeds = dict(tensors)
        ids = case.ids(rng, case.batch, case.tokens, self.limit)
        if options.positions == "position_ids":
            ids = ids_by_axis(ids, self.rope.axes, rng)
            feeds["position_ids"] = ids
        else:
            ids = ids_by_axis(ids, self.rope.axes)
        if options.mask != "none":
            feeds[MASK_INPUT] = self._draw_mask(rng, case.batch, case.tokens)
        feeds |= self._draw_arrays(rng)
        return CaseInputs(feeds, tensors, ids)

    def _draw_arrays(self, rng: np.random.Generator) -> dict[str, Array]:
        """Return the scales, norms' weights and sinks that are inputs."""
        arrays = {}
        for name, shape in self.options.array_inputs(self.rope.head_dim).items():
            array = rng.standard_normal(shape)
            if name in SCALES:  # so that some elements are beyond the largest number of int8
                arrays[name] = (0.02 * np.exp(0.3 * array)).astype(np.float32)
                continue
            if name != "sinks":  # so that the factor of the norm is about 1
                array = 0.2 * array + (1 - self.options.norm_offset)
            arrays[name] = array.astype(self.dtype)
        return arrays

    def _draw_mask(self, rng: np.random.Generator, batch: int, tokens: int) -> Array:
        kind = self.options.mask
        if kind == "padding":  # on the left, so that the first queries have no key at all
            padding = rng.integers(0, max(tokens // 2, 1), (batch, 1))
            return np.asarray(np.arange(tokens) >= padding)
        mask: Array = rng.random((batch, self.options.num_heads, tokens, tokens)) < 0.7
        if kind == "bool":
            return mask
        return np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(self.dtype)

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the steps in turn; return the results of all tokens, and the cache at the end."""
        options = self.options
        cache = self._empty_cache(case.batch)
        results = []
        start = 0
        for count in case.steps:
            stop = start + count
            feeds = {
                name: self._step_input(name, x, start, stop) for name, x in inputs.feeds.items()
            }
            feeds |= {f"past_{name}": x for name, x in cache.items()}
            shape = (case.batch, count, *self.result_axes())
            shapes = [to_layout(np.zeros(shape, np.int8), options.layout).shape]
            shapes += [(*x.shape[:2], stop, x.shape[3]) for x in cache.values()]
            result, *present = run(self.session, self.prefixed(feeds), shapes)
            cache = dict(zip(cache, present, strict=False))
            results.append(from_layout(result, options.layout, shape))
            start = stop
        outputs = {f"present_{name}": x for name, x in cache.items()}
        return {"attention": np.concatenate(results, axis=1)} | outputs

    def prefixed(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return arrays under the names that the model has for them."""
        return {f"{self.options.name_prefix}{name}": x for name, x in arrays.items()}

    def result_axes(self) -> tuple[int, ...]:
        """Return the axes of a result after batch and tokens."""
        options = self.options
        if options.output is not None:
            return (options.output,)
        return (options.num_heads, options.v_head_dim)

    def _empty_cache(self, batch: int) -> dict[str, Array]:
        """Return keys and values of no tokens, if the model has a past."""
        if not self.options.past:
            return {}
        sizes = self.options.sizes(self.rope.head_dim)
        cache = {}
        for name, tensor in (("key", "k"), ("value", "v")):
            heads, width = sizes[tensor]
            cache[name] = np.zeros((batch, heads, 0, width), self.dtype)
        return cache

    def _step_input(self, name: str, x: Array, start: int, stop: int) -> Array:
        """Return the part of an input for the tokens from `start` to `stop`."""
        if name in self.options.array_inputs(self.rope.head_dim):
            return x
        if name == MASK_INPUT:
            mask = x if self.options.mask == "padding" else x[:, :, start:stop]
            return np.ascontiguousarray(mask[..., :stop])
        part = x[:, start:stop]
        if name == "position_ids":
            return np.ascontiguousarray(part)
        return to_layout(part, self.options.layout)

    def expected(self, inputs: CaseInputs) -> dict[str, ExpectedResult]:
        """Return the exact value of each output."""
        arrays = dict(self.arrays)
        for name in self.options.array_inputs(self.rope.head_dim):
            array = inputs.feeds[name].astype(np.float64)
            if name.endswith("_norm_weight"):
                arrays[name.removesuffix("_weight")] = array + self.options.norm_offset
            else:
                arrays[name] = array
        outputs = Reference(self.rope, self.options, arrays, inputs).outputs()
        return {
            name: ExpectedResult(as_exact(output.value), output.bound)
            for name, output in outputs.items()
        }
