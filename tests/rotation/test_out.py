"""Places of inputs and results: any strides, views of one buffer, in place, forbidden overlaps."""

from collections import namedtuple

import numpy as np
import oracle
import pytest
from numpy.lib.stride_tricks import as_strided
from oracle import draw
from refusals import assert_refused, read_only, zeros

from rope_cpu import RotaryEmbedding
from rope_cpu.launch import rotate as launches


def strided_views(x, rng):
    """The same values behind unusual strides."""
    wide = np.zeros((*x.shape[:-1], x.shape[-1] * 2), x.dtype)
    wide[..., ::2] = x
    gaps = np.zeros((x.shape[0], x.shape[1], x.shape[2] * 3, x.shape[3] + 5), x.dtype)
    gaps[:, :, 1::3, 2 : 2 + x.shape[3]] = x
    raw = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = raw[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "last axis not contiguous": wide[..., ::2],
        "gaps": gaps[:, :, 1::3, 2 : 2 + x.shape[3]],
        "backwards": np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
        "last axis backwards": np.ascontiguousarray(x[..., ::-1])[..., ::-1],
        "transposed": np.ascontiguousarray(x.transpose(3, 1, 0, 2)).transpose(2, 1, 3, 0),
        "unaligned": unaligned,
        "read-only": frozen,
        "Fortran": np.asfortranarray(x),
    }


def test_any_strides(dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(48), head_dim=50, interleaved=interleaved)
    q, k = draw(rng, (2, 7, 4, 50), dtype), draw(rng, (2, 7, 2, 50), dtype)
    plan = rope.plan(np.arange(7))
    plain_q, plain_k = plan(q, k)
    for (name, view_q), view_k in zip(
        strided_views(q, rng).items(), strided_views(k, rng).values(), strict=True
    ):
        result_q, result_k = plan(view_q, view_k)
        assert result_q.tobytes() == plain_q.tobytes(), name
        assert result_k.tobytes() == plain_k.tobytes(), name
        if view_q.flags.writeable:
            untouched = view_k.copy()
            assert plan.rotate(view_q, out=view_q) is view_q
            assert np.array_equal(view_q, plain_q), name
            assert np.array_equal(view_k, untouched), name
            target = strided_views(np.zeros_like(k), rng)[name]
            assert plan.rotate(k, out=target) is target
            assert np.array_equal(target, plain_k), name


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_views_of_one_packed_buffer(layout, tokens, dtype, rng):
    heads, kv_heads, dim = 8, 2, 64
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(dim))
    packed = draw(rng, (1, tokens, (heads + 2 * kv_heads) * dim), dtype)
    before = packed.copy()

    def views(buffer):
        q = buffer[..., : heads * dim].reshape(1, tokens, heads, dim)
        k = buffer[..., heads * dim : (heads + kv_heads) * dim].reshape(1, tokens, kv_heads, dim)
        return tuple(v[0] if layout == "thd" else v.transpose(oracle.ORDER[layout]) for v in (q, k))

    assert np.shares_memory(views(packed)[0], packed)
    plan = rope.plan(np.arange(tokens), layout=layout)
    apart = plan(*(np.ascontiguousarray(v) for v in views(packed)))
    plan(*views(packed), out=views(packed))
    for view, result in zip(views(packed), apart, strict=True):
        assert np.array_equal(view, result)
    values = (heads + kv_heads) * dim
    assert np.array_equal(packed[..., values:], before[..., values:])  # v is untouched
    # q and k from one buffer into another, as views of it
    other = np.zeros_like(packed)
    plan(*views(before), out=views(other))
    assert np.array_equal(other[..., :values], packed[..., :values])


def test_heads_interleaved_in_one_buffer(rng):
    """(seq, heads, q | k | v): the per-head packing of GPT-NeoX and BLOOM."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(32))
    packed = draw(rng, (1, 5, 6, 96), np.float32)
    q, k = packed[..., :32], packed[..., 32:64]
    apart = rope(q.copy(), k.copy())
    v = packed[..., 64:].copy()
    rope(q, k, out=(q, k))
    assert np.array_equal(q, apart[0])
    assert np.array_equal(k, apart[1])
    assert np.array_equal(packed[..., 64:], v)


def test_in_place_through_another_view(dtype, rng):
    """Strides of axes of length 1 mean nothing."""
    rope, cache = (
        RotaryEmbedding.from_inv_freq(oracle.inv_freq(16)),
        draw(rng, (1, 40, 4, 16), dtype),
    )
    expected = rope.rotate(cache[:, 5:6])
    assert rope.rotate(cache[:, 5:6], out=cache[0, 5:6][None]).tobytes() == expected.tobytes()
    assert cache[:, 5:6].tobytes() == expected.tobytes()


def test_a_list_or_a_named_pair_takes_results(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    q, k = draw(rng, (1, 3, 4, 16), np.float32), draw(rng, (1, 3, 2, 16), np.float32)
    expected = rope(q, k)
    for kind in (list, tuple, namedtuple("Pair", "q k")._make):
        for rotate in (rope, rope.plan([0, 1, 2])):
            outs = np.empty_like(q), np.empty_like(k)
            for out, target, exact in zip(
                rotate(q, k, out=kind(outs)), outs, expected, strict=True
            ):
                assert out is target
                assert np.array_equal(out, exact)


@pytest.fixture
def without_caches(monkeypatch):
    """Let new launchers find no caches, as for large results; older ones know their own."""

    def start():
        monkeypatch.setattr(launches, "last_level_cache", lambda: 0)
        launches.launcher.cache_clear()

    yield start
    launches.launcher.cache_clear()


@pytest.mark.parametrize(
    ("width", "rotated"), [(64, 56), (72, 72), (100, 34), (128, 8), (96, 10), (64, 58)]
)
def test_results_stored_past_the_caches_are_the_same(
    without_caches, dtype, interleaved, width, rotated, rng
):
    def rope():
        return RotaryEmbedding.from_inv_freq(
            oracle.inv_freq(rotated), head_dim=width, interleaved=interleaved
        )

    x = draw(rng, (1, 40, 4, width), dtype)
    usual = rope().rotate(x)
    without_caches()
    streaming = rope()
    for start in (0, dtype.itemsize, 16, 24, 64 - dtype.itemsize):  # where outputs begin
        for layout, shape, order in (
            ("bshd", x.shape, (0, 1, 2, 3)),
            ("bhsd", (1, 4, 40, width), (0, 2, 1, 3)),
        ):
            for gap in (0, 3):  # elements between rows
                rows = np.zeros(start + x.nbytes // width * (width + gap), np.uint8)
                held = rows[start:].view(dtype).reshape(*shape[:3], width + gap)
                out = held[..., :width]
                streaming.rotate(np.ascontiguousarray(x.transpose(order)), layout=layout, out=out)
                assert np.array_equal(out.transpose(order), usual)
                assert not rows[:start].any()
                assert not held[..., width:].any()


@pytest.mark.parametrize("axis_dims", [(16, 56, 56), (8, 12, 108), (10, 24, 30)])
def test_results_in_blocks_stored_past_the_caches_are_the_same(
    without_caches, dtype, interleaved, axis_dims, rng
):
    def plan():
        rope = RotaryEmbedding.axial(
            sum(axis_dims), 3, axis_dims=axis_dims, interleaved=interleaved
        )
        return rope.plan(np.arange(90).reshape(30, 3))

    x = draw(rng, (1, 30, 5, sum(axis_dims)), dtype)
    usual = plan().rotate(x)
    without_caches()
    assert np.array_equal(plan().rotate(x), usual)


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
PLAN = ROPE.plan([1, 2, 3])
X, Y, Z, OVERLAP, BUFFER = WATCHED = (
    zeros(2, 3, 4, 6),
    zeros(2, 3, 4, 6),
    zeros(2, 3, 4, 6),
    zeros(2, 3, 5, 6),
    zeros(100),
)

OUT = (ValueError, "out")
REFUSED = [
    (lambda: ROPE(X, X.copy(), out=X), TypeError, "out"),
    (lambda: ROPE(X, X.copy(), out=(X,)), TypeError, "out"),
    (lambda: PLAN(X, Y, out=(X, Y, Z)), TypeError, "out"),
    (lambda: PLAN(X, Y, out=np.zeros((2, 2, 3, 4, 6), np.float32)), TypeError, "out"),
    (lambda: ROPE(X, X.copy(), out=(None, None)), TypeError, "out[0]"),
    (lambda: ROPE.rotate(X, out=[1]), TypeError, "out"),
    (lambda: ROPE.rotate(X, out=zeros(2, 3, 3, 6)), ValueError, "out"),
    (lambda: PLAN.rotate(X, out=zeros(1, 2, 3, 4, 6)), ValueError, "out"),
    (lambda: ROPE.rotate(X, out=zeros(2, 3, 4, 6, dtype="f8")), TypeError, "out"),
    (lambda: ROPE.rotate(X, out=read_only(zeros(2, 3, 4, 6))), ValueError, "out"),
    (lambda: ROPE.rotate(OVERLAP[:, :, :4], out=OVERLAP[:, :, 1:]), ValueError, "out"),
    (lambda: PLAN(X, Y, out=(Y, zeros(2, 3, 4, 6))), ValueError, "out[0]"),
    (lambda: PLAN(X, Y, out=(X, X)), ValueError, "out[1]"),
    (lambda: PLAN(X, Y, out=(Z, Z)), ValueError, "out[1]"),
    (lambda: PLAN.rotate(X[:1], out=as_strided(BUFFER, (1, 3, 4, 6), (0, 48, 12, 4))), *OUT),
    (lambda: PLAN.rotate(X, out=as_strided(zeros(6), X.shape, (0, 0, 0, 4))), *OUT),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals_write_nothing(call, error, argument):
    for array in WATCHED:
        array[...] = 1
    assert_refused(call, error, argument)
    assert all((array == 1).all() for array in WATCHED)
