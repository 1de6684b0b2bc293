"""RotaryEmbedding.shift and shift_plan: rotated keys moved to other positions."""

import numpy as np
import oracle
import pytest
from oracle import draw
from refusals import zeros

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation.cos_sin import CosSin


def test_shift_along_axes(rng):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, (2, 8)))
    keys = draw(rng, (1, 5, 2, 16), np.float64)
    for delta in ([3, -2], np.tile([3, -2], (5, 1)), np.tile([3, -2], (1, 5, 1))):
        cos, sin = oracle.cos_sin_axes(np.tile([3.0, -2.0], (1, 5, 1)), rope.inv_freq)
        exact, reach = oracle.rotate(keys, cos, sin)
        assert (
            np.abs(rope.shift(keys, delta) - exact) <= oracle.bound(exact, reach, "float64")
        ).all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_one_number_moves_any_number_of_tokens(layout, dtype, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(16), head_dim=20, attention_factor=1.5, interleaved=interleaved
    )
    moves = rope.shift_plan(-40, layout=layout)
    for tokens in (5, 5, 1, 0, 7):
        batch = 1 if layout == "thd" else 2
        keys = draw(rng, (batch, tokens, 3, 20), dtype)
        given = oracle.to_layout(keys.copy(), layout)
        moved = moves.rotate(given)
        assert moved.tobytes() == rope.shift(given, -40, layout=layout).tobytes()
        pair = moves(given, given)
        assert [x.tobytes() for x in pair] == [moved.tobytes()] * 2
        assert moves.rotate(given, out=given) is given
        assert given.tobytes() == moved.tobytes()
        cos, sin = oracle.cos_sin(np.full((batch, tokens), -40), rope.inv_freq)
        exact, reach = oracle.rotate(
            keys[..., :16],
            cos.reshape(batch, tokens, 8),
            sin.reshape(batch, tokens, 8),
            interleaved,
        )
        error = np.abs(oracle.from_layout(moved, layout)[..., :16].astype(float) - exact)
        assert (error <= oracle.bound(exact, reach, dtype)).all()


@pytest.mark.parametrize("delta", [-3, [2, -3]])
def test_batch_rows_move_by_frequencies_of_their_own(delta, rng):
    scaling = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
    rope = RotaryEmbedding(8, scaling=scaling)
    keys = draw(rng, (2, 2, 3, 8), np.float32)
    moved = rope.at_length([3, 50]).shift_plan(delta).rotate(keys)
    for row, length in enumerate((3, 50)):
        alone = rope.at_length(length).shift(keys[row : row + 1], delta)
        assert np.array_equal(moved[row : row + 1], alone)


def test_one_number_moves_every_axis_of_mrope_and_other_axes_take_coordinates(rng):
    mrope = RotaryEmbedding.mrope(16, (4, 2, 2), rope_theta=1e4)
    axial = RotaryEmbedding.axial(16)
    keys = draw(rng, (2, 5, 3, 16), np.float64)
    everywhere = mrope.shift_plan(6).rotate(keys)
    assert np.array_equal(everywhere, mrope.shift_plan([6, 6, 6]).rotate(keys))
    assert np.array_equal(everywhere, mrope.shift_plan(np.full((5, 3), 6)).rotate(keys))
    assert np.array_equal(axial.shift_plan([6, 1]).rotate(keys), axial.shift(keys, [6, 1]))


def test_layers_share_cos_and_sin(monkeypatch, rng):
    moves = RotaryEmbedding(16).shift_plan(3)
    keys = draw(rng, (1, 5, 2, 16), np.float32)
    moved = moves.rotate(keys)
    monkeypatch.setattr(CosSin, "table", None)
    assert np.array_equal(moves.rotate(keys), moved)


def test_only_one_delta_serves_any_number_of_tokens():
    keys = np.zeros((1, 2, 1, 6), np.float32)
    for plan in (ROPE.plan([41]), ROPE.shift_plan([41])):
        with pytest.raises(ValueError, match=r"has 2 tokens .* have 1, .* given"):
            plan.rotate(keys)


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])
DYNAMIC = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
)
X = np.zeros((2, 3, 4, 6), np.float32)

REFUSED = [
    (lambda: AXIAL.shift(zeros(1, 3, 1, 4), [1, 2]), ValueError, "`delta` has shape .2,.; it"),
    (lambda: ROPE.shift(X, [1, 2]), ValueError, "`keys` has 3 tokens.* have 2, .* given"),
    (lambda: ROPE.shift_plan(2**53 + 1), ValueError, "`delta` holds 9007199254740993"),
    (lambda: AXIAL.shift_plan(3), ValueError, "`delta` has shape ..; it must hold 3"),
    (lambda: ROPE.shift_plan(1, layout="bsd"), ValueError, "`layout` is 'bsd'"),
    (lambda: ROPE.shift_plan([[1, 2]], layout="thd"), ValueError, "`delta` has shape .1, 2."),
    (lambda: DYNAMIC.shift_plan(1), ValueError, "'dynamic' depends on the sequence length"),
    (lambda: DYNAMIC.at_length([1, 9]).shift_plan(1, layout="thd"), ValueError, "`layout` is"),
    (lambda: ROPE.shift_plan(1)(X, X[:, :2]), ValueError, "`k` has 2 tokens; .* `q`, 3"),
    (lambda: ROPE.shift_plan(1)(X, X, out=X), TypeError, "`out` has shape"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
