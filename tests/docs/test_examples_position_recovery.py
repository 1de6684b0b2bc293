"""The example that recovers positions from rotations, over the range in which they are unique."""

import runpy
from pathlib import Path

import numpy as np
import pytest

from rope_cpu import RotaryEmbedding as R

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "position_recovery.py"))
unique_range, from_cos_sin, from_vectors = (
    EXAMPLE[name] for name in ("unique_range", "positions_from_cos_sin", "positions_from_vectors")
)


def dense(rng):
    """Return frequencies of two axes that determine a position.

    The direction of each pair is nearly orthogonal to that of the next slower one.
    """
    pair = np.arange(16)
    speed = 10.0 ** (-pair / 5) * rng.uniform(1, 1.1, size=16)
    direction = np.pi / 2 * (pair % 2) + rng.uniform(-0.3, 0.3, size=16)
    return speed * [np.cos(direction), np.sin(direction)]


# Rotation, low, high.
RANGES = {
    "1-D, base 1e4": (R(128), -20000, 34000),
    "1-D, base 5e5": (R(128, rope_theta=5e5), 0, 2_500_000),
    "2-D": (R.axial(64, 2), 0, 35000),
    "3-D": (R.axial(128, 3, axis_dims=(16, 56, 56)), (-50, 0, 0), (50, 1000, 3000)),
    "M-RoPE": (R.mrope(128, [24, 20, 20], rope_theta=5e6, mrope_interleaved=True), 0, 262144),
    "axes of very different speed": (R.from_inv_freq(np.diag([1.0, 1e-9])), 0, (6, 6e9)),
}


@pytest.mark.parametrize("name", [*RANGES, "mixed"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_positions_come_back_from_cos_and_sin(name, dtype, rng):
    rope, low, high = RANGES[name] if name != "mixed" else (R.from_inv_freq(dense(rng)), -64, 64)
    positions = rng.uniform(low, high, size=(3, 100, rope.axes))
    matrix = np.atleast_2d(rope.inv_freq)
    cos, sin = (f(positions @ matrix).astype(dtype) for f in (np.cos, np.sin))
    found = from_cos_sin(cos, sin, rope, low, high)
    assert found.shape == ((3, 100) if rope.axes == 1 else (3, 100, rope.axes))
    # Least squares over all pairs. An angle has the error eps, at 45 degrees eps/√2, plus rounding
    # where it is large.
    error = np.abs(found.reshape(positions.shape) - positions)
    reach = np.abs(np.linalg.pinv(matrix)).sum(axis=0)
    assert (error <= (2 * np.finfo(dtype).eps + 1e-9) * reach).all()


def test_documents_four_by_four():
    """(x, y) from the 4 x 4 matrix: its first and third columns are rotated unit vectors."""
    x = 1.25
    y = -2.5
    after = np.array([np.cos(x), np.sin(x), np.cos(y), np.sin(y)])
    found = from_vectors(
        np.array([1.0, 0, 1, 0]), after, R.from_inv_freq(np.eye(2), interleaved=True), -3, 3
    )
    np.testing.assert_allclose(found, [x, y], rtol=0, atol=8 * 2.0**-52)


@pytest.mark.parametrize(
    ("interleaved", "span"), [(False, "axis"), (False, "head"), (True, "axis")]
)
def test_positions_come_back_from_vectors(interleaved, span, rng):
    rope = R.axial(20, 2, axis_dims=(8, 10), interleaved=interleaved, span=span)
    positions = rng.uniform(0, 500, size=(1, 50, 2))
    before = rng.normal(size=(1, 50, 1, 20))
    after = rope.rotate(before.astype(np.float32), positions)
    found = from_vectors(before.astype(np.float32), after, rope, 0, 500)
    # The error of both elements of a pair is ½ulp + 3u(|a| + |b|), that of its angle 7.5u. Least
    # squares over the frequencies of an axis multiply it by Σω / Σω², which is below 1.2.
    np.testing.assert_allclose(found[:, :, 0], positions, rtol=0, atol=1.2 * 7.5 * 2.0**-24)


@pytest.mark.parametrize(
    ("inv_freq", "ranges"),
    [
        ([1.0, 0.25, 0.0], [8 * np.pi]),
        ([[1, 0, 0.5], [0, -2, 0]], [4 * np.pi, np.pi]),
        ([[1.0, 0.5], [0, 0]], [4 * np.pi, 0]),
        # (π, π): a whole revolution of one pair, none of the other
        ([[1.0, 0.5], [1.0, -0.5]], [np.pi, np.pi]),
        ([[1.0, 2.0], [1.0, 2.0]], [0, 0]),
    ],
)
def test_range_in_which_positions_are_unique(inv_freq, ranges):
    assert unique_range(R.from_inv_freq(inv_freq)).tolist() == pytest.approx(ranges, rel=1e-15)


def test_range_of_mixed_frequencies_is_safe(rng):
    """No difference of positions inside the range leaves all pairs unchanged, on a fine net."""
    frequencies = dense(rng)
    reach = unique_range(R.from_inv_freq(frequencies))[0] * 0.999
    net = np.stack(np.meshgrid(*[np.linspace(-reach, reach, 801)] * 2), -1).reshape(-1, 2)
    net = net[np.abs(net).max(axis=1) > reach / 50]
    angles = net @ frequencies
    assert np.abs(angles - 2 * np.pi * np.rint(angles / (2 * np.pi))).max(axis=1).min() > 0.05


@pytest.mark.parametrize(
    ("position", "low", "high", "message"),
    [
        (3, 0, 26, "are not unique"),
        (24, 0, 20, "not those of"),
        (22, 0, 20, "not those of"),
        (3, 4, 20, "not those of"),
    ],
)
def test_ambiguous_and_wrong_rotations_are_refused(position, low, high, message):
    rope = R.from_inv_freq([1.0, 0.25])
    with pytest.raises(ValueError, match=message):
        from_cos_sin(*rope.cos_sin(np.array([position])), rope, low, high)


def test_it_prints_positions_that_came_back(capsys):
    EXAMPLE["main"]()
    for line in capsys.readouterr().out.splitlines()[1:]:
        given, back = line.split(" came back as ")
        assert given == back
