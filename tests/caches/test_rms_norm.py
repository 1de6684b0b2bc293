"""RMSNorm: its arguments, and what it refuses."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import rope_cpu
from rope_cpu import RMSNorm


def normalised(norm, width):
    """Return a row after its norm and a rotation by nothing."""
    plan = rope_cpu.RotaryEmbedding(width).plan([0])
    x = np.arange(1, width + 1, dtype=np.float32).reshape(1, 1, 1, width)
    return plan.rotate(x, norm=norm)[0, 0, 0]


def test_arguments_are_kept():
    norm = RMSNorm([1, 2.5], 1e-5, offset=1)
    assert norm.weight.dtype == np.float32
    assert norm.weight.tolist() == [1, 2.5]
    assert norm.eps == 1e-5
    assert norm.offset == 1.0
    assert repr(norm) == "RMSNorm(weight=<2 elements>, eps=1e-05, offset=1)"
    bare = RMSNorm(None)
    assert bare.weight is None
    assert bare.eps == 1e-6
    assert repr(bare) == "RMSNorm(weight=None, eps=1e-06, offset=0)"


def test_the_formula():
    rms = np.sqrt((1 + 4) / 2 + 0.5)
    expected = np.array([1, 2]) / rms
    assert np.allclose(normalised(RMSNorm(None, 0.5), 2), expected, rtol=1e-6, atol=0)
    scaled = normalised(RMSNorm([3, -4], 0.5), 2)
    assert np.allclose(scaled, expected * [3, -4], rtol=1e-6, atol=0)
    shifted = normalised(RMSNorm([3, -4], 0.5, offset=1), 2)
    assert np.allclose(shifted, expected * [4, -3], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", ml_dtypes.bfloat16, "int8"])
def test_weights_are_copied_and_cast_to_float32(dtype):
    """The sum with the offset is float32: 1 + 2^-8 of bfloat16 is not rounded to 1."""
    weight = np.array([2.0**-8, 1, 3, 2]).astype(dtype)
    norm = RMSNorm(weight, offset=1)
    same = RMSNorm(weight.astype(np.float32), offset=1)
    before = normalised(norm, 4)
    weight[:] = 0
    assert np.array_equal(normalised(norm, 4), before)
    assert np.array_equal(normalised(same, 4), before)


def test_norms_are_immutable():
    norm = RMSNorm([1.0, 2.0])
    for name in ("weight", "eps", "offset", "other"):
        with pytest.raises(AttributeError, match="cannot assign to field"):
            setattr(norm, name, 1.0)
    with pytest.raises(ValueError, match="read-only"):
        norm.weight[0] = 3


@pytest.mark.parametrize("norm", [RMSNorm([1, 2], 1e-3, offset=1), RMSNorm(None, 1e-3)])
def test_norms_pickle_and_copy(norm):
    for again in (pickle.loads(pickle.dumps(norm)), copy.copy(norm), copy.deepcopy(norm)):
        assert repr(again) == repr(norm)
        assert np.array_equal(normalised(again, 2), normalised(norm, 2))


REFUSED = [
    (lambda: RMSNorm(np.ones((2, 4))), ValueError, r"`weight` has shape \(2, 4\); .*\(head_dim,\)"),
    (lambda: RMSNorm(["1"]), TypeError, "`weight` has dtype <U1; it must hold real numbers"),
    (lambda: RMSNorm([1, np.nan]), ValueError, "`weight` holds nan; it must be finite"),
    (lambda: RMSNorm([1e39]), ValueError, r"`weight` holds 1e\+39; .* in float32"),
    (lambda: RMSNorm(np.ma.array([1.0])), TypeError, "`weight` is a masked array"),
    (lambda: RMSNorm([True]), TypeError, "`weight` has dtype bool"),
    (lambda: RMSNorm([1j]), TypeError, "`weight` has dtype complex128"),
    (lambda: RMSNorm(np.ones(2**17)), ValueError, "`weight` is an array .* at most 65536"),
    (lambda: RMSNorm(range(2**60)), ValueError, "`weight`"),
    (
        lambda: RMSNorm(np.broadcast_to(np.float32(1), (2**40,))),
        ValueError,
        "`weight` is an array ",
    ),
    (lambda: RMSNorm(None, 10**400), ValueError, "`eps` is an integer of 1329 bits"),
    (lambda: RMSNorm(None, 1e-50), ValueError, "`eps` is 1e-50; .* above 0 .* float32"),
    (lambda: RMSNorm(None, 1e300), ValueError, r"`eps` is 1e\+300; .* finite in float32"),
    (lambda: RMSNorm([1.0], offset=1e300), ValueError, r"`offset` is 1e\+300; .* float32"),
    (lambda: RMSNorm([3e38], offset=3e38), ValueError, r"`offset` is 3e\+38; .* `weight`"),
    (lambda: RMSNorm(None, offset=1.0), ValueError, "`offset` is 1.0; .* `weight` is None"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
