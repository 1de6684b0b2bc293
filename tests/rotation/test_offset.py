"""Rotation without a plan: an offset, or position ids, and the bits that a plan gives."""

import tracemalloc
from dataclasses import replace

import numpy as np
import oracle
import pytest
from oracle import draw

from rope_cpu import RotaryEmbedding


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_calls_at_an_offset_have_the_bits_of_a_plan(layout, inverse, dtype, interleaved, rng):
    """A plan and a call at an offset are different code with the same arithmetic."""
    exact = RotaryEmbedding.from_inv_freq(oracle.inv_freq(24), head_dim=28, interleaved=interleaved)
    scaled = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(28), interleaved=interleaved, attention_factor=1.3
    )
    single = RotaryEmbedding.from_spec(replace(scaled.spec, angle_dtype="float32"))
    for rope in (exact, scaled, single):
        for tokens, offset in ((1, 0), (1, 2**31), (3, -7), (9, 10**9)):
            q, k = (
                oracle.to_layout(draw(rng, (2, tokens, 4, 28), dtype), layout) for _ in range(2)
            )
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
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 12,
        "long_factor": [4.0] * 12,
        "factor": 4.0,
    }
    longrope["original_max_position_embeddings"] = 16
    ropes = {
        "one axis": RotaryEmbedding.from_inv_freq(oracle.inv_freq(24), attention_factor=1.3),
        "far": RotaryEmbedding.from_inv_freq(50 * oracle.inv_freq(24)),
        "float32 angles": RotaryEmbedding(24, rope_theta=1e4, angle_dtype="float32"),
        "M-RoPE": RotaryEmbedding.mrope(24, [4, 4, 4], rope_theta=1e4),
        "axial": RotaryEmbedding.axial(24, 2, axis_dims=[8, 16]),
        "heads of their own": RotaryEmbedding.from_inv_freq(heads),
    }
    if layout != "thd":
        ropes["lengths of their own"] = RotaryEmbedding(24, scaling=longrope).at_length([8, 40])
    q, k = (oracle.to_layout(draw(rng, (2, 3, 4, 24), dtype), layout) for _ in range(2))
    for name, rope in ropes.items():
        tail = (rope.axes,) if rope.axes > 1 else ()
        for ids in ([0, 2**31 - 1, -5], [7.25, -0.5, 1e6], [[1, 2, 3], [2**31, 5, -(2**31) + 1]]):
            if layout == "thd" and np.ndim(ids) == 2:
                continue
            ids = (
                np.multiply.outer(ids, np.arange(1, 1 + rope.axes) % 3) if tail else np.asarray(ids)
            )
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


def test_offset_is_the_position_of_the_first_token(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = draw(rng, (2, 4, 3, 16), np.float32)
    assert np.array_equal(rope.rotate(x), rope.rotate(x, np.arange(4)))
    assert np.array_equal(rope.rotate(x, offset=1000), rope.rotate(x, np.arange(1000, 1004)))
    assert np.array_equal(rope.rotate(x, offset=-3), rope.rotate(x, np.arange(-3, 1)))
    assert np.array_equal(rope.rotate(x, offset=np.int64(7)), rope.rotate(x, offset=7))
    per_row = np.array([5, 900])
    assert np.array_equal(
        rope.rotate(x, offset=per_row), rope.rotate(x, per_row[:, None] + np.arange(4))
    )
    assert np.array_equal(rope.rotate(x, offset=[5, 900]), rope.rotate(x, offset=per_row))
    with pytest.raises(ValueError, match=r"positions, .* are given for 2"):
        rope.rotate(np.concatenate([x, x]), [[1, 2, 3, 4]] * 2)
    seq_first = rope.rotate(oracle.to_layout(x, "sbhd"), offset=[5, 900], layout="sbhd")
    assert np.array_equal(oracle.from_layout(seq_first, "sbhd"), rope.rotate(x, offset=per_row))


def test_no_rows_take_no_offsets():
    x = np.zeros((0, 2, 1, 8), np.float32)
    assert RotaryEmbedding(8).rotate(x, offset=[]).shape == x.shape


def test_huge_positions_cost_nothing():
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128))
    x = np.ones((1, 2, 1, 128), np.float32)
    rope.rotate(x, offset=2**49)  # which loads the kernels
    tracemalloc.start()
    rope.rotate(x, offset=2**50)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_more_tokens_than_there_is_memory_for():
    """Without heads an array of any number of tokens takes no memory, but its cos and sin would."""
    x = np.lib.stride_tricks.as_strided(np.zeros(14, np.float16), (1, 2**58, 0, 14), (0, 28, 28, 2))
    with pytest.raises(ValueError, match=r"`x` has shape .* elements"):
        RotaryEmbedding(14).rotate(x, out=x)


def test_the_largest_position_is_accepted():
    x = np.zeros((1, 1, 1, 6), np.float32)
    assert RotaryEmbedding(6).rotate(x, offset=2**53).shape == x.shape
    assert RotaryEmbedding(6).plan([2**53, -(2**53)]) is not None
