"""RotaryPlan: cos and sin of one step, for every layer, dtype, batch and number of heads."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import oracle
import pytest
from oracle import draw
from refusals import zeros

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation.plan import RotaryPlan

ROPE = RotaryEmbedding(6, rotary_dim=4)
OLD = RotaryEmbedding(6, rotary_dim=4, rope_theta=50.0)
PLANS = {
    "seq=3, layout='bshd', rotate, ": ROPE.plan([1, 2, 3]),
    "seq=3, layout='bshd', inverse, ": ROPE.plan([1, 2, 3], inverse=True),
    "seq=any, layout='bshd', shift, ": ROPE.shift_plan(-40),
    "seq=3, layout='bshd', shift, ": ROPE.shift_plan([4, 5, 6]),
    "seq=3, layout='bshd', rerotate, ": ROPE.rerotate_plan(OLD, [1, 2, 3]),
}


@pytest.mark.parametrize("text", PLANS)
def test_plans_print_and_pickle(text, rng):
    plan = PLANS[text]
    again = pickle.loads(pickle.dumps(plan))
    x = draw(rng, (2, 3, 1, 6), np.float64)
    assert isinstance(plan, RotaryPlan)
    assert f"{text}head_dim=6, rotary_dim=4" in repr(plan)
    assert repr(again) == repr(plan)
    assert np.array_equal(again.rotate(x), plan.rotate(x))


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


def test_copied_arrays_share_cos_and_sin(monkeypatch, rng):
    plan = ROPE.plan([1, 2, 3])
    x = draw(rng, (2, 3, 1, 12), np.float64)[..., ::2]
    first = plan.rotate(x)
    monkeypatch.setattr(RotaryPlan, "_launch", None)
    assert np.array_equal(plan.rotate(x), first)


def test_a_plan_outlives_the_ids_it_was_made_from(rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16))
    ids = np.array([[1.0, 2.0, 3.0]])
    plan = rope.plan(ids)
    ids[:] = 7
    x = draw(rng, (1, 3, 2, 16), np.float64)  # whose cos and sin the plan computes only now
    assert np.array_equal(plan.rotate(x), rope.rotate(x, [1, 2, 3]))


@pytest.mark.parametrize("counts", [[64] * 6, range(1, 7)])
def test_threads_share_a_plan(counts, rng):
    """Of one number of tokens, and of any."""
    rope = RotaryEmbedding(128)
    plan = rope.shift_plan(3) if len(set(counts)) > 1 else rope.plan(np.arange(64))
    arrays = [draw(rng, (1, tokens, 32, 128), np.float32) for tokens in counts]
    right = [plan.rotate(x) for x in arrays]

    def is_right(x, expect):
        return all(np.array_equal(plan.rotate(x), expect) for _ in range(100))

    with ThreadPoolExecutor(len(arrays)) as threads:
        assert all(threads.map(is_right, arrays, right))


def test_an_argument_whose_dtype_raises_is_named():
    class Released:
        @property
        def dtype(self):
            raise RuntimeError("released")

    with pytest.raises(TypeError, match="`q` is a Released"):
        RotaryEmbedding(8).plan([1])(Released(), Released())


AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])
PLAN = ROPE.plan([1, 2, 3])
X = np.zeros((2, 3, 4, 6), np.float32)
LENGTHS = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
)
LENGTHS = LENGTHS.at_length([3, 9, 12])

REFUSED = [
    (lambda: ROPE.plan(3.0), ValueError, "`position_ids` has shape .*; it must be .seq,. or "),
    (lambda: ROPE.plan([[1]], layout="thd"), ValueError, "it must be .tokens,."),
    (lambda: AXIAL.plan([1, 2, 3]), ValueError, "`position_ids` has shape .3,.; it must be .seq,"),
    (lambda: AXIAL.plan(zeros(5, 2)), ValueError, "`position_ids` has shape .5, 2.; it must"),
    (lambda: AXIAL.plan(zeros(3, 2, 5)), ValueError, "its axes come first: np.moveaxis"),
    (lambda: ROPE.plan([2**53 + 1]), ValueError, "`position_ids` holds 9007199254740993;"),
    (lambda: ROPE.plan([2**70]), ValueError, "`position_ids` holds 1180591620717411303424;"),
    (lambda: LENGTHS.plan([0, 1], layout="thd"), ValueError, "`layout` is .thd.; .* lengths"),
    (lambda: PLAN(X, zeros(2, 3, 1, 6, dtype="f8")), TypeError, "`k` has dtype float64"),
    (
        lambda: PLAN(zeros(2, 3, 4, 6, dtype="f2"), zeros(2, 3, 1, 6).astype("bfloat16")),
        TypeError,
        "`k` has dtype bfloat16; .* `q`, float16",
    ),
    (
        lambda: PLAN.rotate(zeros(2, 4, 1, 6)),
        ValueError,
        "`x` has 4 tokens.* have 3, .* are given",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
