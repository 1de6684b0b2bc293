"""Random calls of attention on caches at chosen places in memory."""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
from fuzz.appends import cache_places
from fuzz.placed import PLAIN, Place, places
from hypothesis import strategies as st
from launch import attending
from launch.steps import CACHE_DTYPES, DTYPES

import rope_cpu
from rope_cpu.launch import attention as module


@dataclass(frozen=True)
class Attention:
    """A call that `attending.draw` draws from a seed; see `check`.

    places: of q and out. cache_places: of key, value and their scales. in_parts: whether also
    little work is shared out among threads.
    """

    cache_dtype: str
    in_parts: bool
    seed: int
    places: tuple[Place, ...] = (PLAIN,) * 2
    cache_places: tuple[Place, ...] = (PLAIN,) * 4


@st.composite
def attentions(draw, large=False):
    """Draw a call that must succeed; large: in several parts."""
    return Attention(
        draw(st.sampled_from(CACHE_DTYPES)),
        large or draw(st.booleans()),
        draw(st.integers(0, 2**32)),
        (draw(places()), draw(places(repeated=False))),
        tuple(draw(cache_places()) for _ in range(4)),
    )


def _cache_arrays(case, call, memory):
    """Return key, value and their scales, or None, in new memory."""
    shape = (call.pages(call.page_size), call.page_size, call.kv_heads)
    arrays = [
        memory.array((*shape, width), DTYPES[case.cache_dtype], place)
        for width, place in zip(call.widths, case.cache_places, strict=False)
    ]
    if case.cache_dtype != "int8":
        return (*arrays, None, None)
    scales = [
        memory.array((*shape, 1), DTYPES["float32"], place)[..., 0]
        for place in case.cache_places[2:]
    ]
    return (*arrays, *scales)


def check(case, memory):
    """Attend, and raise unless the results are right and nothing else was written."""
    call = attending.draw(np.random.default_rng(case.seed), case.cache_dtype)
    cache, batch = call.fill(_cache_arrays(case, call, memory))
    q = memory.array((1, *call.q.shape), DTYPES["float32"], case.places[0])[0]
    q[...] = call.q
    call.q = q.copy()  # a place may repeat elements
    shape = (1, *q.shape[:2], call.widths[1])
    out = memory.array(shape, DTYPES["float32"], case.places[1])[0]
    memory.remember()
    least = 0 if case.in_parts else module._PARALLEL_FROM
    with mock.patch.object(module, "_PARALLEL_FROM", least):
        options = call.options._asdict()
        assert rope_cpu.attention(q, cache, batch, out=out, **options) is out
    assert memory.changed_outside([out]) == 0, "bytes outside the output changed"
    call.check(out)
