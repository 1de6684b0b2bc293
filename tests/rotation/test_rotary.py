"""RotaryEmbedding: properties, and rotation in every dtype, pairing and layout, by the formulas."""

import copy
import pickle

import numpy as np
import oracle
import pytest
from oracle import assert_rotated, draw, expected
from refusals import assert_refused, zeros

from rope_cpu import RotaryEmbedding


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_every_dtype_pairing_and_layout(dtype, interleaved, layout, inverse, rng):
    """The 37 pairs of part of a head fill no vectors exactly; the kernel tests have every width."""
    rope = RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(74), head_dim=80, attention_factor=1.25, interleaved=interleaved
    )
    batch = 1 if layout == "thd" else 2
    positions = rng.integers(0, 5000, (batch, 9))
    q, k = draw(rng, (batch, 9, 4, 80), dtype), draw(rng, (batch, 9, 2, 80), dtype)
    ids = positions[0] if layout == "thd" else positions
    plan = rope.plan(ids, layout=layout, inverse=inverse)
    results = plan(oracle.to_layout(q, layout), oracle.to_layout(k, layout))
    called = rope(
        oracle.to_layout(q, layout),
        oracle.to_layout(k, layout),
        ids,
        layout=layout,
        inverse=inverse,
    )
    for x, result, again in zip((q, k), results, called, strict=True):
        assert_rotated(oracle.from_layout(result, layout), rope, x, positions, inverse)
        single = rope.rotate(oracle.to_layout(x, layout), ids, layout=layout, inverse=inverse)
        assert result.tobytes() == again.tobytes() == single.tobytes()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_16_bit_results_are_the_rounded_float64_result_almost_always(name, interleaved, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(128, 5e5), interleaved=interleaved)
    positions = rng.integers(0, 131072, (1, 200))
    x = draw(rng, (1, 200, 8, 128), np.dtype(name))
    exact, _ = expected(rope, x, positions)
    # The nearest value by the spacing of the format at that size; ties are too rare to matter.
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - (10 if name == "float16" else 7))
    spacing = np.maximum(spacing, 2.0**-24) if name == "float16" else spacing
    nearest = np.rint(exact / spacing) * spacing
    assert np.mean(rope.rotate(x, positions).astype(np.float64) == nearest) > 0.999


def test_ids_of_one_row_serve_every_batch(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = draw(rng, (3, 4, 2, 16), np.float32)
    ids = np.array([7, 3, 3, 0])
    assert np.array_equal(rope.rotate(x, ids[None]), rope.rotate(x, ids))
    assert np.array_equal(rope.rotate(x, ids), rope.rotate(x, np.tile(ids, (3, 1))))


@pytest.mark.parametrize("shape", [(0, 3, 2, 16), (2, 0, 2, 16), (2, 3, 0, 16)])
def test_nothing_to_rotate_is_fine(shape, dtype):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    x = np.empty(shape, dtype)
    assert rope.rotate(x).shape == shape
    assert rope.plan(np.arange(shape[1])).rotate(x, out=x) is x
    q, k = rope(x, np.empty((*shape[:2], 4, 16), dtype))
    assert q.shape == shape
    assert k.shape == (*shape[:2], 4, 16)


def test_objects_compare_print_and_pickle(interleaved):
    options = {"head_dim": 6, "interleaved": interleaved, "attention_factor": 1.5}
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.1], **options)
    same = RotaryEmbedding.from_inv_freq([1.0, 0.1], **options)
    other = RotaryEmbedding.from_inv_freq([1.0, 0.2], **options)
    assert rope == same
    assert hash(rope) == hash(same)
    assert rope != other
    assert rope != 3
    for twin in (pickle.loads(pickle.dumps(rope)), copy.deepcopy(rope), copy.copy(rope)):
        assert twin == rope
        with pytest.raises(ValueError, match="read-only"):
            twin.inv_freq[0] = 99
    assert "head_dim=6, rotary_dim=4" in repr(rope)
    found = rope.head_dim, rope.rotary_dim, rope.axes, rope.rope_type, rope.attention_factor
    assert found == (6, 4, 1, "default", 1.5)
    with pytest.raises(AttributeError):
        rope.head_dim = 8
    with pytest.raises(ValueError, match="read-only"):
        rope.inv_freq[0] = 2


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)

AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])

PER_HEAD = RotaryEmbedding.from_inv_freq(np.ones((1, 3, 2)))

X = np.zeros((2, 3, 4, 6), np.float32)

REFUSED = [
    (lambda: ROPE.rotate(zeros(1, 3, 4, 8)), ValueError, "x"),
    (lambda: ROPE(X, zeros(2, 3, 1, 5)), ValueError, "k"),
    (lambda: ROPE.rotate(zeros(3, 4, 6)), ValueError, "x"),
    (lambda: ROPE.rotate(X, [1, 2, 3], layout="thd"), ValueError, "x"),
    (lambda: ROPE.rotate([[1.0]]), TypeError, "x"),
    (lambda: ROPE(X, None), TypeError, "k"),
    (lambda: ROPE.rotate(zeros(2, 3, 4, 6, dtype=int)), TypeError, "x"),
    (lambda: ROPE.rotate(zeros(2, 3, 4, 6, dtype=complex)), TypeError, "x"),
    (lambda: ROPE(X, zeros(1, 3, 1, 6)), ValueError, "k"),
    (lambda: ROPE(X, zeros(2, 4, 1, 6)), ValueError, "k"),
    (lambda: ROPE.rotate(X, zeros(3, 3, dtype=int)), ValueError, "x"),
    (lambda: ROPE.rotate(X, zeros(0, 3)), ValueError, "x"),
    (lambda: ROPE.rotate(X, zeros(3, dtype="f2")), TypeError, "position_ids"),
    (lambda: ROPE.rotate(X, zeros(3, dtype=complex)), TypeError, "position_ids"),
    (lambda: ROPE.rotate(X, zeros(3, dtype="M8[s]")), TypeError, "position_ids"),
    (lambda: ROPE.rotate(X, ["0", "1", "2"]), TypeError, "position_ids"),
    (lambda: ROPE.rotate(X, zeros(3, dtype=bool)), TypeError, "position_ids"),
    (lambda: ROPE.rotate(X, np.ma.array([0, 1, 2])), TypeError, "position_ids"),
    (lambda: ROPE.rotate(zeros(2, 3, 4, 6, dtype=object)), TypeError, "x"),
    (lambda: ROPE.rotate(np.ma.array(X)), TypeError, "x"),
    (lambda: ROPE.rotate(X.astype(">f4")), TypeError, "x"),
    (lambda: PER_HEAD.rotate(zeros(1, 1, 4, 4), [[0]]), ValueError, "x"),
    (lambda: ROPE.rotate(X, layout="bsdh"), ValueError, "layout"),
    (lambda: ROPE.rotate(X, layout=["bshd"]), ValueError, "layout"),
    (lambda: ROPE.rotate(X, layout=None), ValueError, "layout"),
    (lambda: ROPE.rotate(X, inverse=1), TypeError, "inverse"),
    (lambda: ROPE.rotate(X, inverse=0), TypeError, "inverse"),
    (lambda: ROPE.rotate(X[0], layout="thd"), ValueError, "position_ids"),
    (lambda: AXIAL.rotate(zeros(1, 1, 1, 4)), ValueError, "position_ids"),
    (lambda: ROPE.rotate(X, [1, 2, 3], offset=1), ValueError, "offset"),
    (lambda: ROPE.rotate(X, [1, 2, 3], offset=False), ValueError, "offset"),
    (lambda: ROPE.rotate(X, offset=1.5), TypeError, "offset"),
    (lambda: ROPE.rotate(X, offset=True), TypeError, "offset"),
    (lambda: ROPE.rotate(X, offset="1"), TypeError, "offset"),
    (lambda: ROPE.rotate(X, offset=None), TypeError, "offset"),
    (lambda: ROPE.rotate(X, offset=-(2**70)), ValueError, "offset"),
    (lambda: ROPE.rotate(X, offset=np.array([1.0, 2.0])), TypeError, "offset"),
    (lambda: ROPE.rotate(X, offset=[1, 2, 3]), ValueError, "offset"),
    (lambda: ROPE.rotate(X, offset=[[1], [2, 3]]), ValueError, "offset"),
    (lambda: ROPE.rotate(X, offset=2**53), ValueError, "offset"),
    (lambda: ROPE.rotate(X, offset=2**70), ValueError, "offset"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
