"""Positions recovered from rotations, and the range in which they are unique."""

from __future__ import annotations

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies import axes, spec
from rope_cpu.frequencies.position_recovery import (
    positions_from_cos_sin,
    positions_from_vectors,
    separation,
    unique_range,
)

RANDOM = np.random.default_rng(11)
DENSE = RANDOM.normal(size=(2, 32)) * 10.0 ** -RANDOM.uniform(0, 3, size=32)
HEADS = RANDOM.normal(size=(2, 6, 16)) * 10.0 ** -RANDOM.uniform(0, 3, size=16)

# Frequencies, low, high.
RANGES = {
    "1-D, base 1e4": (axes.base_frequencies(1e4, 128), -20000, 34000),
    "1-D, base 5e5": (axes.base_frequencies(5e5, 128), 0, 2_500_000),
    "2-D": (axes.axial(64, 2).inv_freq[0, :, 0], 0, 35000),
    "3-D": (axes.axial(128, 3, axis_dims=(16, 56, 56)).inv_freq[0, :, 0], (-50, 0, 0), (50, 1000, 3000)),
    "M-RoPE": (axes.mrope(128, [24, 20, 20], rope_theta=5e6, mrope_interleaved=True).inv_freq[0, :, 0], 0, 262144),
    "axes of very different speed": (np.diag([1.0, 1e-9]), 0, (6, 6e9)),
    "mixed": (DENSE, -64, 64),
    "mixed, by head": (HEADS, -64, 64),
}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_positions_come_back_from_cos_and_sin(name, dtype):
    inv_freq, low, high = RANGES[name]
    matrix = inv_freq.reshape(1 if inv_freq.ndim == 1 else len(inv_freq), -1)
    positions = RANDOM.uniform(low, high, size=(300, len(matrix)))
    angles = positions @ matrix
    shape = (3, 100, *inv_freq.shape[min(1, inv_freq.ndim - 1) :])
    cos, sin = (np.reshape(f(angles).astype(dtype), shape) for f in (np.cos, np.sin))
    found = positions_from_cos_sin(0.5 * cos, 0.5 * sin, inv_freq, low, high)
    assert found.shape == ((3, 100) if inv_freq.ndim == 1 else (3, 100, len(matrix)))
    # The fastest pairs alone give p to (error of an angle) / ω; an angle errs by eps, at 45 degrees by eps/√2.
    fastest = np.abs(matrix).max(axis=1)
    error = np.abs(found.reshape(300, -1) - positions) * fastest
    assert error.max() < 2 * np.finfo(dtype).eps + 1e-9


def test_documents_four_by_four():
    """(x, y) from the 4 x 4 matrix itself: its first and third columns are images of unit vectors."""
    x, y = 1.25, -2.5
    rotary = spec.from_inv_freq(np.eye(2), interleaved=True)
    before = np.array([1.0, 0, 1, 0])
    after = np.array([np.cos(x), np.sin(x), np.cos(y), np.sin(y)])
    found = positions_from_vectors(before, after, rotary, -3, 3)
    np.testing.assert_allclose(found, [x, y], atol=1e-15)


def test_positions_come_back_from_every_dtype(dtype, rng):
    # In bfloat16 each of a pair's two elements, or cos and sin, is off by 2^-9 of it at most, so their angle by less
    # than 2^-8. The fastest pair, a radian per position, may miss that by as much again.
    rope, tolerance = RotaryEmbedding(16), 2.0**-8
    x = rng.uniform(1, 2, (1, 4, 1, 16)).astype(dtype)
    found = positions_from_vectors(x, rope.rotate(x), rope.spec, 0, 20, tolerance=tolerance)
    np.testing.assert_allclose(found[0, :, 0], np.arange(4), atol=2 * tolerance)
    found = positions_from_cos_sin(*rope.cos_sin(np.arange(4), dtype), rope.inv_freq, 0, 20, tolerance=tolerance)
    np.testing.assert_allclose(found, np.arange(4), atol=2 * tolerance)


@pytest.mark.parametrize(("interleaved", "span"), [(False, "axis"), (False, "head"), (True, "axis")])
def test_positions_come_back_from_vectors(interleaved, span):
    rotary = axes.axial(20, 2, axis_dims=(8, 10), interleaved=interleaved, span=span)
    if interleaved:
        members = [(2 * i, 2 * i + 1) for i in range(9)]
    elif span == "head":
        members = [(i, i + 9) for i in range(9)]
    else:
        members = [(i, i + 4) for i in range(4)] + [(8 + i, 13 + i) for i in range(5)]
    positions = RANDOM.uniform(0, 500, size=(50, 2))
    before = RANDOM.normal(size=(50, 20))
    after = before.copy()
    for pair, (a, b) in enumerate(members):
        z = (before[:, a] + 1j * before[:, b]) * np.exp(1j * positions @ rotary.inv_freq[0, :, 0, pair])
        after[:, a], after[:, b] = z.real, z.imag
    found = positions_from_vectors(before.astype(np.float32), after.astype(np.float32), rotary, 0, 500)
    np.testing.assert_allclose(found, positions, atol=2e-6)


def test_range_is_one_turn_of_the_slowest_pair():
    assert unique_range([1.0, 0.25, 0.0]).tolist() == pytest.approx([8 * np.pi])
    assert unique_range([[1, 0, 0.5], [0, -2, 0]]).tolist() == pytest.approx([4 * np.pi, np.pi])
    assert unique_range([[1.0, 0.5], [0, 0]]).tolist() == pytest.approx([4 * np.pi, 0])


def test_range_of_mixed_frequencies_is_safe():
    """No difference inside the range leaves every pair where it was: the fastest way out is tried on a fine net."""
    reach = unique_range(DENSE)[0] * 0.999
    net = np.stack(np.meshgrid(*[np.linspace(-reach, reach, 801)] * 2), -1).reshape(-1, 2)
    net = net[np.abs(net).max(axis=1) > reach / 50]
    angles = net @ DENSE
    turned = np.abs(angles - 2 * np.pi * np.rint(angles / (2 * np.pi))).max(axis=1)
    assert turned.min() > 0.05


def test_range_of_mixed_frequencies_is_as_large_as_it_can_be():
    """(π, π) turns the first pair by a whole turn and the second not at all."""
    inv_freq = [[1.0, 0.5], [1.0, -0.5]]
    assert unique_range(inv_freq).tolist() == pytest.approx([np.pi, np.pi])
    angles = np.array([np.pi, np.pi]) @ inv_freq
    np.testing.assert_allclose(np.exp(1j * angles), 1, atol=1e-15)


def test_parallel_mixed_frequencies_determine_nothing():
    assert unique_range([[1.0, 2.0], [1.0, 2.0]]).tolist() == [0, 0]


def test_separation_is_the_brute_force_minimum():
    frequencies = [0.9, 0.11]
    worst = min(max(abs((d * w + np.pi) % (2 * np.pi) - np.pi) for w in frequencies) for d in range(1, 501))
    assert separation(frequencies, 500) == pytest.approx(worst, rel=1e-12)
    assert separation([2 * np.pi / 7], 7) == pytest.approx(0, abs=1e-14)


def test_text_positions_differ_by_a_radian():
    """Base 10000: two positions up to 131072 apart differ by 1 radian at least in some pair."""
    assert separation(axes.base_frequencies(1e4, 128), 131072) == 1.0


def cos_sin(position, inv_freq):
    angle = position * np.asarray(inv_freq)
    return np.cos(angle), np.sin(angle)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: positions_from_cos_sin(*cos_sin(3, f), f, 0, 26), "tell positions apart only within"),
        (lambda f: positions_from_cos_sin(*cos_sin(24, f), f, 0, 20), "are not those of a position from"),
        (lambda f: positions_from_cos_sin(*cos_sin(22, f), f, 0, 20), "are not those of a position from"),
        (lambda f: positions_from_cos_sin(*cos_sin(3, f), f, 5, 2), "must be a range"),
        (lambda f: positions_from_cos_sin(np.zeros(2), np.zeros(2), f, 0, 2), "both 0"),
        (lambda f: positions_from_cos_sin(np.ones(3), np.ones(3), f, 0, 2), "must end in"),
        (lambda f: positions_from_vectors(np.ones(3), np.ones(3), spec.from_inv_freq(f), 0, 2), "must end in 4"),
        (lambda f: positions_from_vectors([1, 0, 0, 0], [1, 0, 0, 0], spec.from_inv_freq(f), 0, 2), "both 0"),
        (lambda f: positions_from_cos_sin(*cos_sin(3, f), f, 4, 20), "are not those of a position from"),
        (lambda f: positions_from_cos_sin(*cos_sin(np.nan, f), f, 4, 20), "`cos` holds nan"),
        (lambda f: positions_from_cos_sin(*cos_sin(3, f), f, [0, 0], 20), r"`low` has shape \(2,\)"),
        (lambda f: positions_from_cos_sin(*cos_sin(3, f), f, 0, 20, tolerance=0), "`tolerance` is 0"),
        (lambda f: separation([f, f], 3), "2 axes"),
        (lambda f: separation(f, 0), "`reach` is 0"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call([1.0, 0.25])
