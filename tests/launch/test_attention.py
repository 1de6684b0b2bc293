"""rope_cpu.attention: against float64, its bits, and memory that it must not read."""

import gc
import weakref

import numpy as np
import pytest
from launch import attending, steps
from launch.attending import Call, Options
from launch.steps import CACHE_DTYPES, DTYPES

import rope_cpu
from rope_cpu.kernels import threads
from rope_cpu.kernels.attention import RANGE
from rope_cpu.launch import attention as module

parametrize_cache_dtypes = pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)

# (kv_heads, query heads of each): 4, 1, 3 and 2 tokens in four rows, some of them in part.
parametrize_heads = pytest.mark.parametrize("heads", [(2, 1), (1, 4), (2, 3), (1, 10)])


def fixed_call(rng, cache_dtype="float32", lengths=(700, 40, 0, 300), new=(1, 40, 0, 7), **changes):
    """Return a call with a decode step, a prompt, a sequence without tokens, and a chunk."""
    arguments = {
        "page_size": 16,
        "heads": (2, 3),
        "widths": (64, 64),
        "options": Options(),
        **changes,
    }
    return Call(rng, cache_dtype, lengths, new, **arguments)


@parametrize_cache_dtypes
def test_results_are_those_of_float64(cache_dtype, rng):
    """Of what the cache holds: its dtype adds no error. Memory beside the keys holds NaN."""
    for _ in range(40):
        call = attending.draw(rng, cache_dtype)
        call.check(call.run(**attending.draw_paging(rng, call)))


@parametrize_cache_dtypes
def test_tokens_of_one_slot_attend_to_all_keys(cache_dtype, rng):
    """Each new token is a sequence of its own, with the length and the pages of all of them."""
    call = fixed_call(rng, cache_dtype)
    cache, causal = call.place()
    both_ways = rope_cpu.Batch(
        seq_lens=np.repeat(causal.seq_lens, call.new),
        query_lens=np.ones(len(call.q), int),
        page_table=np.repeat(causal.page_table, call.new, axis=0),
        page_size=causal.page_size,
    )
    pairs = zip(call.sequences(), call.new, strict=True)
    sequences = [sequence._replace(new=1) for sequence, new in pairs for _ in range(new)]
    error = np.abs(call.run(cache, both_ways) - attending.exactly(call.q, sequences, call.options))
    assert error.max() <= attending.TOLERANCE * call.largest()


@parametrize_cache_dtypes
def test_large_scores_stay_within_the_bound(cache_dtype, rng):
    """Queries scaled until the first sequence has a score of 16."""
    call = fixed_call(rng, cache_dtype, options=Options(softcap=50.0))
    scores = np.einsum("qhd,khd->hqk", call.q, np.repeat(call.sequences()[0].keys, 3, axis=1)) / 8
    call.q *= 16 / np.abs(scores).max()
    error = np.abs(call.run() - call.expected()).max() / call.largest()
    assert 0 < error <= attending.bound(call.q, call.sequences(), call.options)


@pytest.mark.parametrize("keys", [RANGE, 40 * RANGE])
def test_errors_that_add_up_stay_within_the_bound(keys):
    """One key far above others, whose values are lost one by one in the sum.

    The order of the additions to a value is fixed, so the error is the same on every processor.
    """
    k = np.zeros((1, keys, 1, 16), np.float32)
    k[0, 0, 0, 0] = 1
    v = np.ones((1, keys, 1, 16), np.float32)
    q = np.zeros((1, 1, 16), np.float32)
    q[..., 0] = 4 * 16.6
    cache = rope_cpu.KVCache(k, v)
    batch = rope_cpu.Batch(seq_lens=[keys], query_lens=[1], page_table=[[0]], page_size=keys)
    error = np.abs(rope_cpu.attention(q, cache, batch) - 1).max()
    sequences = [attending.Sequence(k[0].astype(np.float64), v[0], 1)]
    assert attending.TOLERANCE < error <= attending.bound(q, sequences, Options())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_queries_give_results_rounded_once(dtype, rng):
    call = fixed_call(rng)
    cache, batch = call.place()
    q = call.q.astype(DTYPES[dtype])
    y = rope_cpu.attention(q, cache, batch)
    assert y.dtype == DTYPES[dtype]
    call.q = q.astype(np.float32)
    steps.assert_same_bits(y, call.run(cache, batch).astype(DTYPES[dtype]))


@parametrize_cache_dtypes
def test_bits_do_not_depend_on_threads(cache_dtype, monkeypatch, rng):
    """A thread takes single heads, or where there are many items, as in the last call, items."""
    monkeypatch.setattr(module, "_PARALLEL_FROM", 0)
    calls = [attending.draw(rng, cache_dtype) for _ in range(3)]
    calls.append(fixed_call(rng, cache_dtype, lengths=(25 * RANGE, 300), new=(1, 7)))
    for call in calls:
        placed = call.place()
        results = []
        for count in (1, 2, 3, 7):
            monkeypatch.setattr(threads, "limit", count)
            results.append(call.run(*placed).tobytes())
        assert len(set(results)) == 1


@parametrize_cache_dtypes
def test_bits_do_not_depend_on_paging(cache_dtype, rng):
    for _ in range(3):
        call = attending.draw(rng, cache_dtype)
        results = {
            call.run(page_size=size, **attending.draw_paging(rng, call)).tobytes()
            for size in (1, 3, 16, 100, 1000)
        }
        assert len(results) == 1


@parametrize_cache_dtypes
def test_bits_do_not_depend_on_other_sequences(cache_dtype, rng):
    call = fixed_call(rng, cache_dtype, options=Options(window=200, softcap=20.0))
    whole = call.run()
    starts = np.cumsum([0, *call.new])
    for row, new in enumerate(call.new):
        alone = fixed_call(
            rng,
            cache_dtype,
            [call.lengths[row]],
            [new],
            options=call.options,
            page_size=50,
        )
        tokens = slice(starts[row], starts[row + 1])
        alone.q = call.q[tokens]
        alone.stored = [call.stored[row]]
        steps.assert_same_bits(alone.run(), whole[tokens])


@parametrize_heads
@pytest.mark.parametrize("window", [None, 2, 70])
def test_bits_do_not_depend_on_chunks(window, heads, rng):
    """A prompt in one step, in chunks, and token by token; chunks of any size share tiles."""
    options = {"heads": heads, "options": Options(window=window)}
    call = fixed_call(rng, lengths=[2 * RANGE + 30], new=[2 * RANGE + 30], **options)
    whole = call.run()
    for size in (1, 5, 64):
        for stop in range(size, len(whole), 97):
            chunk = fixed_call(rng, lengths=[stop], new=[min(size, stop)], **options)
            tokens = slice(stop - min(size, stop), stop)
            chunk.q = call.q[tokens]
            chunk.stored = [[(x[:stop], None) for x, _ in call.stored[0]]]
            steps.assert_same_bits(chunk.run(), whole[tokens])


@parametrize_cache_dtypes
@parametrize_heads
@pytest.mark.parametrize("window", [None, 1, 6])
def test_nan_reaches_the_tokens_that_attend_to_it_alone(cache_dtype, heads, window, rng):
    """One key or value of a chunk of 20 is NaN, which for int8 is its scale."""
    options = {"heads": heads, "options": Options(window=window), "page_size": 5}
    call = fixed_call(rng, cache_dtype, [RANGE + 10], [20], **options)
    finite = call.run()
    for which, new in ((0, 0), (1, 7), (0, 19), (1, 19)):
        key = RANGE + 10 - 20 + new
        vectors, scales = call.stored[0][which]
        target = vectors if scales is None else scales
        kept = target[key].copy()
        target[key] = np.nan
        result = call.run()
        target[key] = kept
        token = np.arange(20)
        attends = (token >= new) & (token < new + (window or 20))
        assert np.isnan(result[attends]).all()
        steps.assert_same_bits(result[~attends], finite[~attends])


UNSEEN = {"no options": Options(), "softcap": Options(softcap=30.0), "window": Options(window=9)}


def with_scores_of_minus_infinity(rng, cache_dtype, options):
    """Return a call whose products of queries and keys lie beyond float32."""
    call = fixed_call(rng, cache_dtype, options=options)
    call.q[...] = 3e38
    for pair in call.stored:
        keys, scales = pair[0]
        keys[...] = -100
        if scales is not None:
            scales[...] = 1
    return call


@parametrize_cache_dtypes
@pytest.mark.parametrize("options", UNSEEN.values(), ids=UNSEEN)
def test_scores_of_minus_infinity_weigh_the_same(cache_dtype, options, rng):
    call = with_scores_of_minus_infinity(rng, cache_dtype, options)
    result = iter(call.run())
    for _, values, new in call.sequences():
        for stop in range(len(values) - new + 1, len(values) + 1):
            seen = values[max(0, stop - (options.window or stop)) : stop]
            error = np.abs(next(result) - np.repeat(seen.mean(axis=0), 3, axis=0))
            # The roundings of a sum of as many values, and of the quotient.
            assert (error <= (len(seen) + 1) * 2.0**-24 * np.abs(seen).max()).all()


@parametrize_cache_dtypes
def test_a_score_of_minus_infinity_weighs_nothing_beside_others(cache_dtype, rng):
    call = with_scores_of_minus_infinity(rng, cache_dtype, Options())
    for pair in call.stored:
        if len(pair[0][0]):
            pair[0][0][0] = 0  # the first key of a sequence, whose score is 0
    expected = [np.repeat(s.values[:1], s.new, axis=0) for s in call.sequences()]
    expected = np.repeat(np.concatenate(expected), 3, axis=1).astype(np.float32)
    others = call.lengths.max() * np.exp(-87.0) * call.largest()  # the least weight of each
    assert (np.abs(call.run() - expected) <= others).all()


def test_nan_beside_scores_of_minus_infinity(rng):
    call = with_scores_of_minus_infinity(rng, "float32", Options())
    for pair in call.stored:
        pair[0][0][:1] = np.nan
    assert np.isnan(call.run()).all()


@pytest.mark.parametrize(
    "dtype", [pytest.param(np.dtype(name), id=str(name)) for name in ("f4", "f2")]
)
def test_a_signalling_nan_of_a_query_does_not_warn(dtype, rng):
    """Its token alone is NaN. Warnings are errors in tests."""
    call = fixed_call(rng)
    cache, batch = call.place()
    q = call.q.astype(dtype)
    finite = rope_cpu.attention(q, cache, batch)
    q[5].view(f"u{dtype.itemsize}")[...] = {"f4": 0x7FA00000, "f2": 0x7D00}[dtype.str[1:]]
    result = rope_cpu.attention(q, cache, batch)
    assert np.isnan(result[5]).all()
    steps.assert_same_bits(np.delete(result, 5, axis=0), np.delete(finite, 5, axis=0))


@parametrize_cache_dtypes
def test_read_only_caches_are_attended_to(cache_dtype, rng):
    """A mapped prefix, for example."""
    call = fixed_call(rng, cache_dtype)
    cache, batch = call.place()
    frozen = [None if x is None else x.view() for x in cache._caller_arrays]
    for x in frozen:
        x.flags.writeable = False
    scales = dict(zip(("key_scale", "value_scale"), frozen[2:], strict=False))
    read_only = rope_cpu.KVCache(*frozen[:2], **scales)
    steps.assert_same_bits(call.run(read_only, batch), call.run(cache, batch))


def test_the_work_of_a_batch_dies_with_it(rng):
    call = fixed_call(rng)
    cache, batch = call.place()
    call.run(cache, batch)
    work = weakref.ref(module._work(batch, call.lengths.max(), 3).items)
    del batch
    gc.collect()
    assert work() is None


def of_another_shape(array):
    array.shape = (array.size, *[1] * (array.ndim - 1))


def of_another_dtype(array):
    array.dtype = np.int32


@pytest.mark.filterwarnings("ignore:Setting the (shape|dtype):DeprecationWarning")  # NumPy 2.5
@pytest.mark.parametrize("change", [of_another_shape, of_another_dtype])
@pytest.mark.parametrize("called", [False, True], ids=["before a call", "between two calls"])
def test_changes_of_a_batchs_arrays_do_not_reach_the_kernel(called, change, rng):
    call = fixed_call(rng)
    cache, batch = call.place()
    expected = call.run(*call.place())
    if called:
        call.run(cache, batch)
    for name in ("seq_lens", "query_lens", "page_table", "cache_position", "cu_seqlens"):
        change(getattr(batch, name))
        with pytest.raises(ValueError, match="WRITEABLE"):
            getattr(batch, name).flags.writeable = True
    change(batch.slot_mapping)
    steps.assert_same_bits(call.run(cache, batch), expected)


def test_a_window_of_one_gives_the_value_itself(rng):
    call = fixed_call(rng, options=Options(window=1))
    result = call.run()
    values = np.concatenate(
        [pair[1][0][len(pair[1][0]) - n :] for pair, n in zip(call.stored, call.new, strict=True)]
    )
    steps.assert_same_bits(result, np.repeat(values, 3, axis=1))


def test_sinks_take_their_share(rng):
    """A sink far above the scores takes all, and one far below nothing."""
    call = fixed_call(rng)
    plain = call.run()
    call.options = Options(sinks=np.full(6, -1e4))
    steps.assert_same_bits(call.run(), plain)
    call.options = Options(sinks=np.full(6, 1e4))
    assert np.abs(call.run()).max() < 1e-30
    # A token that sees its own key alone, beside a sink of the same score: half each.
    call = fixed_call(rng, lengths=[1], new=[1])
    score = call.q[0] * np.repeat(call.stored[0][0][0][0], 3, axis=0)
    call.options = Options(sinks=score.sum(axis=-1) / 8)
    half = np.repeat(call.stored[0][1][0][0], 3, axis=0) / 2
    assert np.abs(call.run()[0] - half).max() <= attending.TOLERANCE * call.largest()


def test_large_scores(rng):
    """Scores far beyond the range of e^x: one key takes all the weight."""
    call = fixed_call(rng, lengths=[600], new=[1])
    call.q *= 1e4
    keys = call.stored[0][0][0]
    largest = np.einsum("hd,khd->hk", call.q[0].astype(np.float64), np.repeat(keys, 3, axis=1))
    best = largest.argmax(axis=1)
    values = call.stored[0][1][0][best, np.arange(6) // 3]
    assert np.abs(call.run()[0] - values).max() <= attending.TOLERANCE * call.largest()


@pytest.mark.parametrize("softcap", [1e-3, 1.0, 1e4])
def test_softcaps_of_any_size(softcap, rng):
    call = fixed_call(rng, options=Options(softcap=softcap))
    call.check(call.run())


def test_no_tokens(rng):
    for lengths, new in (([], []), ([0, 0], [0, 0]), ([5], [0])):
        call = fixed_call(rng, lengths=lengths, new=new)
        out = np.empty((0, 6, 64), np.float32)
        assert call.run().shape == (0, 6, 64)
        cache, batch = call.place()
        assert rope_cpu.attention(call.q, cache, batch, out=out) is out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_out_and_queries_may_have_any_strides(dtype, rng):
    call = fixed_call(rng, widths=(64, 48))
    cache, batch = call.place()
    q = call.q.astype(DTYPES[dtype])
    expected = rope_cpu.attention(q, cache, batch)
    tokens, heads, width = q.shape
    wide = np.zeros((heads, tokens, 2 * width), q.dtype)
    view = wide[::-1, :, ::2].transpose(1, 0, 2)
    view[...] = q
    buffer = np.zeros((heads, 48, tokens + 1), q.dtype)
    out = buffer.transpose(2, 0, 1)[1:]
    assert rope_cpu.attention(view, cache, batch, out=out) is out
    steps.assert_same_bits(out, expected)
    assert not buffer[:, :, 0].any()


def test_the_error_state_of_numpy_does_not_matter(rng):
    """Queries times a scale may overflow, or fall below the smallest float32."""
    call = fixed_call(rng)
    placed = call.place()
    for scale in (1e-40, 3e38):
        call.options = Options(scale=scale)
        expected = call.q.astype(np.float64) * scale
        assert (np.abs(expected) > np.finfo(np.float32).max).any() == (scale > 1)
        with np.errstate(all="raise"):
            call.run(*placed)
