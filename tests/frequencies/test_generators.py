"""The general solution against the matrix exponential, and refusals that name the matrices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import expm, inv_freq, rotate
from refusals import assert_refused
from scipy.linalg import logm

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.generators import solve


def rotated(spec, x, position):
    """Rotate one vector by the definition of half-split pairs."""
    angle = np.asarray(position) @ spec.inv_freq[0, :, 0]
    return rotate(x[None], np.cos(angle), np.sin(angle))[0][0]


def generators_of(frequencies, size, basis=None):
    """Return generators (axes, size, size) that rotate planes (2i, 2i + 1) of the basis."""
    frequencies = np.atleast_2d(np.asarray(frequencies, float))
    matrices = np.zeros((len(frequencies), size, size))
    even = 2 * np.arange(frequencies.shape[1])
    matrices[:, even + 1, even], matrices[:, even, even + 1] = frequencies, -frequencies
    return matrices if basis is None else basis @ matrices @ basis.T


def orthogonal(rng, size):
    return np.linalg.qr(rng.normal(size=(size, size)))[0]


def rounding(generators, position, x):
    """How far the rotated x may be off in float64.

    Products of matrices err by head_dim roundings; the squarings of expm and the frequencies by as
    many more as the angle has radians. Planes of several axes are found in a combination of the
    axes, in which the frequencies may be closer, by their number, than on each axis alone.
    """
    count, size = generators.reshape(-1, *generators.shape[-2:]).shape[:2]
    angle = np.linalg.norm(np.tensordot(position, generators.reshape(count, size, size), 1), 2)
    closeness = 1 if count == 1 else max(1, size // 2)
    return 8 * closeness * size * 2.0**-52 * (1 + angle) * np.linalg.norm(x)


def check(generators, positions, rng):
    spec, basis = solve(generators)
    size = generators.shape[-1]
    np.testing.assert_allclose(basis.T @ basis, np.eye(size), rtol=0, atol=8 * size * 2.0**-52)
    x = rng.normal(size=size)
    for position in positions:
        exact = expm(np.tensordot(position, generators.reshape(-1, size, size), 1)) @ x
        ours = basis @ rotated(spec, basis.T @ x, position)
        np.testing.assert_allclose(ours, exact, rtol=0, atol=rounding(generators, position, x))


CASES = {
    "one axis": lambda rng: generators_of(rng.normal(size=8), 16, orthogonal(rng, 16)),
    "two axes, mixed": lambda rng: generators_of(rng.normal(size=(2, 8)), 16, orthogonal(rng, 16)),
    "three axes": lambda rng: generators_of(rng.normal(size=(3, 32)), 64, orthogonal(rng, 64)),
    "2-D axial": lambda rng: generators_of(
        np.kron(np.eye(2), inv_freq(32)), 64, orthogonal(rng, 64)
    ),
    "slow frequencies": lambda rng: generators_of(
        np.kron(np.eye(2), inv_freq(64, 1e9)), 128, orthogonal(rng, 128)
    ),
    "the document's 4 x 4": lambda rng: generators_of(np.eye(2), 4),
    "its 3 x 3": lambda rng: np.array([[[0, -0.3, -1.1], [0.3, 0, -0.7], [1.1, 0.7, 0]]]),
    "one frequency for all planes": lambda rng: generators_of(
        np.ones((2, 8)), 16, orthogonal(rng, 16)
    ),
    "repeated and opposite": lambda rng: generators_of(
        [[1, 1, -1, 2, 0], [1, 1, 1, 0, 0]], 10, orthogonal(rng, 10)
    ),
    "planes left alone": lambda rng: generators_of([[1.0, 0.5]], 9, orthogonal(rng, 9)),
    "no rotation at all": lambda rng: np.zeros((2, 6, 6)),
    "an axis that does not rotate": lambda rng: generators_of(
        [[1.0, 2.0], [0, 0]], 4, orthogonal(rng, 4)
    ),
    "axes of very different speed": lambda rng: generators_of(
        [[1e-7, 2e-7, 0], [3, 1, 2]], 6, orthogonal(rng, 6)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_matrix_exponential(name, rng):
    generators = CASES[name](rng)
    # Coordinates of 1 to 3: the error of expm grows with the angle, and coordinates near 0 would
    # hide errors of the frequencies.
    positions = rng.uniform(1, 3, size=(4, len(generators))) * rng.choice(
        [-1, 1], size=(4, len(generators))
    )
    check(generators, positions, rng)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(2, 11), st.integers(0, 2**31), st.booleans())
def test_any_commuting_family(count, size, seed, whole):
    random = np.random.default_rng(seed)
    shape = (count, size // 2)
    frequencies = random.integers(-2, 3, size=shape) if whole else random.normal(size=shape)
    generators = generators_of(frequencies, size, orthogonal(random, size))
    check(generators, random.uniform(-2, 2, size=(2, count)), random)


def test_slow_axes_are_as_exact_as_fast_ones(rng):
    """Relative to its own frequencies: an axis may count in other units."""
    frequencies = np.array([[1.0, 2.0, 4.0], [3.0, 1.0, 2.0]])
    generators = generators_of(frequencies * [[1e-12], [1.0]], 6, orthogonal(rng, 6))
    spec, _ = solve(generators)
    found = np.abs(spec.inv_freq[0, :, 0]) / [[1e-12], [1.0]]
    by_speed = frequencies[:, np.argsort(-frequencies[0])]
    np.testing.assert_allclose(found, by_speed, rtol=64 * 6 * 2.0**-52, atol=0)


def rotation(rng, size):
    """Return a random rotation matrix; one in some hundred has a plane of almost π radians."""
    basis = orthogonal(rng, size)
    basis[:, 0] *= np.linalg.det(basis)
    return basis


@pytest.mark.parametrize("size", [2, 3, 6, 7, 16])
def test_logarithms_of_rotations(size, rng):
    for _ in range(10):
        o, x = rotation(rng, size), rng.normal(size=size)
        logarithm = logm(o)
        spec, basis = solve((logarithm - logarithm.T) / 2)
        ours = basis @ rotated(spec, basis.T @ x, [1])
        np.testing.assert_allclose(
            ours, o @ x, rtol=0, atol=64 * size * 2.0**-52 * np.linalg.norm(x)
        )


@pytest.mark.parametrize("size", [2, 6, 11, 24])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_families_of_logarithms(size, count, rng):
    """Their errors are those of matrices of norm 1, however slow the rotation is."""
    for speed in (1.0, 1e-6, 1e-17):
        # Planes of up to 3 radians keep their distance from half a revolution, where the logarithm
        # has a larger error.
        frequencies = rng.uniform(-2.5, 2.5, size=(count, size // 2))
        frequencies[-1] *= speed
        exact = generators_of(frequencies, size, orthogonal(rng, size))
        generators = np.stack([logm(expm(generator)) for generator in exact])
        check(
            (generators - generators.transpose(0, 2, 1)) / 2,
            rng.uniform(-2, 2, size=(2, count)),
            rng,
        )
        solve(generators)


def test_generators_in_block_form_keep_their_basis():
    _, basis = solve(generators_of([[3.0, 2.0, 1.0]], 6))
    # The planes are the elements (2i, 2i + 1): x of all, then y of all, each up to its sign.
    np.testing.assert_allclose(
        np.abs(basis), np.eye(6)[[0, 3, 1, 4, 2, 5]], rtol=0, atol=64 * 6 * 2.0**-52
    )


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("count", [1, 2])
def test_coarse_generators_are_judged_at_their_precision(name, count, rng):
    """Frequencies that keep their distance: noise couples planes by its share of that."""
    speeds = rng.permuted(np.tile([1.0, 2.0, 3.0, 4.0], (count, 1)), axis=1)
    exact = generators_of(speeds, 8, orthogonal(rng, 8))
    given = exact.astype(np.float32).astype(name)
    # As another program would have rounded it, by one unit in the last place of an entry or none.
    given[:, 0, 1] = np.nextafter(given[:, 0, 1], np.array(np.inf, name))
    spec, _ = solve(given)
    # A symmetric change of norm ε moves the frequencies of a matrix by ε at most; to first order
    # for those of an axis whose planes were found in another.
    error = np.linalg.norm(given.astype(np.float64) - exact, 2, axis=(1, 2)).max()
    assert spec.axes == count
    found = np.sort(np.abs(spec.inv_freq[0, :, 0]))
    np.testing.assert_allclose(
        found, np.tile([1.0, 2.0, 3.0, 4.0], (count, 1)), rtol=0, atol=4 * error
    )


def test_coarse_values_cast_to_float64_are_taken_with_a_tolerance(rng):
    speeds = np.array([[1.0, 2.0, 3.0, 4.0], [4.0, 2.0, 1.0, 3.0]])
    exact = generators_of(speeds, 8, orthogonal(rng, 8))
    coarse = exact + rng.uniform(-1e-6, 1e-6, size=exact.shape)
    with pytest.raises(
        ValueError,
        match=r"is not antisymmetric: .* tolerance .*; give \(B - B.T\) / 2, or .*`tolerance`",
    ):
        RotaryEmbedding.from_generators(coarse)
    with pytest.raises(
        ValueError, match=r"no common planes .* tolerance .* commute .*, or a larger `tolerance`"
    ):
        RotaryEmbedding.from_generators((coarse - coarse.transpose(0, 2, 1)) / 2)
    # Entries are off by 1e-6 at most, B + Bᵀ by twice as much.
    rope, _ = RotaryEmbedding.from_generators(coarse, tolerance=2e-6)
    found = rope.inv_freq[:, np.argsort(rope.inv_freq[0])]
    by_speed = speeds[:, np.argsort(speeds[0])]
    np.testing.assert_allclose(np.abs(found), by_speed[:, np.argsort(found[0])], rtol=0, atol=1e-4)


def test_a_tolerance_replaces_the_usual_one():
    tilted = generators_of([[1.0, 2.0]], 4)
    tilted[0, 0, 1] += 1e-14
    solve(tilted)
    rounded = generators_of([[1.0, 2.0]], 4)
    solve(rounded, 0.0)
    # What rounding explains is relative to the matrix, and allowed at any tolerance.
    solve(2.0**30 * tilted, 0.0)
    tilted[0, 0, 1] += 1e-12
    for tolerance in (0.0, 0.9e-12):
        with pytest.raises(ValueError, match=r"`generators\[0\]` is not antisymmetric"):
            solve(tilted, tolerance)
    solve(tilted, 1.2e-12)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_coarse_generators_must_be_antisymmetric_too(name):
    symmetric = np.full((1, 4, 4), 0.5).astype(name)
    with pytest.raises(ValueError, match="is not antisymmetric: B \\+ Bᵀ reaches 1;"):
        RotaryEmbedding.from_generators(symmetric)


def skewed(index, amount):
    matrices = generators_of(np.ones((3, 2)), 4)
    matrices[index, 1, 2] += amount
    return matrices


def noncommuting():
    matrices = generators_of(np.ones((3, 2)), 4)
    matrices[2] = 0
    matrices[2, 1, 2], matrices[2, 2, 1] = 0.5, -0.5
    matrices[0] = 0
    return matrices


NOT_COMMUTING = (
    r"`generators` has no common planes of rotation: entry [12] couples .* by 0.[0-9]*; .* commute"
)
FINDINGS = [
    (skewed(1, 0.25), r"`generators\[1\]` is not antisymmetric: B \+ Bᵀ reaches 0.25;"),
    (skewed(2, 1e-9), r"`generators\[2\]` is not antisymmetric: B \+ Bᵀ reaches 1e-09"),
    (noncommuting(), NOT_COMMUTING),
]


@pytest.mark.parametrize(("generators", "finding"), FINDINGS)
def test_refusals_name_the_matrices_and_by_how_much(generators, finding):
    with pytest.raises(ValueError, match=finding):
        RotaryEmbedding.from_generators(generators)


def from_generators(generators=((0.0, -1.0), (1.0, 0.0)), **tolerance):
    return RotaryEmbedding.from_generators(generators, **tolerance)


REFUSED = [
    (lambda: from_generators(np.zeros((2, 3, 4))), ValueError, "generators"),
    (lambda: from_generators(np.zeros(4)), ValueError, "generators"),
    (lambda: from_generators(np.full((2, 4, 4), np.nan)), ValueError, "generators"),
    (lambda: from_generators(np.zeros((1, 4, 4), complex)), TypeError, "generators"),
    (lambda: from_generators([[0.0, 1e200], [-1e200, 0.0]]), ValueError, "generators"),
    (lambda: from_generators([[1.0], [1.0, 2.0]]), ValueError, "generators"),
    (lambda: from_generators(tolerance=-1e-9), ValueError, "tolerance"),
    (lambda: from_generators(tolerance=np.nan), ValueError, "tolerance"),
    (lambda: from_generators(tolerance=np.inf), ValueError, "tolerance"),
    (lambda: from_generators(tolerance="1"), TypeError, "tolerance"),
    (lambda: from_generators(tolerance=True), TypeError, "tolerance"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
