"""The check of attention over a shared cache: rows of different length, in one buffer."""

from __future__ import annotations

import numpy as np

from rope_cpu.array_types import Array

from ..nodes import PAST_LENGTHS
from .attention_check import AttentionCheck
from .cases import Case, last, shuffled
from .check import CaseInputs, from_layout, to_layout
from .session import bind_arrays

CASES = (
    Case("prefill of a batch", 3, (11,)),
    Case("one token", 2, (1,)),
    Case("prefill, then single steps", 2, (9, 1, 1, 1, 1)),
    Case("chunked prefill", 1, (5, 7, 1, 4)),
    Case("chunks of a batch", 2, (4, 3, 6)),
    Case("single steps", 1, (1,) * 7),
    Case("rows of different length", 3, (7, *(1,) * 5), kept=(7, 2, 4)),
    Case("chunks of such rows", 3, (8, 3, 3, 2), kept=(8, 2, 5)),
    Case("present beside the past", 2, (6, 1, 1, 1), kept=(6, 3), same_buffer=False),
)
IDS_CASES = (
    Case("shuffled ids", 2, (12, 1), shuffled),
    Case("last ids", 2, (12, 1), last),
)

# Rows of the buffer after the last token.
FREE_ROWS = 5


class SharedCacheCheck(AttentionCheck):
    """Runs sequences over one buffer, which at first holds arbitrary numbers."""

    def cases(self) -> list[Case]:
        """Return the cases that apply to the model."""
        cases = [case for case in CASES if self.applies(case)]
        if self.options.positions == "position_ids":
            cases += [case for case in IDS_CASES if self.applies(case)]
        return cases

    def run(self, case: Case, inputs: CaseInputs) -> dict[str, Array]:
        """Run the steps in turn; return the results of all tokens, and the cache at the end.

        Rows that have all their tokens repeat the last ones.
        """
        cache = self._full_cache(case)
        results = np.zeros((case.batch, case.tokens, *self.result_axes()), self.dtype)
        kept = np.array(case.kept or (case.steps[0],) * case.batch)
        start = np.zeros(case.batch, np.int64)
        for index, count in enumerate(case.steps):
            start = np.minimum(start, case.tokens - count)
            token = start[:, None] + np.arange(count)
            is_padding = token >= (kept[:, None] if index == 0 else case.tokens)
            result, cache = self._step(case, inputs, cache, token, is_padding)
            row, column = np.nonzero(~is_padding)
            results[row, token[row, column]] = result[row, column]
            start = kept if index == 0 else start + count
        present = {f"present_{name}": x[:, :, : case.tokens] for name, x in cache.items()}
        # Whole numbers up to 128 are exact in every dtype.
        as_results = {name: x.astype(self.dtype) for name, x in present.items()}
        return {"attention": results} | as_results

    def _full_cache(self, case: Case) -> dict[str, Array]:
        """Return a buffer of large numbers, which must not have an effect on any result."""
        rng = np.random.default_rng(case.tokens)
        dtype = np.dtype(self.options.cached_dtype)
        cache = {}
        for name, tensor in (("key", "k"), ("value", "v")):
            heads, width = self.options.sizes(self.rope.head_dim)[tensor]
            shape = (case.batch, heads, case.tokens + FREE_ROWS, width)
            cache[name] = (100 * rng.uniform(-1, 1, shape)).astype(dtype)
        return cache

    def _step(
        self,
        case: Case,
        inputs: CaseInputs,
        cache: dict[str, Array],
        token: Array,
        is_padding: Array,
    ) -> tuple[Array, dict[str, Array]]:
        """Run one step; token: (batch, count), the tokens that each row processes.

        Return the result as (batch, count, …), and the present.
        """
        feeds = {
            name: self._of_rows(name, x, token, is_padding) for name, x in inputs.feeds.items()
        }
        feeds |= {f"past_{name}": x for name, x in cache.items()}
        feeds[PAST_LENGTHS] = np.ascontiguousarray(token[:, 0])
        before = {name: x.copy() for name, x in cache.items()}
        present = cache if case.same_buffer else {name: x.copy() for name, x in cache.items()}
        shape = (*token.shape, *self.result_axes())
        result = to_layout(np.zeros(shape, self.dtype), self.options.layout)
        outputs = {"attention": result} | {f"present_{name}": x for name, x in present.items()}
        bind_arrays(self.session, self.prefixed(feeds), self.prefixed(outputs))()
        if case.same_buffer:
            self._check_untouched(before, present, token)
        return from_layout(result, self.options.layout, shape), present

    def _of_rows(self, name: str, x: Array, token: Array, is_padding: Array) -> Array:
        """Return the tokens of an input that each row processes; padding has other values."""
        if name in self.options.array_inputs(self.rope.head_dim):
            return x
        row = np.arange(len(token))[:, None]
        part = x[row, np.minimum(token, x.shape[1] - 1)]
        if name == "position_ids":
            return np.ascontiguousarray(part)
        part[is_padding] = 50
        return to_layout(part, self.options.layout)

    def _check_untouched(
        self, before: dict[str, Array], after: dict[str, Array], token: Array
    ) -> None:
        """Raise RuntimeError if a step wrote to rows of the cache that are not of its tokens."""
        for name, x in after.items():
            place = np.arange(x.shape[2])
            is_new = (place >= token[:, :1]) & (place <= token[:, -1:])
            others = np.broadcast_to(~is_new[:, None, :, None], x.shape)
            if (x[others] != before[name][others]).any():
                raise RuntimeError(f"{name} changed outside the rows of the new tokens")
