"""The general solution against scipy's matrix exponential, and refusals that name the matrices at fault."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import inv_freq
from scipy.linalg import expm

from rope_cpu import RotaryEmbedding
from rope_cpu.frequencies.generators import solve


def rotated(spec, x, position):
    """Rotate one vector by the definition of half-split pairs."""
    pairs = spec.inv_freq.shape[3]
    angle = np.asarray(position) @ spec.inv_freq[0, :, 0]
    a, b, rest = x[:pairs], x[pairs : 2 * pairs], x[2 * pairs :]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle), rest])


def generators_of(frequencies, size, basis=None):
    """Return generators (axes, size, size) that rotate planes (2i, 2i + 1) of the basis by the frequencies."""
    frequencies = np.atleast_2d(np.asarray(frequencies, float))
    matrices = np.zeros((len(frequencies), size, size))
    even = 2 * np.arange(frequencies.shape[1])
    matrices[:, even + 1, even], matrices[:, even, even + 1] = frequencies, -frequencies
    return matrices if basis is None else basis @ matrices @ basis.T


def orthogonal(size, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))[0]


def check(generators, positions, tolerance=1e-12):
    spec, basis = solve(generators)
    size = generators.shape[-1]
    np.testing.assert_allclose(basis.T @ basis, np.eye(size), atol=1e-13)
    x = np.random.default_rng(5).normal(size=size)
    for position in positions:
        exact = expm(np.tensordot(position, generators.reshape(-1, size, size), 1)) @ x
        np.testing.assert_allclose(basis @ rotated(spec, basis.T @ x, position), exact, atol=tolerance)
    return spec, basis


RANDOM = np.random.default_rng(3)
CASES = {
    "one axis": generators_of(RANDOM.normal(size=8), 16, orthogonal(16)),
    "two axes, mixed": generators_of(RANDOM.normal(size=(2, 8)), 16, orthogonal(16)),
    "three axes, 128": generators_of(RANDOM.normal(size=(3, 64)), 128, orthogonal(128)),
    "2-D axial": generators_of(np.kron(np.eye(2), inv_freq(32)), 64, orthogonal(64)),
    "slow frequencies": generators_of(np.kron(np.eye(2), inv_freq(64, 1e9)), 128, orthogonal(128)),
    "the document's 4 x 4": generators_of(np.eye(2), 4),
    "its 3 x 3": np.array([[[0, -0.3, -1.1], [0.3, 0, -0.7], [1.1, 0.7, 0]]]),
    "one frequency for all planes": generators_of(np.ones((2, 8)), 16, orthogonal(16)),
    "repeated and opposite": generators_of([[1, 1, -1, 2, 0], [1, 1, 1, 0, 0]], 10, orthogonal(10)),
    "planes left alone": generators_of([[1.0, 0.5]], 9, orthogonal(9)),
    "no rotation at all": np.zeros((2, 6, 6)),
    "an axis that does not rotate": generators_of([[1.0, 2.0], [0, 0]], 4, orthogonal(4)),
    "axes of very different speed": generators_of([[1e-7, 2e-7, 0], [3, 1, 2]], 6, orthogonal(6)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_matrix_exponential(name):
    generators = CASES[name]
    # expm's own error grows with the norm; positions keep |p·B| below about 10.
    check(generators, RANDOM.uniform(-3, 3, size=(4, len(generators))))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3), st.integers(2, 11), st.integers(0, 2**31), st.booleans())
def test_any_commuting_family(count, size, seed, whole):
    random = np.random.default_rng(seed)
    shape = (count, size // 2)
    frequencies = random.integers(-2, 3, size=shape) if whole else random.normal(size=shape)
    check(generators_of(frequencies, size, orthogonal(size, seed)), random.uniform(-2, 2, size=(2, count)))


def test_frequencies_are_those_put_in():
    frequencies = np.array([[3.0, 2.0, 0.5], [0.1, -0.2, 0.3]])
    spec, _ = solve(generators_of(frequencies, 6, orthogonal(6)))
    found = spec.inv_freq[0, :, 0]
    np.testing.assert_allclose(found * np.sign(found[0]), frequencies, atol=1e-14)


def test_power_of_an_orthogonal_matrix():
    """R_n = Oⁿ for an orthogonal O = expm(B)."""
    generator = generators_of(RANDOM.uniform(-3, 3, size=5), 10, orthogonal(10))[0]
    spec, basis = solve(generator)
    power, x = np.linalg.matrix_power(expm(generator), 7), RANDOM.normal(size=10)
    np.testing.assert_allclose(basis @ rotated(spec, basis.T @ x, [7]), power @ x, atol=1e-12)


def test_folding_the_basis_into_projections_keeps_scores():
    generators = CASES["two axes, mixed"]
    spec, basis = solve(generators)
    queries, keys = RANDOM.normal(size=(16, 24)), RANDOM.normal(size=(16, 24))
    x, y, m, n = RANDOM.normal(size=24), RANDOM.normal(size=24), np.array([1.5, -2]), np.array([0.25, 3])
    exact = (queries @ x) @ expm(np.tensordot(n - m, generators, 1)) @ (keys @ y)
    folded = rotated(spec, (basis.T @ queries) @ x, m) @ rotated(spec, (basis.T @ keys) @ y, n)
    assert folded == pytest.approx(exact, abs=1e-10)


def test_generators_in_block_form_keep_their_basis():
    _, basis = solve(generators_of([[3.0, 2.0, 1.0]], 6))
    assert np.array_equal(np.abs(basis), np.abs(basis).round())


def test_float32_generators_are_taken_at_their_precision():
    generators = generators_of(RANDOM.normal(size=(2, 8)), 16, orthogonal(16)).astype(np.float32)
    spec, _ = solve(generators)
    assert spec.axes == 2


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


@pytest.mark.parametrize(
    ("generators", "error", "message"),
    [
        (skewed(1, 0.25), ValueError, "`generators`[1] is not antisymmetric: B + Bᵀ is 0.25 at (1, 2)"),
        (skewed(2, 1e-9), ValueError, "`generators`[2] is not antisymmetric: B + Bᵀ is 1e-09"),
        (noncommuting(), ValueError, "`generators`[1] and `generators`[2] do not commute: |B1·B2 - B2·B1| reaches 0.5"),
        (np.zeros((2, 3, 4)), ValueError, "`generators` has shape (2, 3, 4)"),
        (np.zeros(4), ValueError, "`generators` has shape (4,)"),
        (np.full((2, 4, 4), np.nan), ValueError, "`generators`[0] holds nan"),
        (np.zeros((1, 4, 4), complex), TypeError, "`generators` has dtype complex128"),
        ([[0.0, 1e200], [-1e200, 0.0]], ValueError, "`generators`[0] reaches 1e+200, which is beyond ±2^40"),
        ([[1.0], [1.0, 2.0]], ValueError, "`generators` is a list of unequal rows"),
    ],
)
def test_refusals_name_the_matrices_and_by_how_much(generators, error, message):
    with pytest.raises(error, match=re.escape(message)):
        RotaryEmbedding.from_generators(generators)
