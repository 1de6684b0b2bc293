"""RotaryPlan: cos and sin of one step, for every layer, dtype, batch and number of heads."""

import pickle
import threading

import ml_dtypes
import numpy as np
import oracle
import pytest
from conftest import DTYPES
from oracle import assert_rotated, draw

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation.plan import RotaryPlan


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_the_first_call_of_a_plan_takes_the_fast_path(monkeypatch, dtype):
    """Decoding makes a plan at every step, so a first call is one of few."""
    rope, x = RotaryEmbedding(64), np.ones((1, 1, 2, 64), dtype)
    usual = rope.plan([3]).rotate(x)
    monkeypatch.setattr(RotaryPlan, "_rotate_copies", None)
    assert np.array_equal(rope.plan([3]).rotate(x), usual)
    assert np.array_equal(rope.plan([3])(x, x)[1], usual)


def test_one_plan_serves_every_dtype_batch_and_number_of_heads(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64))
    plan = rope.plan([3, 1, 4])
    for dtype in DTYPES.values():
        for batch, heads in ((1, 1), (2, 5)):
            x = draw(rng, (batch, 3, heads, 64), dtype)
            assert_rotated(plan.rotate(x), rope, x, np.array([[3, 1, 4]] * batch))


def test_plans_print_and_pickle():
    plan, x = RotaryEmbedding(6, rotary_dim=4).plan([1, 2, 3]), np.ones((1, 3, 1, 6), np.float32)
    assert np.array_equal(pickle.loads(pickle.dumps(plan)).rotate(x), plan.rotate(x))
    assert "seq=3" in repr(plan)
    assert "head_dim=6, rotary_dim=4" in repr(plan)


def test_one_plan_serves_dtypes_in_turn(monkeypatch, rng):
    """What was prepared for one dtype must serve no other, and all stay prepared."""
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    plan, dtypes = (
        rope.plan([3]),
        (np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.float16),
    )
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


def test_nothing_that_fits_the_kernel_is_copied(dtype, monkeypatch, rng):
    """Ids or an offset, unpickled dtypes, new or given outputs, views of one packed buffer."""
    monkeypatch.setattr(RotaryPlan, "_rotate_copies", None)
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    q, k = (
        draw(rng, (1, 3, 4, 16), dtype),
        pickle.loads(pickle.dumps(draw(rng, (1, 3, 2, 16), dtype))),
    )
    for keywords in ({"offset": 3}, {"position_ids": [1, 2, 3]}):
        rope(q, k, **keywords)
        rope(q, k, out=(q, k), **keywords)
        rope.rotate(k, **keywords)
        rope.rotate(k, out=k, **keywords)
    packed = draw(rng, (5, 8, 16), dtype)
    plan = rope.plan(np.arange(5), layout="thd")
    plan(packed[:, :6], packed[:, 6:], out=(packed[:, :6], packed[:, 6:]))


def test_a_plan_outlives_the_ids_it_was_made_from(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    ids = np.array([[1.0, 2.0, 3.0]])
    plan = rope.plan(ids)
    ids[:] = 7
    x = draw(rng, (1, 3, 2, 16), np.float64)  # whose cos and sin the plan computes only now
    assert np.array_equal(plan.rotate(x), rope.rotate(x, [1, 2, 3]))


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


def test_an_argument_whose_dtype_raises_is_named():
    class Released:
        @property
        def dtype(self):
            raise RuntimeError("released")

    with pytest.raises(TypeError, match="`q` is a Released"):
        RotaryEmbedding(8).plan([1])(Released(), Released())


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])
PLAN = ROPE.plan([1, 2, 3])
X = np.zeros((2, 3, 4, 6), np.float32)
LENGTHS = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
)
LENGTHS = LENGTHS.at_length([3, 9, 12])

REFUSED = [
    (lambda: ROPE.plan([1], layout=3), ValueError, "`layout` is 3"),
    (lambda: ROPE.plan([True, False]), TypeError, "`position_ids` has dtype bool"),
    (lambda: ROPE.plan([1j]), TypeError, "`position_ids` has dtype complex128"),
    (lambda: ROPE.plan("12"), TypeError, "`position_ids` has dtype <U2"),
    (lambda: ROPE.plan(np.zeros(3, "f2")), TypeError, "`position_ids` has dtype float16"),
    (
        lambda: ROPE.plan(np.array([1, 2], object)),
        TypeError,
        "`position_ids` has dtype object; it must hold integers",
    ),
    (
        lambda: ROPE.plan(np.ma.array([1, 2], mask=[0, 1])),
        TypeError,
        "`position_ids` is a masked array",
    ),
    (
        lambda: ROPE.plan([[1, 2], [3]]),
        ValueError,
        "`position_ids` is a list of unequal rows; it must be a regular array",
    ),
    (
        lambda: ROPE.plan(3.0),
        ValueError,
        "`position_ids` has shape .*; it must be .seq,. or .batch, seq.",
    ),
    (lambda: ROPE.plan(zeros(1, 1, 1)), ValueError, "`position_ids` has shape .1, 1, 1."),
    (lambda: ROPE.plan([[1]], layout="thd"), ValueError, "it must be .tokens,."),
    (
        lambda: AXIAL.plan([1, 2, 3]),
        ValueError,
        "`position_ids` has shape .3,.; it must be .seq, 3. or .batch, seq, 3.",
    ),
    (
        lambda: AXIAL.plan(zeros(5, 2)),
        ValueError,
        "`position_ids` has shape .5, 2.; it must hold 3 coordinates",
    ),
    (
        lambda: AXIAL.plan(zeros(3, 2, 5)),
        ValueError,
        "its axes come first: np.moveaxis.position_ids, 0, -1.",
    ),
    (
        lambda: ROPE.plan([0.0, np.inf]),
        ValueError,
        "`position_ids` holds inf; it must be finite",
    ),
    (
        lambda: ROPE.plan([2**53 + 1]),
        ValueError,
        r"`position_ids` holds 9007199254740993; it must be within ±2\^53",
    ),
    (lambda: ROPE.plan([-(2**60)]), ValueError, "it must be within"),
    (
        lambda: ROPE.plan([2**70]),
        ValueError,
        "`position_ids` holds 1180591620717411303424; it must be within",
    ),
    (
        lambda: LENGTHS.plan([0, 1], layout="thd"),
        ValueError,
        "`layout` is .thd.; .* 3 lengths were given",
    ),
    (lambda: PLAN.rotate(zeros(2, 3, 4, 6, dtype=">f4")), TypeError, "native byte order"),
    (
        lambda: PLAN(X, zeros(2, 3, 1, 6, dtype="f8")),
        TypeError,
        "`k` has dtype float64; .* `q`, float32",
    ),
    (
        lambda: PLAN(zeros(2, 3, 4, 6, dtype="f2"), zeros(2, 3, 1, 6).astype("bfloat16")),
        TypeError,
        "`k` has dtype bfloat16; .* `q`, float16",
    ),
    (
        lambda: PLAN.rotate(zeros(2, 4, 1, 6)),
        ValueError,
        "`x` has 4 tokens.*positions are given for 3",
    ),
    (lambda: PLAN(zeros(1, 2, 3, 4, 6), X), ValueError, "`q` has shape .1, 2, 3, 4, 6."),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
