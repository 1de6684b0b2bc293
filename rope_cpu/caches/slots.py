"""The slots of a step's tokens in a cache: given by a Batch, or as integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.array_types import CACHE_FORMATS, Array
from rope_cpu.caches.batch import Batch
from rope_cpu.caches.kv_cache import KVCache

# The remedy where page_size and heads of a cache are exchanged.
HEADS_FIRST = "if `cache` has the heads first, make it from key.transpose(0, 2, 1, 3)"

_ONE_SLOT = "give each token a slot of its own"

# As many slots Python compares faster than NumPy: 32 on pages in any order take 3 µs instead of 35.
_FEW = 64


def slots_of_tokens(value: Batch | ArrayLike, cache: KVCache, layout: str) -> Array:
    """Return slots as int64 (batch, tokens); raise unless the cache has them, and none is twice.

    A Batch has checked its slots: its page size and its pages alone are compared with the cache.
    """
    if not isinstance(value, Batch):
        slots = _slots(value, layout)
        if not (0 < slots.size <= _FEW and _are_distinct(slots, cache)):
            _check_range(slots, cache)
            check_none_twice(sorted_runs(slots))
        return slots
    if type(value) is not Batch:
        scalars.check_type("slot_mapping", value, Batch)
    if layout != "thd":
        finding = Finding(f"is a Batch, but the plan has layout {layout!r}")
        rule = "be integers for it, as the tokens of a Batch are packed"
        raise ArgumentError("slot_mapping", finding, rule, "or make the plan with layout='thd'")
    if value.page_size != cache.page_size:
        check_page_size("slot_mapping", value, cache)
    if value.pages_needed > cache.pages:
        finding = Finding(f"writes to page {value.pages_needed - 1}")
        raise ArgumentError("slot_mapping", finding, f"fit the {cache.pages} pages of `cache`")
    if value._shared_slot is not None:
        finding = Finding(f"gives slot {value._shared_slot} to two tokens")
        remedy = "such a batch is for `attention` alone"
        raise ArgumentError("slot_mapping", finding, _ONE_SLOT, remedy)
    return value._slots


def check_page_size(name: str, batch: Batch, cache: KVCache) -> None:
    """Raise unless the pages of a batch have the size of a cache's."""
    if batch.page_size != cache.page_size:
        rule = f"have that of `cache`, {cache.page_size}"
        remedy = HEADS_FIRST if batch.page_size == cache.kv_heads else ""
        raise ArgumentError(name, Finding(f"has page_size {batch.page_size}"), rule, remedy)


def _slots(value: ArrayLike, layout: str) -> Array:
    """Return integers as int64 (batch, tokens), a copy."""
    slots = scalars.integers("slot_mapping", value, most=limits.SLOTS)
    shape = "(tokens,)" if layout == "thd" else "(batch, seq)"
    if slots.ndim != (1 if layout == "thd" else 2):
        rule = f"be {shape} with layout {layout!r}"
        raise ArgumentError("slot_mapping", Finding.shape_of(slots), rule)
    return slots[None] if layout == "thd" else slots


def _are_distinct(slots: Array, cache: KVCache) -> bool:
    """Return True if a cache has all slots, of which there are few, and none is there twice."""
    entries = sorted(slots.ravel().tolist())
    in_range = entries[0] >= -1 and entries[-1] < cache.pages * cache.page_size
    repeated = len(entries) - len({*entries})
    return in_range and repeated == max(entries.count(-1) - 1, 0)


def _check_range(slots: Array, cache: KVCache) -> None:
    """Raise unless a cache has all slots, at most as many as it has."""
    count = cache.pages * cache.page_size
    if slots.size and not -1 <= slots.min() <= slots.max() < count:
        wrong = slots[(slots < -1) | (slots >= count)][0]
        rule = f"hold slots of `cache`, 0 to {count - 1}, or -1 for a token that is not kept"
        raise ArgumentError("slot_mapping", Finding.holds(wrong), rule)
    kept = np.count_nonzero(slots >= 0)
    if kept > count:
        finding = Finding(f"has a slot for {kept} tokens")
        rule = f"have one for at most {count}, the slots of `cache`"
        raise ArgumentError("slot_mapping", finding, rule)


def sorted_runs(slots: Array) -> Array:
    """Return the runs of consecutive slots, in the order of their slots, int64 (runs, 3).

    The columns are the first slot of a run, the number of its slots, and the index of its first
    token in the flattened slots, of which those of -1 are in no run. A run may go over the ends of
    pages and of batch rows.
    """
    # 8,192 slots on pages of 16 take 40 µs; sorting the slots themselves would take 200.
    flat = slots.ravel()
    ends = (np.diff(flat) != 1) | (flat[:-1] < 0)
    first = np.append(0, np.flatnonzero(ends) + 1)[: flat.size]  # none without slots
    lengths = np.diff(first, append=flat.size)
    starts = flat[first]
    order = np.argsort(starts)[np.count_nonzero(starts < 0) :]
    return np.stack([starts[order], lengths[order], first[order]], axis=1)


def check_none_twice(runs: Array) -> None:
    """Raise if a slot is in two of the sorted runs."""
    starts = runs[1:, 0]
    stops = runs[:-1, 0] + runs[:-1, 1]
    repeated = starts[starts < stops]
    if repeated.size:
        raise ArgumentError("slot_mapping", Finding(f"holds slot {repeated[0]} twice"), _ONE_SLOT)


def slots_of_keys(cache: KVCache, slot_mapping: Batch | ArrayLike, layout: str) -> Array:
    """Return slots as int64 (batch, tokens); raise unless keys there can be rotated in place.

    A slot may be there twice, which `check_none_twice` refuses.
    """
    scalars.check_type("cache", cache, KVCache)
    if isinstance(slot_mapping, Batch):
        finding = Finding("is a Batch, which has the slots of new tokens alone")
        rule = "hold the slots of the cached keys to be rotated, as integers"
        raise ArgumentTypeError("slot_mapping", finding, rule)
    if cache.hadamard or CACHE_FORMATS[cache._kind.key].scale_dtype is not None:
        rule = "store the keys themselves, in floats such as bfloat16"
        remedy = "or append the keys again from their projections"
        raise ArgumentTypeError("cache", Finding(f"is of the kind {cache._kind}"), rule, remedy)
    slots = _slots(slot_mapping, layout)
    _check_range(slots, cache)
    return slots
