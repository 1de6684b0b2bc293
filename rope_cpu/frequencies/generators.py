"""Commuting antisymmetric generators → frequencies and an orthogonal basis: the most general rotation there is."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments.scalars import real_array, real_number
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.spec import LARGEST_FREQUENCY, RopeSpec, from_inv_freq

# Draws of the one combination whose eigenvectors are used; the best is kept. A draw is bad only where two different
# planes happen to get nearly the same frequency in it.
_DRAWS = 6

_EPS = float(np.finfo(np.float64).eps)


def solve(generators: ArrayLike, tolerance: float | None = None) -> tuple[RopeSpec, Float64]:
    """Return the spec and the basis Q of commuting generators, see `RotaryEmbedding.from_generators`."""
    given = real_array("generators", generators)
    matrices = _matrices(given)
    tolerances = _tolerances(matrices, given.dtype, tolerance)
    _refuse_asymmetry(matrices, tolerances)
    antisymmetric = (matrices - matrices.transpose(0, 2, 1)) / 2
    _refuse_noncommuting(antisymmetric, tolerances)
    basis, inv_freq = _planes(antisymmetric, tolerances)
    pairs = inv_freq.shape[1]
    order = np.lexsort(-np.abs(inv_freq[::-1]))  # fastest planes first, axis 0 before the others
    columns = np.concatenate([order, pairs + order, np.arange(2 * pairs, len(basis))])
    spec = from_inv_freq(inv_freq[:, order], head_dim=len(basis), rope_type="generators")
    return spec, np.ascontiguousarray(basis[:, columns])


def _matrices(given: NDArray[Any]) -> Float64:
    """Return the generators as float64 (axes, head_dim, head_dim)."""
    matrices = given.astype(np.float64)
    if matrices.ndim == 2:
        matrices = matrices[None]
    if (
        matrices.ndim != 3
        or matrices.shape[0] == 0
        or matrices.shape[1] != matrices.shape[2]
        or matrices.shape[1] < 2
    ):
        raise ValueError(
            f"`generators` has shape {given.shape}; it must be (axes, head_dim, head_dim), square matrices"
        )
    for axis, matrix in enumerate(matrices):
        if not np.isfinite(matrix).all():
            raise ValueError(
                f"`generators`[{axis}] holds {matrix[~np.isfinite(matrix)][0]}; it must be finite"
            )
        if (
            np.abs(matrix).max() > LARGEST_FREQUENCY
        ):  # no entry is larger than the fastest frequency
            raise ValueError(
                f"`generators`[{axis}] reaches {np.abs(matrix).max()}, which is beyond ±2^40"
            )
    return matrices


def _tolerances(matrices: Float64, dtype: np.dtype[Any], tolerance: float | None) -> Float64:
    """Return how far each generator may be from antisymmetric, in radians per unit of position."""
    sums = 64 * matrices.shape[1]  # units in which sums of head_dim products may err
    largest = np.abs(matrices).max(axis=(1, 2))
    if tolerance is not None:
        given = real_number("tolerance", tolerance, zero=True)
        return np.array([max(given, sums * _EPS * entry) for entry in largest])
    stored = max(_EPS, float(ml_dtypes.finfo(dtype).eps)) if dtype.kind not in "iu" else _EPS
    # Nothing computes matrices in 16 bits; they are stored so.
    computed = min(stored, float(np.finfo(np.float32).eps))
    # A logarithm errs as the rotation matrix does, whose entries reach 1 however slow it rotates.
    tolerances: Float64 = sums * computed * np.maximum(largest, 1.0) + 2 * stored * largest
    return tolerances


def _refuse_asymmetry(matrices: Float64, tolerances: Float64) -> None:
    for axis, (matrix, tolerance) in enumerate(zip(matrices, tolerances, strict=True)):
        worst = np.abs(matrix + matrix.T)
        if worst.max() > tolerance:
            row, column = np.unravel_index(worst.argmax(), worst.shape)
            raise ValueError(
                f"`generators`[{axis}] is not antisymmetric: B + Bᵀ is {worst.max():.3g} at "
                f"({row}, {column}), it may be {tolerance:.3g} at most; give (B - B.T) / 2, "
                "or how far it is off as `tolerance`"
            )


def _refuse_noncommuting(matrices: Float64, tolerances: Float64) -> None:
    # Entries that are off by half the tolerance t₀ of B₀ change an element of B₀·B₁ - B₁·B₀
    # by √head_dim·t₀·‖B₁‖ at most.
    share = math.sqrt(matrices.shape[1])
    norms = [_norm(matrix) for matrix in matrices]
    for first, second in combinations(range(len(matrices)), 2):
        a, b = matrices[first], matrices[second]
        worst = np.abs(a @ b - b @ a).max()
        bound = share * (tolerances[first] * norms[second] + tolerances[second] * norms[first])
        if worst > bound:
            raise ValueError(
                f"`generators`[{first}] and `generators`[{second}] do not commute: |B{first}·B{second} - "
                f"B{second}·B{first}| reaches {worst:.3g}, it may be {bound:.3g} at most; "
                "give generators that do, or how far they are off as `tolerance`"
            )


def _planes(matrices: Float64, tolerances: Float64) -> tuple[Float64, Float64]:
    """Return the orthogonal basis and the frequencies (axes, planes).

    The columns of the basis: x of all planes, y of all planes, the direction left over.
    """
    # The norm of a matrix whose entries are within the tolerance is no larger.
    bounds = matrices.shape[1] * tolerances
    norms = np.array([_norm(matrix) for matrix in matrices])
    # Divided by their norms, slow generators are solved as exactly as fast ones. One that consists
    # of little but its error would spoil the others so: then each is divided by its error.
    for scale in (norms, bounds):
        basis, off = _best_planes(matrices, np.where(scale > 0, scale, 1.0))
        if (off <= bounds).all():
            return basis, _frequencies(matrices, basis)
    axis = int(np.argmax(off - bounds))
    raise ValueError(
        f"`generators` have no common planes of rotation: `generators`[{axis}] couples different "
        f"planes by {off[axis]:.3g}, it may be {bounds[axis]:.3g} at most; they commute too inexactly"
    )


def _frequencies(matrices: Float64, basis: Float64) -> Float64:
    """Return the frequency yᵀ·B·x of each plane (x, y) of the basis, (axes, planes)."""
    pairs = len(basis) // 2
    x, y = basis[:, :pairs], basis[:, pairs : 2 * pairs]
    found: Float64 = np.einsum("di,adi->ai", y, matrices @ x)
    return found


def _best_planes(matrices: Float64, scale: Float64) -> tuple[Float64, Float64]:
    """Return the basis that fits best, and what each matrix has outside its planes."""
    random = np.random.default_rng(0)
    draws = []
    for _ in range(_DRAWS if len(matrices) > 1 else 1):
        weights = random.uniform(0.5, 1.5, len(matrices)) / scale
        basis = _planes_of(np.tensordot(weights, matrices, 1))
        draws.append((basis, _off_planes(basis, matrices)))
    return min(draws, key=lambda draw: float((draw[1] / scale).max()))


def _planes_of(combined: Float64) -> Float64:
    """Return a basis: the planes that one antisymmetric matrix rotates, and the directions that it leaves."""
    size = len(combined)
    # B v = -iλ v with v = (x + iy)/√2 means B x = λ y and B y = -λ x: the plane (x, y) rotates by λ.
    values, vectors = np.linalg.eigh(1j * combined)
    rotating = values > 4 * size * _EPS * max(np.abs(values).max(), np.finfo(float).tiny)
    planes = _phased(vectors[:, rotating])
    # Where frequencies are tiny, v is mixed with its conjugate: the nearest orthonormal set mends it.
    left, _, right = np.linalg.svd(
        np.sqrt(2) * np.concatenate([planes.real, planes.imag], axis=1), full_matrices=False
    )
    frame = left @ right
    rest = (
        np.linalg.svd(frame, full_matrices=True)[0][:, frame.shape[1] :]
        if frame.shape[1]
        else np.eye(size)
    )
    count, spare = planes.shape[1], rest.shape[1] // 2
    return np.concatenate(
        [frame[:, :count], rest[:, :spare], frame[:, count:], rest[:, spare:]], axis=1
    )


def _phased(vectors: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Make the largest element of each vector positive, so that block-diagonal generators keep their basis."""
    if vectors.shape[1] == 0:
        return vectors
    # Ties between elements of one size are broken towards the first, whatever the rounding.
    largest = np.argmax(np.round(np.abs(vectors), 9), axis=0)
    element = vectors[largest, np.arange(vectors.shape[1])]
    phased: NDArray[np.complex128] = vectors * (element.conj() / np.abs(element))
    return phased


def _off_planes(basis: Float64, matrices: Float64) -> Float64:
    """Return the largest element that each matrix has outside the 2 x 2 blocks of the planes."""
    seen = np.abs(basis.T @ matrices @ basis)
    pairs = basis.shape[0] // 2
    here = np.arange(pairs)
    seen[:, here, pairs + here] = 0.0
    seen[:, pairs + here, here] = 0.0
    largest: Float64 = seen.max(axis=(1, 2))
    return largest


def _norm(matrix: Float64) -> float:
    return float(np.linalg.norm(matrix, 2))
