"""The exact reference against mpmath: an error of 2^-95 at most, at any position."""

import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.accuracy import reference

mp = oracle.CONTEXT


PROMISED = 2.0**-95


def exact_value(exact, index):
    return mp.mpf(float(exact.high[index])) + mp.mpf(float(exact.low[index]))


POSITIONS = [0, 1, 511, -3, 2**20 - 3, 2**53, 0.3, -1234.5678]


STEPS = [1.0, -0.3, 2.5e-6, 5e5**-0.5, 0.0, 7.25, -15707.9]


@pytest.mark.parametrize("factor", [1.0, 1.25, 0.1])
def test_cos_sin_against_mpmath(factor):
    rope = RotaryEmbedding.from_inv_freq(STEPS, attention_factor=factor)
    cos, sin = reference.cos_sin(rope.spec, np.array([POSITIONS]))
    for row, position in enumerate(POSITIONS):
        for pair, step in enumerate(STEPS):
            angle = mp.mpf(position) * mp.mpf(step)
            assert (
                abs(exact_value(cos, (0, row, 0, pair)) - mp.mpf(factor) * mp.cos(angle)) < PROMISED
            )
            assert (
                abs(exact_value(sin, (0, row, 0, pair)) - mp.mpf(factor) * mp.sin(angle)) < PROMISED
            )


def test_rotation_against_mpmath(rng):
    x = rng.standard_normal((2, 3, 4, 6)) * 10.0 ** rng.integers(-3, 3, (2, 3, 4, 6))
    ids = rng.uniform(-1000, 1000, (2, 3, 2))
    inv_freq = rng.standard_normal((2, 2, 3))  # (axes, heads, pairs)
    rope = RotaryEmbedding.from_inv_freq(inv_freq, interleaved=True)
    exact, _ = reference.rotation(rope.spec, x, ids)
    for batch, seq, head, pair in np.ndindex(2, 3, 4, 3):
        angle = sum(
            mp.mpf(ids[batch, seq, axis]) * mp.mpf(inv_freq[axis, head // 2, pair])
            for axis in range(2)
        )
        a, b = (mp.mpf(x[batch, seq, head, 2 * pair + one]) for one in (0, 1))
        c = mp.cos(angle)
        s = mp.sin(angle)
        for one, due in enumerate((a * c - b * s, a * s + b * c)):
            found = exact_value(exact, (batch, seq, head, 2 * pair + one))
            assert abs(found - due) < PROMISED * (abs(a) + abs(b))


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_that_frequencies_do_not_fit_are_refused(heads):
    spec = RotaryEmbedding.from_inv_freq(np.ones((1, 2, 4))).spec
    with pytest.raises(ValueError, match="shape"):
        reference.rotation(spec, np.ones((1, 2, heads, 8)), np.arange(2.0)[None])


def test_error_is_seen_below_float64():
    exact = reference.Exact(np.array([1.0]), np.array([2.0**-60]))
    assert exact.error(np.array([1.0])) == 2.0**-60
    assert exact.error(np.array([1.0 + 2.0**-52])) == 2.0**-52 - 2.0**-60
    assert exact.error(np.array([np.nan])) == np.inf
