"""RotaryEmbedding.shift: rotated keys moved to other positions."""

import numpy as np
import oracle
import pytest
from oracle import draw, expected

from rope_cpu import RotaryEmbedding


def test_shift_moves_rotated_keys(dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(64), attention_factor=1.5, interleaved=interleaved
    )
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
    assert (
        np.abs(moved - rope.rotate(keys, offset=40)) <= 3 * bound
    ).all()  # three roundings instead of one


def test_shift_along_axes(rng):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, (2, 8)))
    keys = draw(rng, (1, 5, 2, 16), np.float64)
    for delta in ([3, -2], np.tile([3, -2], (5, 1)), np.tile([3, -2], (1, 5, 1))):
        cos, sin = oracle.cos_sin_axes(np.tile([3.0, -2.0], (1, 5, 1)), rope.inv_freq)
        exact, reach = oracle.rotate(keys, cos, sin)
        assert (
            np.abs(rope.shift(keys, delta) - exact) <= oracle.bound(exact, reach, "float64")
        ).all()


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])
X = np.zeros((2, 3, 4, 6), np.float32)

REFUSED = [
    (lambda: ROPE.shift(X, np.ma.array([1, 2, 3])), TypeError, "`delta` is a masked array"),
    (lambda: ROPE.shift(X, np.inf), ValueError, "`delta` holds inf"),
    (lambda: ROPE.shift(X, zeros(2, 2, 2)), ValueError, "`delta` has shape .2, 2, 2."),
    (
        lambda: AXIAL.shift(zeros(1, 3, 1, 4), [1, 2]),
        ValueError,
        "`delta` has shape .2,.; its last axis must hold 3",
    ),
    (lambda: ROPE.shift(X, [1, 2]), ValueError, "`keys` has 3 tokens.*`delta` is given for 2"),
    (lambda: ROPE.shift(zeros(2, 3, 4, 8), 1), ValueError, "`keys` has head_dim 8"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
