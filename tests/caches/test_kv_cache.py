"""KVCache: views of the server's arrays, checked once; nothing is copied."""

import copy
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from launch import cases, steps
from launch.steps import CACHE_DTYPES, DTYPES

import rope_cpu
from rope_cpu import KVCache


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("paging", cases.PAGINGS)
def test_arrays_are_those_of_the_server(dtype, paging, rng):
    caches = cases.Caches(rng, dtype, paging, "halves", (5, 3, 2, 8, 8))
    cache = caches.cache
    for name, array in zip(
        ("key", "value", "key_scale", "value_scale"), caches.of(caches.arrays), strict=True
    ):
        held = getattr(cache, name)
        if array is None:
            assert held is None
            continue
        assert held.__array_interface__ == array.__array_interface__
    assert cache.dtype == DTYPES[dtype]
    assert (cache.pages, cache.page_size, cache.kv_heads) == (5, 3, 2)
    assert repr(cache) == (
        f"KVCache({dtype}, pages=5, page_size=3, kv_heads=2, head_dim=8, value_dim=8)"
    )
    caches.check()  # nothing was written


def test_a_memory_map_is_a_cache(tmp_path):
    key = np.memmap(tmp_path / "key", np.float32, "w+", shape=(2, 4, 2, 8))
    value = np.memmap(tmp_path / "value", np.float32, "w+", shape=(2, 4, 2, 8))
    x = np.ones((1, 2, 8), np.float32)
    plan = rope_cpu.RotaryEmbedding(8).plan([3], layout="thd")
    plan.append(x, x, x, KVCache(key, value), [5])
    assert np.array_equal(key[1, 1], plan.rotate(x)[0])
    assert np.array_equal(value[1, 1], x[0])
    assert not key[0].any()


# As large as servers' caches: (pages, 2, page_size, heads, width) and more, as shape and strides.
LARGE = {
    "halves": ((2, 2**17, 16, 8, 128), (0, 1, 2, 3, 4)),
    "halves of pages": ((2**17, 2, 16, 8, 128), (1, 0, 2, 3, 4)),
    "halves of tokens": ((2**17, 16, 2, 8, 128), (2, 0, 1, 3, 4)),
    "halves of heads": ((2**17, 16, 8, 2, 128), (3, 0, 1, 2, 4)),
    "heads first": ((2**17, 2, 8, 16, 128), (1, 0, 3, 2, 4)),
    "layers outside": ((2**17, 61, 2, 16, 128), (2, 0, 3, 1, 4)),
}


@pytest.mark.parametrize(("shape", "order"), LARGE.values(), ids=LARGE)
def test_large_caches_are_not_taken_for_overlapping_ones(shape, order):
    """The memory does not exist: a cache is checked by its addresses alone."""
    strides = np.cumprod([2, *shape[:0:-1]])[::-1]
    whole = np.lib.stride_tricks.as_strided(np.zeros(1, np.float16), shape, strides)
    key, value = whole.transpose(order)[:2]
    assert KVCache(key, value).pages == key.shape[0]


def test_caches_are_immutable():
    cache = KVCache(*np.zeros((2, 2, 3, 4, 8), np.float32))
    for name in ("key", "value_scale", "pages", "head_dim", "value_dim", "other"):
        with pytest.raises(AttributeError, match=f"cannot assign to field '{name}'"):
            setattr(cache, name, 1)
        with pytest.raises(AttributeError, match=f"cannot delete field '{name}'"):
            delattr(cache, name)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("paging", cases.PAGINGS)
def test_copies_and_pickles(dtype, paging, rng):
    """A copy has the same arrays; a deep copy and a pickled cache have new ones, heads first."""
    caches = cases.Caches(rng, dtype, paging, "heads first", (2, 3, 2, 8, 8))
    cache = caches.cache
    assert copy.copy(cache).key is cache.key
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert repr(again) == repr(cache)
        for name in ("key", "value", "key_scale", "value_scale"):
            array = getattr(cache, name)
            if array is not None:
                copied = getattr(again, name)
                steps.assert_same_bits(copied, array)
                assert not np.shares_memory(copied, array)
                assert copied.swapaxes(1, 2).flags.c_contiguous
                assert copied.ctypes.data % 64 == 0
                copied[...] = 1  # raises if it is read-only


@pytest.mark.parametrize("again", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copied_value_is_a_part_of_its_key_again(again, rng):
    key = rng.standard_normal((5, 4, 1, 40)).astype(np.float32)
    copied = again(KVCache(key, key[..., 3:35]))
    copied.key[...] += 1
    assert np.array_equal(copied.value, copied.key[..., 3:35])
    plan = rope_cpu.RotaryEmbedding(40).plan([3], layout="thd")
    x = np.ones((1, 1, 40), np.float32)
    with pytest.raises(ValueError, match=r"`cache\.value` is read-only"):
        plan.append(x, x, x[..., :32], copied, [0])


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # of NumPy 2.5
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_new_shape_of_the_arrays_does_not_reach_the_cache(dtype, rng):
    caches = cases.Caches(rng, dtype, "pages", "pages", (2, 3, 2, 8, 8))
    arrays = caches.of(caches.arrays)
    scales = dict(zip(("key_scale", "value_scale"), arrays[2:], strict=True))
    cache = KVCache(*arrays[:2], **scales)
    batch = rope_cpu.Batch(seq_lens=[6], query_lens=[6], page_table=[[1, 0]], page_size=3)
    plan = rope_cpu.RotaryEmbedding(8).plan(batch.cache_position, layout="thd")
    q, k, v = rng.standard_normal((3, 6, 2, 8)).astype(np.float32)

    def step():
        return rope_cpu.attention(plan.append(q, k, v, cache, batch), cache, batch)

    expected = step()
    for array in arrays:
        if array is not None:
            array.shape = array.shape[::-1]
    steps.assert_same_bits(step(), expected)
    assert (cache.pages, cache.page_size) == (2, 3)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_new_caches_have_heads_first_on_cache_lines(dtype):
    caches = KVCache.zeros(5, 3, 2, 8, dtype=DTYPES[dtype], value_dim=7, layers=4)
    assert [repr(cache) for cache in caches] == [
        f"KVCache({dtype}, pages=5, page_size=3, kv_heads=2, head_dim=8, value_dim=7)"
    ] * 4
    arrays = [x for cache in caches for x in (cache.key, cache.value)]
    arrays += [x for c in caches for x in (c.key_scale, c.value_scale) if x is not None]
    for array in arrays:
        assert array.swapaxes(1, 2).flags.c_contiguous
        assert array.ctypes.data % 64 == 0
        assert not array.any()
        array[...] = 1  # raises if it is read-only; a later array that shares it is not zero


def test_a_new_cache_takes_no_memory_before_it_is_written():
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        pytest.skip("only Linux says how much memory a process has")

    def resident():
        return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = KVCache.zeros(1024, 16, 8, 128, dtype=np.float32)
    assert cache.key.nbytes == 2**26
    assert resident() - before < 2**24


@pytest.mark.parametrize("start", [0, 3, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_value_may_be_a_part_of_its_key(dtype, start, rng):
    key = rng.standard_normal((5, 4, 1, 40)).astype(DTYPES[dtype])
    cache = KVCache(key, key[..., start : start + 32])
    apart = KVCache(key.copy(), cache.value.copy())
    batch = rope_cpu.Batch(seq_lens=[14], query_lens=[9], page_table=[[4, 0, 2, 1]], page_size=4)
    q = rng.standard_normal((9, 6, 40)).astype(np.float32)
    result = rope_cpu.attention(q, cache, batch)
    steps.assert_same_bits(result, rope_cpu.attention(q, apart, batch))
    moves = rope_cpu.RotaryEmbedding(40).shift_plan(3, layout="thd")
    moves.rotate_cached(cache, batch.slot_mapping)
    moves.rotate_cached(apart, batch.slot_mapping)
    steps.assert_same_bits(cache.key, apart.key)


def test_append_refuses_a_value_that_is_a_part_of_its_key():
    key = np.zeros((5, 4, 1, 40), np.float32)
    cache = KVCache(key, key[..., 8:])
    plan = rope_cpu.RotaryEmbedding(40).plan([3], layout="thd")
    x = np.ones((1, 1, 40), np.float32)
    text = "^`cache.value` is read-only; .* a value no part of its key"
    for q in (x, np.asfortranarray(x)):
        with pytest.raises(ValueError, match=text):
            plan.append(q, x, x[..., 8:], cache, [0])
    assert not key.any()


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


SHAPE = (2, 3, 4, 8)
KEY = zeros(*SHAPE)
INT8 = zeros(*SHAPE, dtype=np.int8)
SCALE = zeros(*SHAPE[:3])
BUFFER = zeros(2, 3, 5, 8)
LONG = zeros(2000)
INT4 = zeros(*SHAPE[:3], 32, dtype="u1")
LATENT = zeros(3, 3, 4, 8)


def strided(strides, shape=SHAPE):
    return np.lib.stride_tricks.as_strided(LONG, shape, strides)


REFUSED = [
    (lambda: KVCache(np.ma.array(KEY), KEY), TypeError, "`key` is a masked array"),
    (lambda: KVCache(zeros(*SHAPE, dtype="f8"), KEY), TypeError, "`key` has dtype float64; .*int8"),
    (lambda: KVCache(KEY.astype(">f4"), KEY), TypeError, "`key` has dtype >f4.*native byte order"),
    (lambda: KVCache(zeros(*SHAPE, dtype="u1"), KEY), TypeError, "`key` has dtype uint8"),
    (lambda: KVCache(KEY, zeros(*SHAPE, dtype="i2")), TypeError, "`value` has .* int8, uint8"),
    (lambda: KVCache(zeros(*SHAPE, dtype="int4"), KEY), TypeError, "`key` has dtype int4; .* int8"),
    (lambda: KVCache(KEY, zeros(*SHAPE, dtype="int4")), TypeError, "`value` has .* int8, uint8"),
    (
        lambda: KVCache(KEY, INT4, key_scale=SCALE),
        ValueError,
        "left out, as float32 has no scales",
    ),
    (lambda: KVCache(KEY, zeros(*SHAPE, dtype="u1")), ValueError, "`value` .* multiple of 32"),
    (
        lambda: KVCache(KEY, INT4),
        TypeError,
        r"`value_scale` .*float16 .*2, 3, 4, 2\) for int4",
    ),
    (lambda: four_bits(zeros(*SHAPE[:3], 2)), TypeError, "`value_scale` has dtype float32"),
    (lambda: four_bits(zeros(*SHAPE[:3], dtype="f2")), ValueError, "for int4"),
    (lambda: four_bits(zeros(*SHAPE[:3], 4, dtype="f2")[..., ::2]), ValueError, "contiguous"),
    (lambda: KVCache(KEY, KEY.copy(), hadamard=1), TypeError, "`hadamard` is 1"),
    (
        lambda: KVCache(LATENT, LATENT[..., :6], hadamard=True),
        ValueError,
        "`hadamard` is True, but `value` is a part of `key`",
    ),
    (lambda: KVCache(KEY[0], KEY), ValueError, r"`key` has shape \(3, 4, 8\); .*pages, page_size"),
    (lambda: KVCache(KEY, KEY[None].copy()), ValueError, r"`value` has shape \(1, 2, 3, 4, 8\)"),
    (lambda: KVCache(zeros(0, 3, 4, 8), KEY), ValueError, r"`key` has shape \(0, .*none 0"),
    (lambda: KVCache(zeros(2, 3, 4, 0), KEY), ValueError, r"`key` has shape .*none 0"),
    (lambda: KVCache(KEY, zeros(2, 3, 5, 8)), ValueError, r"`value` has shape \(2, 3, 5, 8\); it"),
    (lambda: KVCache(KEY, zeros(2, 4, 4, 8)), ValueError, r"`value` has shape \(2, 4, 4, 8\); it"),
    (lambda: KVCache(KEY, zeros(1, 3, 4, 8)), ValueError, r"`value` has shape \(1, 3, 4, 8\); it"),
    (lambda: KVCache(zeros(2, 3, 4, 16)[..., ::2], KEY), ValueError, "`key` has strides .*4$"),
    (lambda: KVCache(KEY, KEY[..., ::-1]), ValueError, "`value` has strides .* contiguous"),
    (lambda: KVCache(strided((0, 128, 32, 4)), KEY), ValueError, "`key` has overlapping elements"),
    (lambda: KVCache(KEY, strided((512, 128, 28, 4))), ValueError, "`value` has overlapping"),
    (lambda: KVCache(KEY, KEY), ValueError, "`value` shares memory with `key`"),
    (lambda: KVCache(BUFFER[:, :, :4], BUFFER[:, :, 1:]), ValueError, "`value` shares memory"),
    (lambda: KVCache(LATENT[:2], LATENT[1:, ..., :7]), ValueError, "`value` shares memory with"),
    (lambda: KVCache(LATENT[..., 1:], LATENT[..., :6]), ValueError, "`value` shares memory with"),
    (lambda: KVCache(LATENT[..., :7], LATENT[..., 2:]), ValueError, "`value` shares memory with"),
    (lambda: KVCache(LATENT[..., :6], LATENT), ValueError, "`value` shares memory with `key`"),
    (lambda: KVCache(INT8, INT8.copy()), TypeError, "`key_scale` is a NoneType; .*2, 3, 4"),
    (
        lambda: KVCache(INT8, INT8.copy(), key_scale=SCALE),
        TypeError,
        "`value_scale` is a NoneType; it",
    ),
    (
        lambda: KVCache(KEY, KEY.copy(), key_scale=SCALE),
        ValueError,
        "`key_scale` is given; it must",
    ),
    (lambda: new(pages=0), ValueError, "`pages` is 0; it must be at least 1"),
    (lambda: new(page_size=True), TypeError, "`page_size` is True"),
    (lambda: new(kv_heads=-1), ValueError, "`kv_heads` is -1"),
    (lambda: new(head_dim=8.0), TypeError, "`head_dim` is 8.0"),
    (lambda: new(value_dim=0), ValueError, "`value_dim` is 0"),
    (lambda: new(pages=2**50), ValueError, "`pages` is 1125899906842624: a table .* reduce"),
    (lambda: new(value_dim=2**50), ValueError, "`pages` is 2: a table"),
    (lambda: new(dtype=None), TypeError, "`dtype` is None; it must be one of float32, .*int8"),
    (lambda: new(dtype="f8"), TypeError, "`dtype` is 'f8'"),
    (lambda: new(dtype="int4"), TypeError, "`dtype` is 'int4'; .* bfloat16, int8$"),
    (lambda: new(value_dtype="uint8"), TypeError, "`value_dtype` is 'uint8'; .* int8, int4"),
    (lambda: new(value_dtype="int4"), ValueError, "`value_dim` is 8; .*multiple of 32"),
    (lambda: new(hadamard=None), TypeError, "`hadamard` is None"),
    (lambda: new(dtype=">f4"), TypeError, "`dtype` is '>f4'"),
    (lambda: new(layers=0), ValueError, "`layers` is 0"),
    (lambda: new(layers=2**40), ValueError, "`layers` is 1099511627776"),
    (lambda: scales(np.ma.array(SCALE)), TypeError, "`value_scale` is a masked array"),
    (lambda: scales(zeros(2, 3, 4, dtype="f2")), TypeError, "`value_scale` has dtype float16"),
    (lambda: scales(SCALE.astype(">f4")), TypeError, "`value_scale` has dtype >f4"),
    (lambda: scales(zeros(2, 4, 3)), ValueError, r"`value_scale` has shape .2, 4, 3.; .*2, 3, 4"),
    (lambda: scales(zeros(2, 3, 4, 1)), ValueError, "`value_scale` has shape"),
    (lambda: scales(SCALE), ValueError, "`value_scale` shares memory with `key_scale`"),
    (lambda: scales(strided((0, 0, 0), (2, 3, 4))), ValueError, "`value_scale` has overlapping"),
    (
        lambda: scales(LONG[:24].reshape(2, 3, 4), LONG.view(np.int8)[95:287].reshape(SHAPE)),
        ValueError,
        "`value_scale` shares memory with `key`",
    ),
]


def test_an_axis_of_one_element_is_contiguous():
    scale = zeros(2, 3, 4, dtype="f2")[..., None]
    cache = KVCache(KEY, zeros(2, 3, 4, 16, dtype="u1"), value_scale=scale)
    assert cache.value_dim == 32
    assert KVCache(SCALE[..., None], SCALE.copy()[..., None]).head_dim == 1


def new(**changes):
    sizes = {"pages": 2, "page_size": 3, "kv_heads": 4, "head_dim": 8, "dtype": "float32"}
    return KVCache.zeros(**(sizes | changes))


def four_bits(value_scale):
    return KVCache(KEY, INT4, value_scale=value_scale)


def scales(value_scale, key=INT8):
    return KVCache(key, INT8.copy(), key_scale=SCALE, value_scale=value_scale)


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
    assert not any(x.any() for x in (KEY, INT8, SCALE, BUFFER, LONG))
