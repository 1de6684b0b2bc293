"""The validation of a model from `export_attention`: several steps against one pass in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import onnxruntime

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import attention, reference
from rope_cpu.accuracy.attention import Estimate
from rope_cpu.accuracy.tolerance import half_ulp
from rope_cpu.array_types import Array, Float64

from ..nodes import MASK_INPUT, PAST_LENGTHS
from ..options import SCALES, AttentionOptions
from ..targets import TARGETS
from .cases import ATTENTION_CASES, SHARED_CACHE_CASES, Case, consecutive, ids_by_axis
from .rope_validation import (
    CaseInputs,
    Expected,
    Validation,
    angle_rounding,
    from_layout,
    to_layout,
)
from .session import bind_arrays

# Roundings of a norm beside its sum: mean, epsilon, root, quotient, offset and weight.
NORM = 6
# Rows of a shared cache after the last token.
FREE_ROWS = 5
# The levels of an int8 cache.
INT8_RANGE = (-128, 127)


class Rotated(NamedTuple):
    """Queries, keys or values by head.

    angle_bound: largest shift of each element by angles that are rounded in the graph. is_rounded:
    whether they are rounded to the model's dtype, before or after a step attends to them.
    """

    estimate: Estimate
    angle_bound: Float64
    is_rounded: bool

    def as_summand(self) -> Estimate:
        """Return an estimate for sums: an angle has one rounding, anywhere within its bound."""
        return Estimate(self.estimate.value, self.estimate.variance + self.angle_bound**2 / 3)


class AttentionValidation(Validation):
    """Runs sequences step by step and compares every step with one pass over all tokens.

    A shared cache is one buffer for rows of different length, which at first holds arbitrary
    numbers.
    """

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
        self.arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        self.array_inputs = options.array_inputs(rope.head_dim)
        self.unit = attention.unit_variance(self.dtype)

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        cases = [*ATTENTION_CASES, *(SHARED_CACHE_CASES if self.options.is_shared else ())]
        return [case for case in cases if self._applies(case)]

    def _applies(self, case: Case) -> bool:
        """Return True if the model can run a case."""
        options = self.options
        takes_ids = case.ids is consecutive or options.positions == "position_ids"
        # Without a causal mask a token attends to later ones, which earlier steps do not have.
        takes_steps = len(case.steps) == 1 or (options.past and options.causal)
        has_chunks = case.batch > 1 and max(case.steps[1:], default=1) > 1
        takes_chunks = options.batch_chunks or TARGETS[options.target].takes_chunks
        fits = case.tokens <= self.limit
        return fits and takes_ids and takes_steps and (takes_chunks or not has_chunks)

    def draw(self, case: Case, rng: np.random.Generator) -> CaseInputs:
        """Return tensors, ids and mask of whole sequences."""
        options = self.options
        shapes: dict[str, tuple[int, ...]] = {"hidden": (options.hidden or 0,)}
        if options.hidden is None:
            shapes = dict(options.sizes(self.rope.head_dim))
        tensors = {
            name: rng.standard_normal((case.batch, case.tokens, *shape)).astype(self.dtype)
            for name, shape in shapes.items()
        }
        feeds = dict(tensors)
        ids = case.ids(rng, case.batch, case.tokens, self.limit)
        has_ids = options.positions == "position_ids"
        ids = ids_by_axis(ids, self.rope.axes, rng if has_ids else None)
        if has_ids:
            feeds["position_ids"] = ids
        if options.mask_kind != "none":
            feeds[MASK_INPUT] = self._draw_mask(rng, case.batch, case.tokens)
        if options.follows_mask:
            counted = np.maximum(np.cumsum(feeds[MASK_INPUT], axis=1) - 1, 0)
            ids = ids_by_axis(counted, self.rope.axes)
        arrays = dict(self.arrays)
        for name, shape in self.array_inputs.items():
            feeds[name] = self._draw_array(rng, name, shape)
            offset = options.norm_offset if name.endswith("_norm_weight") else 0.0
            arrays[name.removesuffix("_weight")] = feeds[name].astype(np.float64) + offset
        return CaseInputs(feeds, tensors, ids, arrays)

    def _draw_array(self, rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
        """Return scales, a norm's weights or sinks that are inputs."""
        array = rng.standard_normal(shape)
        if name in SCALES:  # so that some elements are beyond the largest number of int8
            return (0.02 * np.exp(0.3 * array)).astype(np.float32)
        if name != "sinks":  # so that the factor of the norm is about 1
            array = 0.2 * array + (1 - self.options.norm_offset)
        return array.astype(self.dtype)

    def _draw_mask(self, rng: np.random.Generator, batch: int, tokens: int) -> Array:
        kind = self.options.mask_kind
        if self.options.has_padding:  # on the left, so that the first queries have no key at all
            padding = rng.integers(0, max(tokens // 2, 1), (batch, 1))
            return np.asarray(np.arange(tokens) >= padding)
        mask: Array = rng.random((batch, self.options.num_heads, tokens, tokens)) < 0.7
        if kind == "bool":
            return mask
        return np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(self.dtype)

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the steps in turn; return the results of all tokens, and the cache at the end.

        A cache that keeps a window has room for all tokens at first. The results are those of a
        second run, in the smallest cache, unless the case has padding or tokens that are repeated.
        """
        options = self.options
        rows = case.tokens + FREE_ROWS if options.is_shared else 0
        if not options.keeps_window:
            return self._run_in_cache(case, inputs, rows)
        window = options.window or 0
        results = self._run_in_cache(case, inputs, max(rows, window))
        if not case.kept:
            results["attention"] = self._run_in_cache(case, inputs, window)["attention"]
        return results

    def _run_in_cache(self, case: Case, inputs: CaseInputs, rows: int) -> dict[str, Array]:
        """Run the steps over a cache that has `rows` at first."""
        cache = self._first_cache(case, rows)
        steps = list(case.tokens_of_steps())
        results = []
        for token, is_padding in steps:
            feeds = {
                name: self._step_input(name, x, token, is_padding)
                for name, x in inputs.feeds.items()
            }
            feeds |= {f"past_{name}": x for name, x in cache.items()}
            result, cache = self._step(case, feeds, cache, token)
            results.append(result)
        tokens, paddings = (np.concatenate(parts, axis=1) for parts in zip(*steps, strict=True))
        by_step = np.concatenate(results, axis=1)
        attended = np.zeros((case.batch, case.tokens, *by_step.shape[2:]), by_step.dtype)
        row, column = np.nonzero(~paddings)
        attended[row, tokens[row, column]] = by_step[row, column]
        if self.options.is_shared:  # levels of int8 are exact in every dtype
            cache = {name: x[:, :, : case.tokens].astype(self.dtype) for name, x in cache.items()}
        return {"attention": attended} | {f"present_{name}": x for name, x in cache.items()}

    def _first_cache(self, case: Case, rows: int) -> dict[str, Array]:
        """Return the cache before the first step, and large numbers in the rows of a shared one."""
        options = self.options
        if not options.past:
            return {}
        rng = np.random.default_rng(case.tokens)
        sizes = options.sizes(self.rope.head_dim)
        cache = {}
        for name, (heads, width) in (("key", sizes["k"]), ("value", sizes["v"])):
            numbers = 100 * rng.uniform(-1, 1, (case.batch, heads, rows, width))
            cache[name] = numbers.astype(np.dtype(options.cached_dtype))
        return cache

    def _step_input(self, name: str, x: Array, token: Array, is_padding: Array) -> Array:
        """Return the part of an input for the tokens of a step; padding has other values."""
        if name in self.array_inputs:
            return x
        if name == MASK_INPUT:  # without a shared cache, so that all rows have the same tokens
            mask = x if self.options.has_padding else x[:, :, token[0]]
            mask = np.ascontiguousarray(mask[..., : token[0, -1] + 1])
            return mask.astype(np.int64) if self.options.has_token_mask else mask
        row = np.arange(len(token))[:, None]
        part = x[row, np.minimum(token, x.shape[1] - 1)]
        if name == "position_ids":
            return np.ascontiguousarray(part)
        part[is_padding] = 50
        return to_layout(part, self.options.layout)

    def _step(
        self, case: Case, feeds: dict[str, Array], cache: dict[str, Array], token: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Run the tokens (batch, count) of a step; return the result and the cache."""
        options = self.options
        before = {name: x.copy() for name, x in cache.items()}
        present = cache
        if not options.is_shared:
            total = token[0, -1] + 1
            present = {
                name: np.zeros((*x.shape[:2], total, x.shape[3]), x.dtype)
                for name, x in cache.items()
            }
        elif not case.same_buffer:
            present = {name: x.copy() for name, x in cache.items()}
        if options.is_shared and options.has_token_mask:
            feeds[MASK_INPUT] = _mask_of_lengths(token)
        elif options.is_shared:
            feeds[PAST_LENGTHS] = np.ascontiguousarray(token[:, 0])
        shape = (*token.shape, options.num_heads, options.v_head_dim)
        if options.output is not None:
            shape = (*token.shape, options.output)
        result = to_layout(np.zeros(shape, self.dtype), options.layout)
        outputs = {"attention": result} | {f"present_{name}": x for name, x in present.items()}
        bind_arrays(self.session, self._named(feeds), self._named(outputs))()
        evicts = options.is_shared and token.max(initial=0) >= before["key"].shape[2]
        if options.is_shared and case.same_buffer and not evicts:
            _check_untouched(before, present, token)
        return from_layout(result, options.layout, shape), present

    def _named(self, arrays: dict[str, Array]) -> dict[str, Array]:
        """Return arrays under the names that the model has for them."""
        return {self.options.name(name): x for name, x in arrays.items()}

    def expected(self, inputs: CaseInputs, results: dict[str, Array]) -> Iterator[Expected]:
        """Yield the cache, and then the attention to the model's own cache.

        So errors of the cache are judged once, and are no part of the attention's tolerance.
        """
        options = self.options
        arrays = inputs.arrays
        q, k, v = (self._rotated(name, inputs) for name in "qkv")
        keys = k.as_summand()
        values = v.as_summand()
        if options.past:
            yield self._expected_present("present_key", k, arrays.get("k_scale"))
            yield self._expected_present("present_value", v, arrays.get("v_scale"))
            keys = self._read(results["present_key"], arrays.get("k_scale"))
            values = self._read(results["present_value"], arrays.get("v_scale"))
        attended = attention.attention(
            q.as_summand(),
            keys.rounded(self.dtype) if k.is_rounded else keys,
            values.rounded(self.dtype) if v.is_rounded else values,
            scale=options.scale,
            mask=self._mask(inputs),
            unit=self.unit,
            softcap=options.softcap,
            sinks=arrays.get("sinks"),
        )
        result = attended.result.by_head()
        if options.output is not None:
            merged = attended.own.by_head().reshape(*inputs.ids.shape[:2], -1)
            projected = self._projected("o", merged, arrays)
            weight = arrays["o_weight"].reshape(options.num_heads, options.v_head_dim, -1)
            variance = projected.variance + attended.projected_shift(weight)
            result = Estimate(projected.value, variance)
        yield Expected("attention", result.exact, result.bound(self.dtype))

    def _expected_present(self, output: str, x: Rotated, scale: Float64 | None) -> Expected:
        """Return present keys or values; those of an int8 cache in units of their scale."""
        estimate = x.estimate
        if scale is None:
            bound = estimate.bound(self.dtype if x.is_rounded else None)
            return Expected(output, estimate.exact, bound)
        levels = np.clip(estimate.value / scale, *INT8_RANGE)
        of_division = 2 * np.sqrt(self.unit) * np.abs(levels)
        bound = 0.5 + (estimate.bound() + x.angle_bound) / scale + of_division
        return Expected(output, attention.exactly(levels).exact, bound)

    def _read(self, present: Array, scale: Float64 | None) -> Estimate:
        """Return the model's own keys or values as it reads them."""
        if scale is None:
            return attention.exactly(present)
        value = present.astype(np.float64) * scale
        return Estimate(value, self.unit * value**2)

    def _rotated(self, name: str, inputs: CaseInputs) -> Rotated:
        """Return q, k or v: projected, normed and rotated."""
        options = self.options
        dtype = options.rotation.compute_dtype
        estimate = self._input_vectors(name, inputs)
        if f"{name}_norm" in inputs.arrays:
            estimate = self._normed(estimate, inputs.arrays[f"{name}_norm"])
        angle_bound = np.zeros_like(estimate.value)
        if name != "v":
            x = estimate.value
            if options.max_positions is None:
                angle_bound = angle_rounding(self.rope, x, inputs.ids)
            exact, bound = reference.rotation(self.rope.spec, x, inputs.ids, dtype=dtype)
            bound = bound + angle_bound + half_ulp(exact.high, np.float64)
            variance = self._rotated_variance(estimate.variance)
            estimate = Estimate(exact.high, variance + (bound / attention.DEVIATIONS) ** 2)
        # Keys and values are not if they are computed in that dtype, or come in it.
        is_rounded = self.dtype != dtype and (name == "k" or options.hidden is not None)
        is_rounded = is_rounded and options.cache_dtype is None
        return Rotated(estimate.by_head(), angle_bound.transpose(0, 2, 1, 3), is_rounded)

    def _rotated_variance(self, variance: Float64) -> Float64:
        """Return variances (…, head_dim) after a rotation: those of both elements of a pair add."""
        first, second = self.rope.spec.pair_elements()
        pair_sum = self.rope.attention_factor**2 * (variance[..., first] + variance[..., second])
        rotated = variance.copy()
        rotated[..., first] = pair_sum
        rotated[..., second] = pair_sum
        return rotated

    def _input_vectors(self, name: str, inputs: CaseInputs) -> Estimate:
        """Return q, k or v (batch, tokens, heads, width), projected if there are hidden states."""
        if self.options.hidden is None:
            return attention.exactly(inputs.tensors[name])
        hidden = attention.exactly(inputs.tensors["hidden"])
        heads, width = self.options.sizes(self.rope.head_dim)[name]
        projected = self._projected(name, hidden, inputs.arrays)
        return projected.reshape(*inputs.ids.shape[:2], heads, width)

    def _projected(self, name: str, x: Estimate, arrays: dict[str, Float64]) -> Estimate:
        """Return a projection of vectors, with its bias."""
        weight = arrays[f"{name}_weight"]
        y = attention.product(x.value, weight)
        value = y.value + arrays.get(f"{name}_bias", 0.0)
        rounding = self.unit * (y.variance + value**2)
        return Estimate(value, x.variance @ weight**2 + rounding)

    def _normed(self, x: Estimate, weight: Float64) -> Estimate:
        """Return vectors divided by their root mean square, times a weight."""
        width = x.value.shape[-1]
        square = (x.value * x.value).mean(axis=-1, keepdims=True) + self.options.norm_epsilon
        y = x.value / np.sqrt(square) * weight
        shared = (x.value * x.value * x.variance).mean(axis=-1, keepdims=True) / width
        inherited = x.variance + (x.value / square) ** 2 * shared
        # The root halves the error of the sum of squares, which is 2·n in terms of `product`.
        rounding = (width / 2 + NORM) * self.unit * y**2
        return Estimate(y, weight**2 / square * inherited + rounding)

    def _mask(self, inputs: CaseInputs) -> Float64:
        """Return the mask that is added to the scores, (batch or 1, heads or 1, tokens, tokens)."""
        options = self.options
        tokens = inputs.ids.shape[1]
        mask = np.zeros((1, 1, tokens, tokens))
        if options.causal:
            mask = mask + attention.causal_mask(tokens, tokens, options.window)
        given = inputs.feeds.get(MASK_INPUT, np.array(True))
        if options.has_padding:
            given = given[:, None, None, :]
        if given.dtype == bool:
            return np.where(given, mask, -np.inf)
        return mask + given.astype(np.float64)


def _mask_of_lengths(token: Array) -> Array:
    """Return a token mask (batch, total) for rows whose new tokens are `token`, (batch, count)."""
    first = token[:, :1]
    before = np.arange(first.max(initial=0)) < first
    return np.concatenate([before, np.ones_like(token)], axis=1).astype(np.int64)


def _check_untouched(before: dict[str, Array], after: dict[str, Array], token: Array) -> None:
    """Raise RuntimeError if a step wrote to rows of the cache that are not of its tokens."""
    for name, x in after.items():
        place = np.arange(x.shape[2])
        is_new = (place >= token[:, :1]) & (place <= token[:, -1:])
        others = np.broadcast_to(~is_new[:, None, :, None], x.shape)
        if (x[others] != before[name][others]).any():
            raise RuntimeError(f"{name} changed outside the rows of the new tokens")
