"""RotaryPlan.rotate_cached: cached keys moved, or changed to another rotation, in place."""

import numpy as np
import oracle
import pytest
from launch import cases
from launch.steps import DTYPES, INPUT_DTYPES

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.kernels import threads


def check(plan, caches, slots, layout):
    """Raise unless the keys of slots are rotated as by `plan.rotate`, and nothing else changes."""
    kept = slots >= 0
    places = (slots // caches.page_size, slots % caches.page_size)
    # Gathered keys, (batch, tokens, heads, width); of tokens that are left out, any.
    keys = caches.cache.key[places].copy()
    packed = keys[None] if layout == "thd" else keys
    given = np.ascontiguousarray(cases.in_layout(packed, layout))
    rotated = oracle.from_layout(plan.rotate(given), layout).reshape(keys.shape)
    expected = caches.of(caches.expected)[0]
    expected[slots[kept] // caches.page_size, slots[kept] % caches.page_size] = rotated[kept]
    assert plan.rotate_cached(caches.cache, slots) is None
    caches.check()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_bits_are_those_of_rotating_gathered_keys(dtype, layout, interleaved, rng):
    for kind in dict.fromkeys(cases.ROTARIES):
        width = int(rng.choice(cases.WIDTHS))
        rope = kind(rng, width, interleaved)
        shape = (5,) if layout == "thd" else (2, 5)
        paging = str(rng.choice(list(cases.PAGINGS)))
        caches = cases.Caches(rng, dtype, paging, "pages", (7, 3, 4, width, width))
        slots = cases.draw_slots(rng, caches.count, shape)
        axes = () if rope.axes == 1 else (rope.axes,)
        for plan in (
            rope.plan(rng.integers(0, 999, (*shape, *axes)), layout=layout),
            rope.plan(rng.integers(0, 999, (*shape, *axes)), layout=layout, inverse=True),
            rope.plan(rng.integers(0, 999, (*shape[-1:], *axes)), layout=layout),
            rope.shift_plan(rng.integers(-99, 99, (*shape, *axes)), layout=layout),
            rope.shift_plan(rng.integers(-99, 99, axes), layout=layout),
            rope.rerotate_plan(rope, rng.integers(0, 99, (*shape, *axes)), layout=layout),
        ):
            check(plan, caches, slots, layout)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_any_number_of_threads_gives_the_same_bits(dtype, monkeypatch, rng):
    rope = RotaryEmbedding(64)
    key = cases.noise(rng, (80, 16, 8, 64), DTYPES[dtype])
    slots = rng.permutation(1280)[:1201]
    slots[::7] = -1
    plan = rope.plan(rng.integers(0, 9999, 1201), layout="thd")
    assert slots.size * 8 * 64 >= 2**19
    results = []
    for count in (1, 2, 3, 7):
        monkeypatch.setattr(threads, "limit", count)
        cache = rope_cpu.KVCache(key.copy(), np.zeros_like(key))
        plan.rotate_cached(cache, slots)
        results.append(cache.key.tobytes())
        assert not cache.value.any()
    assert all(result == results[0] for result in results)
    assert results[0] != key.tobytes()


def test_no_slots():
    rope = RotaryEmbedding(16)
    cache = rope_cpu.KVCache(*np.ones((2, 2, 4, 2, 16), np.float32))
    rope.plan([], layout="thd").rotate_cached(cache, [])
    rope.shift_plan(3).rotate_cached(cache, np.zeros((0, 3), int))
    rope.shift_plan(3).rotate_cached(cache, [[-1, -1]])
    assert (cache.key == 1).all()
