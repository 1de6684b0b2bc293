"""Writes to caches, `append` and `rotate_cached`, with all arrays at chosen places in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from fuzz.placed import PLAIN, Place, places
from hypothesis import strategies as st
from launch import cases
from launch.test_rotate_cached import check as check_rotate_cached

# Dtypes of the inputs and of the cache. Each pair is a kernel for each pairing of elements.
PAIRS = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
)


@dataclass(frozen=True)
class Append:
    """A call that `cases.Call` draws from a seed; see `check`.

    operation: "append" or "rotate_cached". places: of q, k, v and out. cache_places: of key, value
    and their scales. large: whether there are 2^17 elements and more.
    """

    operation: str
    dtypes: tuple[str, str]
    interleaved: bool
    large: bool
    seed: int
    places: tuple[Place, ...] = (PLAIN,) * 4
    cache_places: tuple[Place, ...] = (PLAIN,) * 4


@st.composite
def cache_places(draw):
    """Draw a place of an array whose last axis is contiguous and whose elements are apart."""
    place = draw(places(repeated=False))
    order = tuple(axis for axis in place.order if axis != 3)
    backwards = tuple(axis for axis in place.backwards if axis != 3)
    return Place((*order, 3), (*place.steps[:3], 0), backwards, (), place.shift, place.at_end)


@st.composite
def appends(draw, large=False):
    """Draw a write that must succeed; large: in several parts."""
    return Append(
        draw(st.sampled_from(("append", "append", "append", "rotate_cached"))),
        draw(st.sampled_from(PAIRS)),
        draw(st.booleans()),
        large,
        draw(st.integers(0, 2**32)),
        tuple(draw(places(repeated=index in (1, 2))) for index in range(4)),
        tuple(draw(cache_places()) for _ in range(4)),
    )


class PlacedCall(cases.Call):
    """A call whose arrays lie in a memory. written: those that it may write."""

    def __init__(self, case, memory):
        def hold(arrays):
            pairs = zip(arrays, case.cache_places, strict=False)
            return [placed(memory, x, place) for x, place in pairs]

        rng = np.random.default_rng(case.seed)
        super().__init__(rng, *case.dtypes, case.interleaved, large=case.large, hold=hold)
        pairs = zip(self.values, case.places, strict=False)
        arrays = [placed(memory, x, place) for x, place in pairs]
        self.values = [np.array(x) for x in arrays]  # a place may repeat elements
        self.place = lambda values: arrays
        self.own = placed(memory, np.zeros_like(self.values[0]), case.places[3])
        self.written = [*self.caches.arrays, arrays[0], self.own]  # `run` checks queries

    def _make_out(self, q):
        if self.out in ("new", "in place"):
            return super()._make_out(q)
        return cases.in_layout(self.own, self.layout)


def placed(memory, x, place):
    """Return a copy of an array of up to four axes at a place."""
    missing = 4 - x.ndim
    y = memory.array((*x.shape, *[1] * missing), x.dtype, place)[(..., *[0] * missing)]
    y[...] = x
    return y


def check(case, memory):
    """Write to a cache, and raise unless the results are right and nothing else was written."""
    call = PlacedCall(case, memory)
    memory.remember()
    if case.operation == "append":
        expected = call.expect()
        cases.steps.assert_same_bits(call.run(), expected, call.text)
        call.caches.check(call.text)
    elif case.dtypes[1] != "int8":
        slots = call.slots[0] if call.layout == "thd" else call.slots
        check_rotate_cached(call.plan(), call.caches, slots, call.layout)
    assert memory.changed_outside(call.written) == 0, "bytes beside the arrays changed"
