"""Rotation without a plan: an offset for all batch rows, or for each, and its limits."""

import tracemalloc

import numpy as np
import oracle
import pytest
from oracle import draw

from rope_cpu import RotaryEmbedding


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
    with pytest.raises(ValueError, match=r"have batch 2, .* are given"):
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
    with pytest.raises(ValueError, match=r"`x` is array.* elements"):
        RotaryEmbedding(14).rotate(x, out=x)


def test_the_largest_position_is_accepted():
    x = np.zeros((1, 1, 1, 6), np.float32)
    assert RotaryEmbedding(6).rotate(x, offset=2**53).shape == x.shape
    assert RotaryEmbedding(6).plan([2**53, -(2**53)]) is not None
