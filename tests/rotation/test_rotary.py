"""Rotation against the mathematics, in every dtype, pairing, layout and way of giving positions; and its properties."""

import pickle
import threading
from dataclasses import replace

import ml_dtypes
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rope_cpu import RotaryEmbedding, apply_rotary
from rope_cpu.plan import RotaryPlan


def draw(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype)


def expected(rope, x, positions, inverse=False):
    """Exact result and allowed error for x (batch, seq, heads, dim)."""
    cos, sin = oracle.cos_sin(positions, rope.inv_freq)
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    exact, reach = oracle.rotate(x, factor * cos, (-factor if inverse else factor) * sin, rope.interleaved, rope.blocks)
    exact[..., rope.rotary_dim :] = x[..., rope.rotary_dim :].astype(np.float64)
    return exact, oracle.bound(exact, reach, x.dtype, factor)


def assert_rotated(result, rope, x, positions, inverse=False):
    exact, bound = expected(rope, x, positions, inverse)
    assert result.dtype == x.dtype
    assert result.shape == x.shape
    assert (np.abs(result.astype(np.float64) - exact) <= bound).all()
    tail = slice(rope.rotary_dim, None)
    assert result[..., tail].tobytes() == np.ascontiguousarray(x[..., tail]).tobytes()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("head_dim", [128, 80, 30])
@pytest.mark.parametrize("inverse", [False, True])
def test_every_dtype_pairing_and_layout(dtype, interleaved, layout, head_dim, inverse, rng):
    rotary_dim = head_dim if head_dim == 128 else head_dim // 2 + 1  # 41 pairs, 16 pairs: bodies and tails
    rotary_dim -= rotary_dim % 2
    rope = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(rotary_dim), head_dim=head_dim, attention_factor=1.25, interleaved=interleaved
    )
    batch = 1 if layout == "thd" else 2
    positions = rng.integers(0, 5000, (batch, 9))
    q, k = draw(rng, (batch, 9, 4, head_dim), dtype), draw(rng, (batch, 9, 2, head_dim), dtype)
    ids = positions[0] if layout == "thd" else positions
    plan = rope.plan(ids, layout=layout, inverse=inverse)
    results = plan(oracle.to_layout(q, layout), oracle.to_layout(k, layout))
    called = rope(oracle.to_layout(q, layout), oracle.to_layout(k, layout), ids, layout=layout, inverse=inverse)
    for x, result, again in zip((q, k), results, called, strict=True):
        assert_rotated(oracle.from_layout(result, layout), rope, x, positions, inverse)
        single = rope.rotate(oracle.to_layout(x, layout), ids, layout=layout, inverse=inverse)
        assert result.tobytes() == again.tobytes() == single.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_results_are_the_rounded_float64_result_almost_always(name, interleaved, rng):
    from conftest import DTYPES

    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128, 5e5), interleaved=interleaved)
    positions = rng.integers(0, 131072, (1, 200))
    x = draw(rng, (1, 200, 8, 128), DTYPES[name])
    exact, _ = expected(rope, x, positions)
    # Nearest representable value by the spacing of the format at that size, ties being too rare to matter.
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - (10 if name == "float16" else 7))
    spacing = np.maximum(spacing, 2.0**-24) if name == "float16" else spacing
    nearest = np.rint(exact / spacing) * spacing
    assert np.mean(rope.rotate(x, positions).astype(np.float64) == nearest) > 0.999


@pytest.mark.parametrize("blocks", [2, (8, 20, 4)])
def test_blocks_are_paired_within_themselves(blocks, dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(32), head_dim=36, interleaved=interleaved, blocks=blocks)
    x = draw(rng, (1, 5, 3, 36), dtype)
    assert_rotated(rope.rotate(x), rope, x, np.arange(5)[None])


@pytest.mark.parametrize("pairs", range(1, 20))
def test_short_heads(pairs, dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, pairs), head_dim=2 * pairs + 3, interleaved=interleaved)
    x = draw(rng, (2, 3, 2, 2 * pairs + 3), dtype)
    assert_rotated(rope.rotate(x, offset=5), rope, x, np.array([[5, 6, 7]] * 2))
    in_place = x.copy()
    assert rope.rotate(in_place, offset=5, out=in_place) is in_place
    assert in_place.tobytes() == rope.rotate(x, offset=5).tobytes()


def test_offset_is_the_position_of_the_first_token(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = draw(rng, (2, 4, 3, 16), np.float32)
    assert np.array_equal(rope.rotate(x), rope.rotate(x, np.arange(4)))
    assert np.array_equal(rope.rotate(x, offset=1000), rope.rotate(x, np.arange(1000, 1004)))
    assert np.array_equal(rope.rotate(x, offset=-3), rope.rotate(x, np.arange(-3, 1)))
    assert np.array_equal(rope.rotate(x, offset=np.int64(7)), rope.rotate(x, offset=7))
    per_row = np.array([5, 900])
    assert np.array_equal(rope.rotate(x, offset=per_row), rope.rotate(x, per_row[:, None] + np.arange(4)))
    seq_first = np.ascontiguousarray(x.transpose(1, 0, 2, 3))
    shifted = rope.rotate(seq_first, offset=[5, 900], layout="sbhd")
    assert np.array_equal(shifted.transpose(1, 0, 2, 3), rope.rotate(x, offset=per_row))


def test_ids_of_one_row_serve_every_batch(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = draw(rng, (3, 4, 2, 16), np.float32)
    ids = np.array([7, 3, 3, 0])
    assert np.array_equal(rope.rotate(x, ids[None]), rope.rotate(x, ids))
    assert np.array_equal(rope.rotate(x, ids), rope.rotate(x, np.tile(ids, (3, 1))))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_first_call_of_a_plan_takes_the_short_way(monkeypatch, dtype):
    """Decoding makes a plan at every step, so a first call is one of few."""
    rope, x = RotaryEmbedding(64), np.ones((1, 1, 2, 64), dtype)
    usual = rope.plan([3]).rotate(x)
    monkeypatch.setattr(RotaryPlan, "_rotate_copies", None)
    assert np.array_equal(rope.plan([3]).rotate(x), usual)
    assert np.array_equal(rope.plan([3])(x, x)[1], usual)


def test_one_plan_serves_every_dtype_batch_and_number_of_heads(rng):
    from conftest import DTYPES

    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64))
    plan = rope.plan([3, 1, 4])
    for dtype in DTYPES.values():
        for batch, heads in ((1, 1), (2, 5)):
            x = draw(rng, (batch, 3, heads, 64), dtype)
            assert_rotated(plan.rotate(x), rope, x, np.array([[3, 1, 4]] * batch))


def test_several_axes_and_heads_with_frequencies_of_their_own(rng):
    matrix = rng.uniform(-2, 2, (2, 3, 8))  # axes, heads, pairs
    rope = RotaryEmbedding.from_inv_freq(matrix)
    x = draw(rng, (2, 5, 6, 16), np.float64)
    ids = rng.uniform(-50, 50, (2, 5, 2))
    result = rope.rotate(x, ids)
    for head in range(6):  # two heads in a row share the frequencies of head h // 2
        cos, sin = oracle.cos_sin_axes(ids, matrix[:, head // 2])
        exact, reach = oracle.rotate(x[:, :, head : head + 1], cos, sin)
        assert (np.abs(result[:, :, head : head + 1] - exact) <= oracle.bound(exact, reach, "float64")).all()


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
    for (name, view_q), view_k in zip(strided_views(q, rng).items(), strided_views(k, rng).values(), strict=True):
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


@pytest.mark.parametrize("shape", [(0, 3, 2, 16), (2, 0, 2, 16), (2, 3, 0, 16)])
def test_nothing_to_rotate_is_fine(shape, dtype):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = np.empty(shape, dtype)
    assert rope.rotate(x).shape == shape
    assert rope.plan(np.arange(shape[1])).rotate(x, out=x) is x
    q, k = rope(x, np.empty((*shape[:2], 4, 16), dtype))
    assert q.shape == shape
    assert k.shape == (*shape[:2], 4, 16)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_short_calls_compute_angles_on_the_way_to_the_same_bits(layout, inverse, dtype, interleaved, rng):
    """A plan and a call at an offset are different code with the same arithmetic."""
    exact = RotaryEmbedding.from_inv_freq(oracle.inv_freq(24), head_dim=28, interleaved=interleaved)
    scaled = RotaryEmbedding.from_inv_freq(oracle.inv_freq(28), interleaved=interleaved, attention_factor=1.3)
    single = RotaryEmbedding.from_spec(replace(scaled.spec, angle_dtype="float32"))
    for rope in (exact, scaled, single):
        for tokens, offset in ((1, 0), (1, 2**31), (3, -7), (9, 10**9)):
            shape = {"bshd": (2, tokens, 4, 28), "bhsd": (2, 4, tokens, 28), "sbhd": (tokens, 2, 4, 28)}[layout]
            q, k = draw(rng, shape, dtype), draw(rng, shape, dtype)
            plan = rope.plan(offset + np.arange(tokens), layout=layout, inverse=inverse)
            expected = plan(q, k)
            result = rope(q, k, offset=offset, layout=layout, inverse=inverse)
            alone = rope.rotate(k, offset=offset, layout=layout, inverse=inverse, out=k.copy())
            given = q.copy(), k.copy()
            placed = rope(*given, offset=offset, layout=layout, inverse=inverse, out=given)
            assert placed is given
            assert [x.tobytes() for x in (*result, *placed, alone)] == [
                x.tobytes() for x in (*expected * 2, expected[1])
            ]


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_calls_with_positions_have_the_bits_of_a_plan(layout, inverse, dtype, rng):
    axial = np.stack([oracle.inv_freq(24), oracle.inv_freq(24, 100.0)])
    heads = np.stack([axial, axial[::-1]], axis=1)  # (axes, heads, pairs), which add up
    several = {"scaling": {"rope_type": "longrope", "short_factor": [1.0] * 12, "long_factor": [4.0] * 12,
                           "factor": 4.0, "original_max_position_embeddings": 16}}  # fmt: skip
    own_lengths = RotaryEmbedding(24, rope_theta=1e4, max_position_embeddings=64, **several).at_length([8, 40])
    rotaries = {
        "one axis": RotaryEmbedding.from_inv_freq(oracle.inv_freq(24), attention_factor=1.3),
        "far": RotaryEmbedding.from_inv_freq(50 * oracle.inv_freq(24)),
        "float32 angles": RotaryEmbedding(24, rope_theta=1e4, angle_dtype="float32"),
        "M-RoPE": RotaryEmbedding.mrope(24, [4, 4, 4], rope_theta=1e4),
        "axial": RotaryEmbedding.axial(24, 2, axis_dims=[8, 16]),
        "heads of their own": RotaryEmbedding.from_inv_freq(heads),
    }
    if layout != "thd":
        rotaries["lengths of their own"] = own_lengths
    shape = {"bshd": (2, 3, 4, 24), "bhsd": (2, 4, 3, 24), "sbhd": (3, 2, 4, 24), "thd": (3, 4, 24)}[layout]
    q, k = draw(rng, shape, dtype), draw(rng, shape, dtype)
    for name, rope in rotaries.items():
        tail = (rope.axes,) if rope.axes > 1 else ()
        for ids in ([0, 2**31 - 1, -5], [7.25, -0.5, 1e6], [[1, 2, 3], [2**31, 5, -(2**31) + 1]]):
            if layout == "thd" and np.ndim(ids) == 2:
                continue
            ids = np.multiply.outer(ids, np.arange(1, 1 + rope.axes) % 3) if tail else np.asarray(ids)
            plan = rope.plan(ids, layout=layout, inverse=inverse)
            shift = RotaryEmbedding.from_spec(
                replace(rope.spec, attention_factor=np.ones_like(rope.spec.attention_factor))
            )
            moved = shift.plan(ids, layout=layout).rotate(k)
            expected = [*plan(q, k) * 2, plan.rotate(k), moved]
            given = q.copy(), k.copy()
            found = [
                *rope(q, k, ids, layout=layout, inverse=inverse),
                *rope(*given, ids, layout=layout, inverse=inverse, out=given),
                rope.rotate(k, ids, layout=layout, inverse=inverse, out=k.copy()),
                rope.shift(k, ids, layout=layout),
            ]
            assert [x.tobytes() for x in found] == [x.tobytes() for x in expected], (name, ids)


@pytest.mark.parametrize("error", [AttributeError, KeyError, ValueError])
def test_what_cannot_be_made_an_array_is_named(error, rng):
    class Foreign:
        def __array__(self, *_, **__):
            raise error("gone")

    rope, q = RotaryEmbedding(8), draw(rng, (1, 1, 2, 8), np.float32)
    for call in (lambda: rope(q, Foreign(), [3]), lambda: rope(q, Foreign()), lambda: rope.plan([3])(q, Foreign())):
        with pytest.raises(TypeError, match="`k` is a Foreign; it must be a NumPy array"):
            call()


def test_no_rows_take_no_offsets():
    x = np.zeros((0, 2, 1, 8), np.float32)
    assert RotaryEmbedding(8).rotate(x, offset=[]).shape == x.shape
    table, none = np.ones((9, 4), np.float32), np.zeros((1, 0, 1, 8), np.float32)
    assert apply_rotary(none, table, table, []).shape == none.shape


def test_an_offset_for_each_row(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    q, k = draw(rng, (3, 2, 4, 16), np.float32), draw(rng, (3, 2, 2, 16), np.float32)
    expected = rope.plan([[5, 6], [0, 1], [-7, -6]])(q, k)
    with pytest.raises(ValueError, match="positions are given for 2"):
        rope(q, k, [[1, 2], [3, 4]])
    for offset in ([5, 0, -7], np.array([5, 0, -7])):
        assert all(map(np.array_equal, rope(q, k, offset=offset), expected))


def test_large_arrays_are_shared_by_threads_and_agree(dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128), interleaved=interleaved)
    x = draw(rng, (2, 700, 4, 128), dtype)
    whole = rope.rotate(x, offset=11)
    for start in (0, 333, 699):
        piece = rope.rotate(x[:, start : start + 1], offset=11 + start)
        assert piece.tobytes() == whole[:, start : start + 1].tobytes()


@pytest.mark.parametrize(("width", "rotated"), [(64, 56), (72, 72), (100, 34), (128, 8), (96, 10), (64, 58)])
def test_outputs_beyond_the_cache_are_stored_the_same(monkeypatch, dtype, interleaved, width, rotated, rng):
    from rope_cpu import machine

    def rope():
        return RotaryEmbedding.from_inv_freq(oracle.inv_freq(rotated), head_dim=width, interleaved=interleaved)

    x = draw(rng, (1, 40, 4, width), dtype)
    usual = rope().rotate(x)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 0)
    streaming = rope()
    for start in (0, dtype.itemsize, 16, 24, 64 - dtype.itemsize):  # where outputs begin
        for layout, shape, order in (("bshd", x.shape, (0, 1, 2, 3)), ("bhsd", (1, 4, 40, width), (0, 2, 1, 3))):
            for gap in (0, 3):  # elements between rows
                rows = np.zeros(start + x.nbytes // width * (width + gap), np.uint8)
                held = rows[start:].view(dtype).reshape(*shape[:3], width + gap)
                out = held[..., :width]
                streaming.rotate(np.ascontiguousarray(x.transpose(order)), layout=layout, out=out)
                assert np.array_equal(out.transpose(order), usual)
                assert not rows[:start].any()
                assert not held[..., width:].any()


@pytest.mark.parametrize("axis_dims", [(16, 56, 56), (8, 12, 108), (10, 24, 30)])
def test_blocks_beyond_the_cache_are_stored_the_same(monkeypatch, dtype, interleaved, axis_dims, rng):
    from rope_cpu import machine

    def plan():
        rope = RotaryEmbedding.axial(sum(axis_dims), 3, axis_dims=axis_dims, interleaved=interleaved)
        return rope.plan(np.arange(90).reshape(30, 3))

    x = draw(rng, (1, 30, 5, sum(axis_dims)), dtype)
    usual = plan().rotate(x)
    monkeypatch.setattr(machine, "last_level_cache", lambda: 0)
    assert np.array_equal(plan().rotate(x), usual)


def test_a_plan_outlives_the_ids_it_was_made_from(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    ids = np.array([[1.0, 2.0, 3.0]])
    plan = rope.plan(ids)
    ids[:] = 7
    x = draw(rng, (1, 3, 2, 16), np.float64)  # whose cos and sin the plan computes only now
    assert np.array_equal(plan.rotate(x), rope.rotate(x, [1, 2, 3]))


def test_shift_moves_rotated_keys(dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64), attention_factor=1.5, interleaved=interleaved)
    keys = draw(rng, (2, 6, 3, 64), dtype)
    shifted = rope.shift(keys, -40)
    cos, sin = oracle.cos_sin(np.full((2, 6), -40), rope.inv_freq)
    exact, reach = oracle.rotate(keys, cos, sin, interleaved)
    assert (np.abs(shifted.astype(float) - exact) <= oracle.bound(exact, reach, keys.dtype)).all()
    each = rng.integers(-9, 9, (2, 6))
    assert np.array_equal(rope.shift(keys, each)[1, 4], rope.shift(keys, int(each[1, 4]))[1, 4])
    in_place = keys.copy()
    assert rope.shift(in_place, -40, out=in_place) is in_place
    assert np.array_equal(in_place, shifted)


def test_shifted_keys_are_those_rotated_at_the_new_position(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64), attention_factor=1.3)
    keys = draw(rng, (1, 6, 3, 64), np.float64)
    moved = rope.shift(rope.rotate(keys, offset=100), -60)
    _, bound = expected(rope, keys, np.arange(40, 46)[None])
    assert (np.abs(moved - rope.rotate(keys, offset=40)) <= 3 * bound).all()  # three roundings instead of one


def test_shift_along_axes(rng):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, (2, 8)))
    keys = draw(rng, (1, 5, 2, 16), np.float64)
    for delta in ([3, -2], np.tile([3, -2], (5, 1)), np.tile([3, -2], (1, 5, 1))):
        cos, sin = oracle.cos_sin_axes(np.tile([3.0, -2.0], (1, 5, 1)), rope.inv_freq)
        exact, reach = oracle.rotate(keys, cos, sin)
        assert (np.abs(rope.shift(keys, delta) - exact) <= oracle.bound(exact, reach, "float64")).all()


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(-(2**40), 2**40),
    n=st.integers(-(2**40), 2**40),
    move=st.integers(-(2**40), 2**40),
    interleaved=st.booleans(),
)
def test_scores_depend_on_the_difference_of_positions_alone(m, n, move, interleaved):
    rng = np.random.default_rng(1)
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(32), interleaved=interleaved)
    q, k = rng.standard_normal((2, 1, 1, 1, 32))

    def score(at_q, at_k):
        return float(np.vdot(rope.rotate(q, [at_q]), rope.rotate(k, [at_k])))

    assert score(m, n) == pytest.approx(score(m + move, n + move), abs=1e-12)


def test_norm_is_kept_and_inverse_is_the_identity(dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64), attention_factor=2.0, interleaved=interleaved)
    x = draw(rng, (1, 50, 2, 64), dtype)
    rotated = rope.rotate(x, offset=10**6)
    wide = rotated.astype(float)
    unit = {"float32": 2**-24, "float64": 2**-53, "float16": 2**-11, "bfloat16": 2**-8}[str(dtype)]
    norm = np.linalg.norm(wide, axis=-1) / np.linalg.norm(x.astype(float), axis=-1)
    assert np.abs(norm / 2 - 1).max() <= 6 * unit
    back = rope.rotate(rotated, offset=10**6, inverse=True).astype(float)
    _, reach = oracle.rotate(x, *oracle.cos_sin(np.zeros((1, 50)), rope.inv_freq), interleaved)
    assert (np.abs(back - x.astype(float)) <= 6 * unit * reach + 2.0**-24 * (str(dtype) == "float16")).all()


def test_threads_share_a_plan(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128))
    plan = rope.plan(np.arange(64))
    arrays = [draw(rng, (1, 64, 32, 128), np.float32) for _ in range(6)]
    right = [plan.rotate(x) for x in arrays]
    wrong = []

    def work(x, expect):
        for _ in range(30):
            if not np.array_equal(plan.rotate(x), expect):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(arrays, right, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_huge_positions_cost_nothing():
    import tracemalloc

    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128))
    x = np.ones((1, 2, 1, 128), np.float32)
    rope.rotate(x, offset=2**49)  # which loads the kernels
    tracemalloc.start()
    rope.rotate(x, offset=2**50)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_objects_compare_print_and_pickle(interleaved):
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6, interleaved=interleaved, attention_factor=1.5)
    same = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6, interleaved=interleaved, attention_factor=1.5)
    other = RotaryEmbedding.from_inv_freq([1.0, 0.2], head_dim=6, interleaved=interleaved, attention_factor=1.5)
    assert rope == same
    assert hash(rope) == hash(same)
    assert rope != other
    assert rope != 3
    assert pickle.loads(pickle.dumps(rope)) == rope
    x = np.ones((1, 3, 1, 6), np.float32)
    assert np.array_equal(pickle.loads(pickle.dumps(rope.plan([1, 2, 3]))).rotate(x), rope.rotate(x, offset=1))
    assert "head_dim=6, rotary_dim=4" in repr(rope)
    assert "seq=1" in repr(rope.plan([1]))
    assert "head_dim=6, rotary_dim=4" in repr(rope.plan([1]))
    assert (rope.head_dim, rope.rotary_dim, rope.axes, rope.rope_type, rope.attention_factor) == (
        6,
        4,
        1,
        "default",
        1.5,
    )
    with pytest.raises(AttributeError):
        rope.head_dim = 8
    with pytest.raises(ValueError, match="read-only"):
        rope.inv_freq[0] = 2


def test_a_length_plays_no_part_where_frequencies_are_fixed():
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.1])
    assert rope.at_length(5) is rope
    assert rope.at_length([5, 6]) is rope


def test_nothing_that_fits_the_kernel_is_copied(dtype, monkeypatch, rng):
    """Ids or an offset, dtypes that came through pickle, new or given outputs, views of one packed buffer."""
    monkeypatch.setattr(RotaryPlan, "_rotate_copies", None)
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    q, k = draw(rng, (1, 3, 4, 16), dtype), pickle.loads(pickle.dumps(draw(rng, (1, 3, 2, 16), dtype)))
    for keywords in ({"offset": 3}, {"position_ids": [1, 2, 3]}):
        rope(q, k, **keywords)
        rope(q, k, out=(q, k), **keywords)
        rope.rotate(k, **keywords)
        rope.rotate(k, out=k, **keywords)
    packed = draw(rng, (5, 8, 16), dtype)
    plan = rope.plan(np.arange(5), layout="thd")
    plan(packed[:, :6], packed[:, 6:], out=(packed[:, :6], packed[:, 6:]))


def test_in_place_through_another_view(dtype, rng):
    """Strides of axes of length 1 mean nothing."""
    rope, cache = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16)), draw(rng, (1, 40, 4, 16), dtype)
    expected = rope.rotate(cache[:, 5:6])
    assert rope.rotate(cache[:, 5:6], out=cache[0, 5:6][None]).tobytes() == expected.tobytes()
    assert cache[:, 5:6].tobytes() == expected.tobytes()


def test_one_plan_serves_dtypes_in_turn(monkeypatch, rng):
    """What was prepared for one dtype must serve no other, and all stay prepared."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    plan, dtypes = rope.plan([3]), (np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.float16)
    q, k = draw(rng, (1, 1, 4, 16), np.float64), draw(rng, (1, 1, 2, 16), np.float64)
    expected = [rope.plan([3])(q.astype(dtype), k.astype(dtype)) for dtype in dtypes]
    monkeypatch.setattr(RotaryPlan, "_rotate_copies", None)
    for _ in range(2):
        for dtype, (q_rot, k_rot) in zip(dtypes, expected, strict=True):
            pair = q.astype(dtype), k.astype(dtype)
            for result in (plan(*pair), rope(*pair, offset=3), rope(*pair, offset=3, out=pair)):
                assert [x.tobytes() for x in result] == [q_rot.tobytes(), k_rot.tobytes()]
            assert plan.rotate(q.astype(dtype)).tobytes() == q_rot.tobytes()
            assert rope.rotate(k.astype(dtype), offset=3).tobytes() == k_rot.tobytes()


def test_a_list_or_a_named_pair_takes_results(rng):
    from collections import namedtuple

    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    q, k = draw(rng, (1, 3, 4, 16), np.float32), draw(rng, (1, 3, 2, 16), np.float32)
    expected = rope(q, k)
    for kind in (list, tuple, namedtuple("Pair", "q k")._make):
        for rotate in (rope, rope.plan([0, 1, 2])):
            outs = np.empty_like(q), np.empty_like(k)
            for out, target, exact in zip(rotate(q, k, out=kind(outs)), outs, expected, strict=True):
                assert out is target
                assert np.array_equal(out, exact)


@pytest.mark.parametrize("offset", [2**53, 2**61, 2**70, -(2**70), True, 1.5, "1", None])
def test_offsets_that_are_none_are_named(offset):
    x = np.ones((1, 2, 1, 8), np.float32)
    rope, pair = RotaryEmbedding(8), (x, x.copy())
    rope(*pair, offset=1, out=pair)  # now what is ready could take anything for a position
    before = pair[0].copy()
    with pytest.raises((TypeError, ValueError), match="`offset`"):
        rope(*pair, offset=offset, out=pair)
    with pytest.raises((TypeError, ValueError), match="`offset`"):
        rope.rotate(x, offset=offset)
    assert (x == before).all()


def test_inverse_is_a_boolean():
    rope, x = RotaryEmbedding(8), np.ones((1, 1, 1, 8), np.float32)
    rope.rotate(x, inverse=True)  # now what is prepared for True could serve 1
    with pytest.raises(TypeError, match="`inverse`"):
        rope.rotate(x, inverse=1)
    pair = x, x.copy()
    rope(*pair, out=pair)  # and this for False could serve 0
    with pytest.raises(TypeError, match="`inverse`"):
        rope(*pair, inverse=0, out=pair)


def test_more_tokens_than_there_is_memory_for():
    """Without heads an array of any number of tokens takes no memory, but its cos and sin would."""
    x = np.lib.stride_tricks.as_strided(np.zeros(14, np.float16), (1, 2**58, 0, 14), (0, 28, 28, 2))
    with pytest.raises(MemoryError):
        RotaryEmbedding(14).rotate(x, out=x)


def test_what_a_dtype_raises_is_no_business_of_plans():
    class Released:
        @property
        def dtype(self):
            raise RuntimeError("released")

    with pytest.raises(TypeError, match="`q` is a Released"):
        RotaryEmbedding(8).plan([1])(Released(), Released())


def test_copies_stay_immutable():
    import copy

    rope = RotaryEmbedding.from_inv_freq([1.0, 0.5])
    for twin in (pickle.loads(pickle.dumps(rope)), copy.deepcopy(rope), copy.copy(rope)):
        assert twin == rope
        with pytest.raises(ValueError, match="read-only"):
            twin.inv_freq[0] = 99


@pytest.mark.parametrize("layout", [["bshd"], None, "hsbd"])
def test_a_layout_that_is_none_is_named_by_short_calls(layout):
    x = np.ones((1, 1, 2, 8), np.float32)
    for out in (None, (x, x.copy())):
        with pytest.raises(ValueError, match="`layout` is"):
            RotaryEmbedding(8)(x, x.copy(), layout=layout, out=out)
