"""RotaryPlan.append: the bits of separate steps, and the distance from exact results."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import oracle
import pytest
from launch import cases, steps
from launch.steps import CACHE_DTYPES, DTYPES, INPUT_DTYPES, Norm

import rope_cpu
from rope_cpu import RotaryEmbedding
from rope_cpu.kernels import threads
from rope_cpu.launch import append


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_bits_are_those_of_separate_steps(dtype, cache_dtype, interleaved, rng):
    for _ in range(25):
        call = cases.Call(rng, dtype, cache_dtype, interleaved)
        expected = call.expect()
        steps.assert_same_bits(call.run(), expected, call.text)
        call.caches.check(call.text)


def empty_cache(dtype, pages=4, page_size=4, heads=2, width=16, **options):
    return rope_cpu.KVCache.zeros(pages, page_size, heads, width, dtype=dtype, **options)


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_results_are_within_the_roundings_of_exact_ones(dtype, cache_dtype, interleaved, rng):
    factor = 1.25
    width = int(rng.choice([16, 72, 128]))
    rotated = int(rng.choice([width, width // 2]))
    rope = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(rotated),
        head_dim=width,
        attention_factor=factor,
        interleaved=interleaved,
    )
    ids = rng.integers(0, 3000, 5)
    q, k, v = (cases.noise(rng, (5, heads, width), DTYPES[dtype]) for heads in (4, 2, 2))
    norms = [Norm(rng.standard_normal(width).astype(np.float32), 1e-5, offset) for offset in (0, 1)]
    q_norm, k_norm, v_norm = [*norms, Norm(None, 1e-5)]
    cache = empty_cache(DTYPES[cache_dtype], width=width)
    slots = rng.permutation(16)[:5]
    q_rot = rope.plan(ids, layout="thd").append(
        q,
        k,
        v,
        cache,
        slots,
        q_norm=cases.to_norm(q_norm),
        k_norm=cases.to_norm(k_norm),
        v_norm=cases.to_norm(v_norm),
    )
    cos, sin = oracle.cos_sin(ids, rope.inv_freq)
    places = (slots // 4, slots % 4)
    for x, norm, result, scale in (
        (q, q_norm, q_rot, None),
        (k, k_norm, cache.key[places], cache.key_scale),
        (v, v_norm, cache.value[places], cache.value_scale),
    ):
        y, roundings = steps.exactly_normalised(x, norm)
        reach = np.abs(y)
        if x is not v:
            exact = y.copy()
            turned = oracle.rotate(y[..., :rotated], factor * cos, factor * sin, interleaved)
            exact[..., :rotated], reach[..., :rotated] = turned
            y = exact
        if scale is None:
            allowed = steps.allowed_error(y, reach, roundings, result.dtype, factor)
            error = np.abs(result.astype(np.float64) - y)
        else:
            steps_of_rows = scale[places].astype(np.float64)[..., None]
            # Half a step, and the roundings of the scale, of 127 / max|x| and of the product.
            allowed = steps.allowed_error(y, reach, roundings, np.dtype("float32"), factor)
            allowed += (0.5 + 127 * 4 * steps.UNIT) * steps_of_rows
            error = np.abs(result * steps_of_rows - y)
        assert (error <= allowed).all(), (error / allowed).max()


# A row of a value, for each edge of quantisation: its int8 elements and its scale.
LEAST = 2.0**-120
EDGES = {
    "zeros": ([0.0, -0.0, 0.0], [0, 0, 0], 0.0),
    "just below the least": ([np.nextafter(np.float32(LEAST), np.float32(0)), 0, 0], [0, 0, 0], 0),
    "the least": ([LEAST, -LEAST / 2, 0], [127, -64, 0], np.float32(LEAST) / np.float32(127)),
    "subnormal": ([1e-45, 0, 0], [0, 0, 0], 0.0),
    "the largest": (
        [np.finfo(np.float32).max, -np.finfo(np.float32).max, 0],
        [127, -127, 0],
        np.finfo(np.float32).max / np.float32(127),
    ),
    "NaN": ([1.0, np.nan, -2.0], [0, 0, 0], np.nan),
    "negative NaN": ([1.0, -np.nan, -2.0], [0, 0, 0], np.nan),
    "NaN with low bits": ([1.0, np.uint32(0x7FC000AB).view(np.float32)], [0, 0], np.nan),
    "ties": ([127, 0.5, -1.5, 2.5], [127, 0, -2, 2], 1.0),
    "infinity": ([1.0, np.inf, -2.0], [0, 0, 0], np.nan),
    "-infinity": ([-np.inf, 1.0, -2.0], [0, 0, 0], np.nan),
}


@pytest.mark.parametrize("where", [0, 70, 130], ids=["of 64", "of 8", "single"])
@pytest.mark.parametrize(("row", "integers", "scale"), EDGES.values(), ids=EDGES)
def test_edges_of_quantisation(row, integers, scale, where):
    """The same in keys at position 0 and in values, wherever the elements are in the row."""
    plan = RotaryEmbedding(134).plan([0], layout="thd")
    cache = empty_cache(np.int8, width=134)
    x = np.zeros((1, 2, 134), np.float32)
    x[0, 0, where : where + len(row)] = row
    x[0, 1, 5] = 1.0
    plan.append(np.ones_like(x), x, x, cache, [6])
    for array, scales in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        expected = np.zeros(134, np.int8)
        expected[where : where + len(row)] = integers
        assert array[1, 2, 0].tolist() == expected.tolist()
        assert np.array_equal(scales[1, 2], np.float32([scale, 1 / np.float32(127)]), True)
        assert array[1, 2, 1].max() == 127  # the other head is not touched by the first


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_special_numbers_stay_in_their_rows(dtype, cache_dtype, interleaved, rng):
    """NaN, infinity, zeros, subnormal and the largest numbers, with and without norms."""
    for _ in range(4):
        call = cases.Call(rng, dtype, cache_dtype, interleaved)
        info = steps.ml_dtypes.finfo(call.dtype)
        special = [np.nan, np.inf, -np.inf, 0, -0.0, float(info.max), float(info.smallest_normal)]
        for x in call.values:
            rows = rng.random(x.shape[:3]) < 0.3
            places = rows[..., None] & (rng.random(x.shape) < 0.2)
            with np.errstate(over="ignore"):
                x[places] = rng.choice(special, places.sum()).astype(call.dtype)
            x[rng.random(x.shape[:3]) < 0.1] = 0
        with np.errstate(all="ignore"):
            expected = call.expect()
        steps.assert_same_bits(call.run(), expected, call.text)
        call.caches.check(call.text)


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_values_without_a_norm_are_copied(dtype, rng):
    """Every number but subnormal bfloat16 ones, which are stored as zero like all results."""
    plan = RotaryEmbedding(4).plan(np.arange(64), layout="thd")
    v = rng.integers(0, 2**16, (64, 2, 66)).astype(np.uint16).view(np.int16)
    v = v.astype(np.int32).astype(np.float32) if dtype == "float32" else v.view(DTYPES[dtype])
    cache = empty_cache(DTYPES[dtype], pages=16, width=4, value_dim=66)
    q = np.zeros((64, 2, 4), DTYPES[dtype])
    plan.append(q, q, v, cache, np.arange(64))
    expected = steps.stored(v.astype(np.float32), DTYPES[dtype])
    steps.assert_same_bits(cache.value.reshape(v.shape), expected)


@pytest.mark.parametrize(("dtype", "cache_dtype"), [("float32", "int8"), ("bfloat16", "bfloat16")])
def test_any_number_of_threads_gives_the_same_bits(dtype, cache_dtype, monkeypatch, rng):
    """Many elements are shared out among threads."""
    tokens, heads, kv_heads, width = 509, 12, 4, 64
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(48), head_dim=width)
    plan = rope.plan(rng.integers(0, 5000, tokens), layout="thd")
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (cases.noise(rng, (tokens, count, width), DTYPES[dtype]) for count in counts)
    assert q.size + k.size + v.size >= 2**19
    slots = cases.draw_slots(rng, 640, (tokens,))
    norm = rope_cpu.RMSNorm(rng.standard_normal(width))
    results = []
    for count in (1, 2, 3, 7):
        monkeypatch.setattr(threads, "limit", count)
        cache = empty_cache(DTYPES[cache_dtype], pages=40, page_size=16, heads=4, width=width)
        q_rot = plan.append(q, k, v, cache, slots, q_norm=norm, k_norm=norm)
        arrays = (q_rot, cache.key, cache.value, cache.key_scale, cache.value_scale)
        results.append([x.tobytes() for x in arrays if x is not None])
    assert all(result == results[0] for result in results)
    expected = plan.rotate(steps.normalised(q.astype(np.float32), Norm(norm.weight)))
    steps.assert_same_bits(q_rot, steps.stored(expected, DTYPES[dtype]))


def test_a_batch_gives_the_slots_of_packed_tokens(rng):
    """One step of two sequences that prefill and decode, one that is idle; page 0 is a page."""
    batch = rope_cpu.Batch(
        seq_lens=[5, 9, 7], query_lens=[5, 1, 0], page_table=[[3, 0], [2, 5], [1, 4]], page_size=8
    )
    plan = RotaryEmbedding(16).plan(batch.cache_position, layout="thd")
    q = cases.noise(rng, (6, 4, 16), np.float32)
    k, v = (cases.noise(rng, (6, 2, 16), np.float32) for _ in "kv")
    by_batch = empty_cache(np.float32, pages=6, page_size=8)
    by_slots = empty_cache(np.float32, pages=6, page_size=8)
    q_rot = plan.append(q, k, v, by_batch, batch)
    assert np.array_equal(q_rot, plan.append(q, k, v, by_slots, batch.slot_mapping))
    assert np.array_equal(by_batch.key, by_slots.key)
    assert np.array_equal(by_batch.value, by_slots.value)
    assert np.array_equal(by_batch.key[3, :5], plan.rotate(k)[:5])
    assert np.array_equal(by_batch.value[5, 0], v[5])
    assert not by_batch.value[[0, 1, 2, 4]].any()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_no_tokens(layout):
    """A step without tokens writes nothing, and returns no queries."""
    plan = RotaryEmbedding(16).plan([], layout=layout)
    cache = empty_cache(np.float32)
    batch = rope_cpu.Batch(seq_lens=[4, 0], query_lens=[0, 0], page_table=[[1], [-1]], page_size=4)
    q = cases.in_layout(np.zeros((1, 0, 4, 16), np.float32), layout)
    k = cases.in_layout(np.zeros((1, 0, 2, 16), np.float32), layout)
    slots = [] if layout == "thd" else np.zeros((1, 0), int)
    for given in (slots, batch)[: 1 + (layout == "thd")]:
        for out in (None, q):
            result = plan.append(q, k, k, cache, given, out=out)
            assert result.shape == q.shape
            assert result.dtype == q.dtype
    assert not cache.key.any()


def test_what_fits_the_kernel_is_not_copied(monkeypatch, rng):
    """Views of a projection, any paging, in place or not."""
    monkeypatch.setattr(append, "_append_copies", None)
    for paging in cases.PAGINGS:
        caches = cases.Caches(rng, "int8", paging, "heads first", (3, 4, 2, 16, 16))
        for layout in cases.LAYOUTS:
            values = [cases.noise(rng, (1, 5, heads, 16), np.float32) for heads in (4, 2, 2)]
            q, k, v = (cases.in_layout(x, layout) for x in cases._projection(values))
            plan = RotaryEmbedding(16).plan(np.arange(5), layout=layout)
            slots = np.arange(5) if layout == "thd" else np.arange(5)[None]
            plan.append(q, k, v, caches.cache, slots)
            plan.append(q, k, v, caches.cache, slots, out=q)


def test_python_threads_append_to_different_slots_of_one_cache(rng):
    rope = RotaryEmbedding(64)
    counts = (8, 2, 2)
    steps_of_threads = []
    for number in range(4):
        values = [cases.noise(rng, (40, count, 64), np.float32) for count in counts]
        plan = rope.plan(rng.integers(0, 999, 40), layout="thd")
        steps_of_threads.append((plan, values, rng.permutation(40) * 4 + number))

    def append_all(cache, plan, values, slots):
        for _ in range(20):
            q_rot = plan.append(*values, cache, slots)
        return q_rot

    serially = empty_cache(np.int8, 10, 16, width=64)
    at_once = empty_cache(np.int8, 10, 16, width=64)
    expected = [append_all(serially, *step) for step in steps_of_threads]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda step: append_all(at_once, *step), steps_of_threads))
    for result, right in zip(results, expected, strict=True):
        assert np.array_equal(result, right)
    for name in ("key", "value", "key_scale", "value_scale"):
        assert np.array_equal(getattr(at_once, name), getattr(serially, name))


def test_plans_of_lengths_and_pickled_plans_append(rng):
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    rope = RotaryEmbedding(16, scaling=scaling, max_position_embeddings=4).at_length(9)
    plan = rope.plan([7, 8], layout="thd")
    q = cases.noise(rng, (2, 2, 16), np.float32)
    for used in (plan, steps.pickled(plan)):
        cache = empty_cache(np.float32)
        used.append(q, q, q, cache, [0, 1])
        assert np.array_equal(cache.key[0, :2], rope.rotate(q, [7, 8], layout="thd"))


def test_queries_share_memory_with_keys_or_values(rng):
    """q, k and v may be one array: they are only read."""
    plan = RotaryEmbedding(16).plan(np.arange(3), layout="thd")
    x = cases.noise(rng, (3, 2, 16), np.float32)
    cache = empty_cache(np.float32)
    assert np.array_equal(plan.append(x, x, x, cache, [0, 1, 2]), plan.rotate(x))
    assert np.array_equal(cache.value[0, :3], x)
