"""Places of inputs and results: any strides, views of one buffer, in place, forbidden overlaps."""

from collections import namedtuple

import numpy as np
import oracle
import pytest
from numpy.lib.stride_tricks import as_strided
from oracle import draw
from refusals import assert_refused, read_only, zeros

from rope_cpu import RotaryEmbedding


class Subclass(np.ndarray):
    """A subclass that changes nothing."""


def test_a_subclass_is_rotated_like_its_base(dtype, rng):
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(16), head_dim=20)
    x = draw(rng, (2, 3, 4, 20), dtype)
    given = x.view(Subclass)
    plan = rope.plan([0, 1, 2])
    out = np.zeros_like(x).view(Subclass)
    results = [rope.rotate(given), plan(given, x)[0], plan(x, given)[1], plan.rotate(x, out)]
    for result in results:
        assert result.tobytes() == plan.rotate(x).tobytes()


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
