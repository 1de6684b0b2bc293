"""Random calls of attention, and their results by the oracle.

A sequence's keys and values are drawn first and then written to their slots; all memory beside
them holds NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attention_oracle as oracle
import numpy as np
from launch import cases
from launch.steps import DTYPES

import rope_cpu

# The allowed error of a float32 result of `draw`, relative to the largest value. Its scores are
# below 16, so each rounding of a score changes its weight by a factor of 1 + 2^-20, which is 1e-6,
# at most. The few roundings of a score rarely add up, and other scores have smaller ones. `bound`
# holds for every call.
TOLERANCE = 2e-6

WIDTHS = (16, 33, 64, 72, 80, 96, 128, 192, 256)
PAGE_SIZES = (1, 7, 16, 100, 700)


class Options(NamedTuple):
    """The optional arguments of attention."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Any = None


class Sequence(NamedTuple):
    """keys, values: float64 (length, kv_heads, width), as the cache holds them. new: how many."""

    keys: Any
    values: Any
    new: int


def exactly(q, sequences, options):
    """Return the results in float64. q: (tokens, heads, head_dim)."""
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    sinks = options.sinks
    if sinks is not None:
        sinks = np.asarray(sinks).astype(np.float32).astype(np.float64)
    results = []
    rows = iter(q.astype(np.float64))
    for sequence in sequences:
        shared = q.shape[1] // sequence.keys.shape[1]
        keys, values = (np.repeat(x, shared, axis=1) for x in sequence[:2])
        for position in range(len(keys) - sequence.new, len(keys)):
            seen = slice(max(0, position + 1 - (options.window or position + 1)), position + 1)
            scores = oracle.scored(next(rows), keys[seen], scale, options.softcap)
            weights, _ = oracle.weighed(scores, sinks)
            results.append(oracle.summed(weights, values[seen]))
    width = sequences[0].values.shape[-1]
    return np.array(results).reshape(len(q), q.shape[1], width)


def bound(q, sequences, options):
    """Return a bound on the errors of a float32 result, relative to the largest value.

    The bound of docs/serving.md, in units of 2^-24. A sum of values has one rounding for each of
    the 256 keys of a range, and so may the sum of weights; every merge of two ranges has a few in
    both. A score has those of the scale and of q, one for each of head_dim / 8 additions to a lane,
    of the sum of the lanes and up to 15 elements that fill no lane, of a softcap, and of the
    difference from the largest score, relative to the sum of |q·k|.
    """
    scale = q.shape[2] ** -0.5 if options.scale is None else options.scale
    keys = np.concatenate([sequence.keys for sequence in sequences])
    shared = np.repeat(np.abs(keys), q.shape[1] // keys.shape[1], axis=1)
    products = scale * np.einsum("qhd,khd->hqk", np.abs(q.astype(np.float64)), shared).max()
    longest = max(len(sequence.keys) for sequence in sequences)
    return 2.0**-24 * (600 + longest / 64 + (32 + q.shape[2] / 8) * products)


class Call:
    """A call of attention.

    lengths, new: of the sequences. q: float32; `run` converts it.
    """

    def __init__(self, rng, cache_dtype, lengths, new, page_size, *, heads, widths, options):
        kv_heads, shared = heads
        self.rng = rng
        self.options = options
        self.cache_dtype = cache_dtype
        self.lengths = np.asarray(lengths, np.int64)
        self.new = np.asarray(new, np.int64)
        self.page_size = page_size
        self.kv_heads = kv_heads
        self.widths = widths
        shape = (int(self.new.sum()), kv_heads * shared, widths[0])
        self.q = rng.standard_normal(shape).astype(np.float32)
        self.stored = [
            [self._vectors((length, kv_heads, width)) for width in widths]
            for length in self.lengths
        ]

    def _vectors(self, shape):
        """Return vectors as a cache stores them, and their scales."""
        x = self.rng.standard_normal(shape)
        if self.cache_dtype != "int8":
            return x.astype(DTYPES[self.cache_dtype]), None
        scales = (self.rng.uniform(0.5, 1, shape[:2]) / 40).astype(np.float32)
        return np.clip(np.rint(x / scales[..., None]), -127, 127).astype(np.int8), scales

    def sequences(self):
        """Return the sequences in float64."""
        pairs = [
            [x.astype(np.float64) * (1 if s is None else s[..., None]) for x, s in pair]
            for pair in self.stored
        ]
        return [Sequence(*pair, int(new)) for pair, new in zip(pairs, self.new, strict=True)]

    def expected(self):
        return exactly(self.q, self.sequences(), self.options)

    def largest(self):
        """Return the largest magnitude of a value."""
        return max((np.abs(s.values).max(initial=0) for s in self.sequences()), default=0)

    def first_keys(self):
        """Return the first key of each sequence that one of its new tokens attends to."""
        window = self.options.window or self.lengths.max(initial=0)
        return np.maximum(self.lengths - self.new - window + 1, 0)

    def place(self, page_size=None, **paging):
        """Return a cache with these sequences in random pages, and their batch.

        paging: see `cases.Caches`; all memory beside the keys holds NaN.
        """
        size = page_size or self.page_size
        sizes = (self.pages(size), size, self.kv_heads, *self.widths)
        arguments = {"paging": "pages", "scale_paging": "pages"} | paging
        caches = cases.Caches(self.rng, self.cache_dtype, sizes=sizes, **arguments)
        return self.fill(caches.of(caches.arrays))

    def pages(self, page_size):
        """Return a number of pages that is enough."""
        return int((-(-self.lengths // page_size)).sum()) + 2

    def fill(self, arrays):
        """Write the sequences to random pages of a cache, and NaN elsewhere; return it and a batch.

        arrays: key, value and their scales, or None. Keys that no new token attends to are not
        written, and whole pages of them are −1.
        """
        size = arrays[0].shape[1]
        for array in arrays:
            if array is not None:
                array[...] = 99 if array.dtype == np.int8 else np.nan
        order = self.rng.permutation(len(arrays[0]))
        table = np.full((len(self.lengths), max(-(-self.lengths // size), default=0) + 1), -1)
        for row, first in enumerate(self.first_keys()):
            length = self.lengths[row] if self.new[row] else 0
            index = np.arange(first, length)
            kept = np.arange(first // size, -(-length // size))
            table[row, kept] = order[: len(kept)]
            order = order[len(kept) :]
            slots = (table[row, index // size], index % size)
            for x, (vectors, scales), scale in zip(
                arrays[:2], self.stored[row], arrays[2:], strict=True
            ):
                x[slots] = vectors[index]
                if scale is not None:
                    scale[slots] = scales[index]
        key, value, key_scale, value_scale = arrays
        cache = rope_cpu.KVCache(key, value, key_scale=key_scale, value_scale=value_scale)
        batch = rope_cpu.Batch(
            seq_lens=self.lengths, query_lens=self.new, page_table=table, page_size=size
        )
        return cache, batch

    def run(self, cache=None, batch=None, **changes):
        """Return the result. changes: of the placement, if no cache is given."""
        if cache is None:
            cache, batch = self.place(**changes)
        return rope_cpu.attention(self.q, cache, batch, **self.options._asdict())

    def check(self, result):
        """Raise unless a float32 result is within its rounding errors."""
        error = np.abs(result - self.expected()).max(initial=0)
        assert error <= TOLERANCE * self.largest(), (error, self.q.shape, self.options)


def draw(rng, cache_dtype):
    """Return a random call: decode steps, chunks, idle and empty sequences, all options."""
    count = int(rng.integers(1, 5))
    new = np.where(rng.random(count) < 0.5, 1, rng.integers(0, 40, count))
    cached = np.where(rng.random(count) < 0.3, 0, rng.integers(0, 700, count))
    kv_heads = int(rng.choice([1, 2, 3]))
    shared = int(rng.integers(1, 9))
    width = int(rng.choice(WIDTHS))
    value_width = int(rng.choice([width, width, width, 16, 100]))
    sinks = None
    if rng.random() < 0.3:
        sinks = 3 * rng.standard_normal(kv_heads * shared)
    options = Options(
        scale=None if rng.random() < 0.7 else float(rng.uniform(0.5, 1.5)) * width**-0.5,
        window=None if rng.random() < 0.5 else int(rng.choice([1, 5, 64, 100, 300])),
        softcap=None if rng.random() < 0.6 else float(rng.choice([3.0, 30.0, 50.0])),
        sinks=sinks,
    )
    return Call(
        rng,
        cache_dtype,
        new + cached,
        new,
        int(rng.choice(PAGE_SIZES)),
        heads=(kv_heads, shared),
        widths=(width, value_width),
        options=options,
    )


def draw_paging(rng, call):
    """Return random strides of the cache, as arguments of `place`."""
    same_width = call.widths[0] == call.widths[1]
    usable = [name for name, row in cases.PAGINGS.items() if same_width or not row.same_width]
    return {
        "paging": str(rng.choice(usable)),
        "scale_paging": str(rng.choice(list(cases.SCALE_PAGINGS))),
    }
