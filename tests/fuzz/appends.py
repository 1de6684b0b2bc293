"""Random writes to caches: append and rotate_cached, and their results in separate steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
from fuzz import calls
from fuzz.placed import PLAIN, Place, places
from fuzz.rotaries import Rotary, rotaries
from hypothesis import assume
from hypothesis import strategies as st
from serving import steps
from serving.steps import DTYPES, Norm

import rope_cpu
from rope_cpu.array_types import LAYOUT_AXES

# Dtypes of the inputs and of the cache. Each pair is a kernel for each pairing of elements.
PAIRS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
)
NORMS = ("none", "none", "bare", "weight", "offset")


@dataclass(frozen=True)
class Append:
    """Queries, keys and values of a step, and a cache; see `check`.

    operation: "append" or "rotate_cached". places: of q, k, v and out. cache_places: of key, value
    and their scales. halves: whether key and value share their pages of one array. dropped: the
    share of tokens that are not kept.
    """

    rotary: Rotary
    operation: str
    layout: str
    dtypes: tuple[str, str]
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    value_width: int
    page_size: int
    free_pages: int
    ids: calls.Ids
    values: str
    norms: tuple[str, str, str]
    out: str
    dropped: float
    seed: int
    places: tuple[Place, ...] = (PLAIN,) * 4
    cache_places: tuple[Place, ...] = (PLAIN,) * 4
    halves: bool = False
    way: str = "plan"  # of the position ids, in `calls`


@st.composite
def cache_places(draw):
    """Draw a place of an array whose last axis is contiguous and whose elements are apart."""
    place = draw(places(repeated=False))
    order = tuple(axis for axis in place.order if axis != 3)
    backwards = tuple(axis for axis in place.backwards if axis != 3)
    return Place((*order, 3), (*place.steps[:3], 0), backwards, (), place.shift, place.at_end)


@st.composite
def appends(draw, large=False):
    """Draw a write that must succeed; large: of 2^17 elements and more."""
    rotary = draw(rotaries())
    layout = draw(st.sampled_from(tuple(LAYOUT_AXES) if rotary.rows == 1 else ("bshd", "bhsd")))
    batches = (rotary.rows,) if rotary.rows > 1 or layout == "thd" else (1, 1, 2, 3)
    batch = draw(st.sampled_from(batches))
    tokens = draw(st.sampled_from((1, 1, 2, 3, 5, 8, 0)))
    kv_heads = draw(st.sampled_from((1, 2, 3))) * rotary.heads
    heads = kv_heads * draw(st.sampled_from((1, 2, 4)))
    width = rotary.rope.head_dim
    if large:
        elements = batch * (heads + 2 * kv_heads) * width
        tokens = 2**17 // elements + draw(st.integers(1, 9))
    return Append(
        rotary,
        draw(st.sampled_from(("append", "append", "append", "rotate_cached"))),
        layout,
        draw(st.sampled_from(PAIRS)),
        batch,
        tokens,
        heads,
        kv_heads,
        draw(st.sampled_from((width, width, 1, 3, 8, 72))),
        draw(st.sampled_from((1, 2, 16, 33))),
        draw(st.integers(0, 3)),
        draw(calls.ids(rotary, "plan", layout)),
        draw(st.sampled_from(("normal", "normal", "wide", "special"))),
        tuple(draw(st.sampled_from(NORMS)) for _ in "qkv"),
        draw(st.sampled_from(("new", "in place", "own"))),
        draw(st.sampled_from((0.0, 0.2, 1.0))),
        draw(st.integers(0, 2**32)),
        tuple(draw(places(repeated=index < 3)) for index in range(4)),
        tuple(draw(cache_places()) for _ in range(4)),
        draw(st.booleans()),
    )


def _norm(kind, width, random):
    if kind == "none":
        return None
    if kind == "bare":
        return Norm(None, 1e-5)
    weight = random.standard_normal(width).astype(np.float32)
    return Norm(weight, 1e-6, 1.0 if kind == "offset" else 0.0)


def _rms_norm(norm):
    return None if norm is None else rope_cpu.RMSNorm(norm.weight, norm.eps, offset=norm.offset)


def _cache(case, memory):
    """Return a cache in new memory."""
    needed = -(-case.batch * case.tokens // case.page_size)
    pages = max(needed + case.free_pages, 1)
    dtype = DTYPES[case.dtypes[1]]
    shape = (pages, case.page_size, case.kv_heads)
    width = case.rotary.rope.head_dim
    if case.halves and case.value_width == width:
        both = memory.array((2 * pages, *shape[1:], width), dtype, case.cache_places[0])
        key, value = both[0::2], both[1::2]
    else:
        key, value = (
            memory.array((*shape, size), dtype, place)
            for size, place in zip((width, case.value_width), case.cache_places, strict=False)
        )
    if dtype != np.int8:
        return rope_cpu.KVCache(key, value)
    scales = [
        memory.array((*shape, 1), DTYPES["float32"], place)[..., 0]
        for place in case.cache_places[2:]
    ]
    return rope_cpu.KVCache(key, value, key_scale=scales[0], value_scale=scales[1])


def _slots(case, random, cache):
    """Return the slots of all tokens (batch, tokens)."""
    count = cache.pages * cache.page_size
    slots = random.permutation(count)[: case.batch * case.tokens]
    slots = slots.reshape(case.batch, case.tokens)
    slots[random.random(slots.shape) < case.dropped] = -1
    return slots


@dataclass
class Arranged:
    """The arguments of an append.

    plan, usual: the plan of the layout, and that of arrays (batch, tokens, heads, width). slots:
    (batch, tokens). arguments: those of `RotaryPlan.append` by name. norms: those of q, k and v.
    """

    plan: Any
    usual: Any
    slots: Any
    arguments: dict[str, Any]
    norms: list[Norm | None]


def arrange(case, memory):
    """Return the arguments of an append, in new memory."""
    random = np.random.default_rng(case.seed)
    width = case.rotary.rope.head_dim
    dtype = DTYPES[case.dtypes[0]]
    counts = (case.heads, case.kv_heads, case.kv_heads)
    widths = (width, width, case.value_width)
    arguments = {}
    for name, count, size, place in zip("qkv", counts, widths, case.places, strict=False):
        shape = calls.shape_in(case.layout, case.batch, case.tokens, count, size)
        x = memory.array(shape, dtype, place)
        x[...] = calls.draw_values(random, shape, case.values, dtype)
        arguments[name] = x[0] if case.layout == "thd" else x
    arguments["cache"] = _cache(case, memory)
    slots = _slots(case, random, arguments["cache"])
    arguments["slot_mapping"] = slots[0] if case.layout == "thd" else slots
    norms = [_norm(kind, size, random) for kind, size in zip(case.norms, widths, strict=True)]
    for name, norm in zip("qkv", norms, strict=True):
        arguments[f"{name}_norm"] = _rms_norm(norm)
    arguments["out"] = _out(case, memory, arguments["q"])
    positions, ids = calls._positions(case, memory)
    assume(np.isfinite(positions).all())
    plan = case.rotary.rope.plan(ids, layout=case.layout)
    rows = np.asarray(ids)[None] if case.layout == "thd" else ids
    return Arranged(plan, case.rotary.rope.plan(rows), slots, arguments, norms)


def _out(case, memory, q):
    """Return the output that is given, or None."""
    if case.out == "in place" and not calls._repeats(q):
        return q
    if case.out != "own":
        return None
    width = case.rotary.rope.head_dim
    shape = calls.shape_in(case.layout, case.batch, case.tokens, case.heads, width)
    out = memory.array(shape, q.dtype, case.places[3])
    return out[0] if case.layout == "thd" else out


def check(case, memory):
    """Write to a cache, and raise unless the results are right and nothing else was written."""
    arranged = arrange(case, memory)
    if case.operation == "append":
        _check_append(case, memory, arranged)
    elif case.dtypes[1] != "int8":
        _check_rotate_cached(case, memory, arranged)


def _check_append(case, memory, arranged):
    arguments = arranged.arguments
    cache = arguments["cache"]
    expected = [
        steps.normalised(oracle.from_layout(arguments[name], case.layout).astype(np.float32), norm)
        for name, norm in zip("qkv", arranged.norms, strict=True)
    ]
    memory.remember()
    result = arranged.plan.append(**arguments)
    written = _elements(cache, arranged.slots, ("key", "value", "key_scale", "value_scale"))
    out = arguments["out"]
    if out is not None:
        assert result is out
        written.append(out)
    assert memory.changed_outside(written) == 0, "bytes outside the slots and the output changed"
    with np.errstate(all="ignore"):
        queries, keys = (arranged.usual.rotate(x) for x in expected[:2])
        queries = steps.stored(queries, result.dtype)
        steps.assert_same_bits(oracle.from_layout(result, case.layout), queries)
        _check_slots(cache.key, cache.key_scale, cache, arranged.slots, keys)
        _check_slots(cache.value, cache.value_scale, cache, arranged.slots, expected[2])


def _check_rotate_cached(case, memory, arranged):
    cache = arranged.arguments["cache"]
    random = np.random.default_rng(case.seed)
    cache.key[...] = calls.draw_values(random, cache.key.shape, case.values, cache.dtype)
    slots = arranged.slots
    places = (slots // cache.page_size, slots % cache.page_size)
    keys = np.ascontiguousarray(cache.key[places])
    memory.remember()
    arranged.plan.rotate_cached(cache, arranged.arguments["slot_mapping"])
    written = _elements(cache, slots, ("key",))
    assert memory.changed_outside(written) == 0, "bytes outside the keys of the slots changed"
    with np.errstate(all="ignore"):
        rotated = arranged.usual.rotate(keys)
    kept = slots >= 0
    steps.assert_same_bits(cache.key[places][kept], rotated[kept])


def _elements(cache, slots, names):
    """Return views of what slots hold."""
    arrays = [getattr(cache, name) for name in names]
    return [
        array[slot // cache.page_size, slot % cache.page_size]
        for array in arrays
        if array is not None
        for slot in slots[slots >= 0]
    ]


def _check_slots(array, scale, cache, slots, rows):
    """Raise unless slots hold float32 rows (batch, tokens, heads, width), rounded once."""
    kept = slots >= 0
    places = (slots[kept] // cache.page_size, slots[kept] % cache.page_size)
    rows = rows[kept]
    if scale is None:
        steps.assert_same_bits(array[places], steps.stored(rows, cache.dtype))
        return
    integers, scales = steps.quantised(rows)
    steps.assert_same_bits(array[places], integers)
    steps.assert_same_bits(scale[places], scales)
