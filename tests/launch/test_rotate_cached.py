"""RotaryPlan.rotate_cached: cached keys moved, or changed to another rotation, in place."""

import numpy as np
import oracle
import pytest
from launch import cases, steps
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


def test_moved_keys_are_those_appended_at_other_positions(interleaved, rng):
    """A context shift: three roundings each of values up to |x_a| + |x_b| are the difference."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64), interleaved=interleaved)
    q = cases.noise(rng, (6, 2, 64), np.float32)
    slots = rng.permutation(8)[:6]
    caches = [rope_cpu.KVCache(*np.zeros((2, 2, 4, 2, 64), np.float32)) for _ in range(2)]
    for cache, start in zip(caches, (100, 60), strict=True):
        plan = rope.plan(np.arange(start, start + 6), layout="thd")
        plan.append(q, q, q, cache, slots)
    rope.shift_plan(-40, layout="thd").rotate_cached(caches[0], slots)
    places = (slots // 4, slots % 4)
    _, bound = oracle.expected(rope, q[None], np.arange(60, 66)[None])
    assert (np.abs(caches[0].key[places] - caches[1].key[places]) <= 3 * bound[0]).all()
    assert np.array_equal(caches[0].value, caches[1].value)


def test_longrope_changes_its_frequencies(rng):
    """The switch at the original length, in one rotation of the cached keys."""
    factors = rng.uniform(1, 4, (2, 16))
    scaling = {
        "rope_type": "longrope",
        "short_factor": factors[0].tolist(),
        "long_factor": factors[1].tolist(),
        "factor": 4.0,
        "original_max_position_embeddings": 8,
    }
    rope = RotaryEmbedding(32, scaling=scaling)
    old = rope.at_length(8)
    new = rope.at_length(9)
    k = cases.noise(rng, (8, 2, 32), np.float32)
    cache = rope_cpu.KVCache(*np.zeros((2, 2, 4, 2, 32), np.float32))
    ids = np.arange(8)
    old.plan(ids, layout="thd").append(k, k, k, cache, ids)
    new.rerotate_plan(old, ids, layout="thd").rotate_cached(cache, ids)
    exact, bound = oracle.expected(new, k[None], ids[None])
    assert (np.abs(cache.key.reshape(1, 8, 2, 32) - exact) <= 3 * bound).all()


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


def test_bfloat16_keys_are_rounded_once_a_call(rng):
    """Moved twice differs from moved once, and each call is the rotation of what was stored."""
    rope = RotaryEmbedding(32)
    key = cases.noise(rng, (4, 4, 2, 32), DTYPES["bfloat16"])
    cache = rope_cpu.KVCache(key.copy(), np.zeros_like(key))
    moves = rope.shift_plan(-1)
    slots = np.arange(16)[None]
    for _ in range(2):
        key = moves.rotate(key.reshape(1, 16, 2, 32)).reshape(key.shape)
        moves.rotate_cached(cache, slots)
        steps.assert_same_bits(cache.key, key)
