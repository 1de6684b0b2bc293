"""From commuting antisymmetric generators to frequencies and an orthogonal basis.

This is the most general rotary embedding: position p acts as expm(Σ p_k B_k).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.scalars import finite_array, real_array, real_number
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.rope_types import LARGEST_FREQUENCY
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq

# Random combinations of the generators whose eigenvectors are tried. A combination is bad only if
# two different planes happen to get nearly the same frequency in it.
_COMBINATIONS = 6

_EPS = float(np.finfo(np.float64).eps)


def solve(generators: ArrayLike, tolerance: float | None = None) -> tuple[RopeSpec, Float64]:
    """Find the planes that commuting generators share: the spec and the basis.

    `RotaryEmbedding.from_generators` documents the arguments and the two results.
    """
    array = real_array("generators", generators)
    matrices = _matrices(array)
    tolerances = _tolerances(matrices, array.dtype, tolerance)
    _refuse_asymmetry(matrices, tolerances)
    antisymmetric = (matrices - matrices.transpose(0, 2, 1)) / 2
    basis, inv_freq = _common_planes(antisymmetric, tolerances)
    pairs = inv_freq.shape[1]
    order = np.lexsort(-np.abs(inv_freq[::-1]))  # fastest planes first, axis 0 before the others
    columns = np.concatenate([order, pairs + order, np.arange(2 * pairs, len(basis))])
    spec = from_inv_freq(inv_freq[:, order], head_dim=len(basis), rope_type="generators")
    return spec, np.ascontiguousarray(basis[:, columns])


def _matrices(array: NDArray[Any]) -> Float64:
    """Return the generators as float64 (axes, head_dim, head_dim)."""
    matrices = array.astype(np.float64)
    if matrices.ndim == 2:
        matrices = matrices[None]
    is_square = matrices.ndim == 3 and matrices.shape[1] == matrices.shape[2]
    if not is_square or matrices.shape[0] == 0 or matrices.shape[1] < 2:
        rule = "be (axes, head_dim, head_dim), square matrices with head_dim at least 2"
        raise ArgumentError("generators", Finding.shape_of(array), rule)
    largest = np.abs(finite_array("generators", matrices)).max()
    if largest > LARGEST_FREQUENCY:  # no entry is larger than the fastest frequency
        reached = Finding(f"reaches {largest}")
        raise ArgumentError("generators", reached, "be within ±2^40 radians per position")
    return matrices


def _tolerances(matrices: Float64, dtype: np.dtype[Any], tolerance: float | None) -> Float64:
    """Return the largest |B + Bᵀ| treated as rounding, in radians per unit of position."""
    rounding_units = 64 * matrices.shape[1]  # bound of the rounding of sums of head_dim products
    largest = np.abs(matrices).max(axis=(1, 2))
    if tolerance is not None:
        least = real_number("tolerance", tolerance, zero=True)
        return np.array([max(least, rounding_units * _EPS * entry) for entry in largest])
    is_stored_exactly = dtype.kind in "iu"
    storage_eps = _EPS if is_stored_exactly else max(_EPS, float(ml_dtypes.finfo(dtype).eps))
    # Matrices are stored in 16 bits, but computed at least in float32.
    compute_eps = min(storage_eps, float(np.finfo(np.float32).eps))
    # The error of a matrix logarithm follows that of the rotation matrix, whose entries reach 1
    # however slowly it rotates.
    computed = rounding_units * compute_eps * np.maximum(largest, 1.0)
    tolerances: Float64 = computed + 2 * storage_eps * largest
    return tolerances


def _refuse_asymmetry(matrices: Float64, tolerances: Float64) -> None:
    """Raise if a generator differs from an antisymmetric matrix by more than its tolerance."""
    deviations = np.abs(matrices + matrices.transpose(0, 2, 1)).max(axis=(1, 2))
    beyond = np.flatnonzero(deviations > tolerances)
    if beyond.size:
        axis = beyond[0]
        finding = Finding(f"is not antisymmetric: B + Bᵀ reaches {deviations[axis]:.3g}")
        rule = f"be within the tolerance {tolerances[axis]:.3g}"
        remedy = "give (B - B.T) / 2, or a larger `tolerance`"
        raise ArgumentError(f"generators[{axis}]", finding, rule, remedy)


def _common_planes(matrices: Float64, tolerances: Float64) -> tuple[Float64, Float64]:
    """Return the orthogonal basis and the frequencies (axes, planes).

    The columns of the basis are the x of all planes, the y of all planes, and for an odd head_dim
    the remaining direction.
    """
    # The norm of a matrix whose entries are within the tolerance is no larger than these bounds.
    bounds = matrices.shape[1] * tolerances
    norms = np.linalg.norm(matrices, 2, axis=(1, 2))
    # Divided by their norms, slow generators are solved as exactly as fast ones. A generator that
    # consists mostly of its own error would then spoil the others, so the second attempt divides
    # each by its error.
    for scale in (norms, bounds):
        basis, coupling = _best_basis(matrices, np.where(scale > 0, scale, 1.0))
        if (coupling <= bounds).all():
            pairs = len(basis) // 2
            x = basis[:, :pairs]
            y = basis[:, pairs : 2 * pairs]
            return basis, np.einsum("di,adi->ai", y, matrices @ x)  # yᵀ·B·x of each plane (x, y)
    axis = int(np.argmax(coupling - bounds))
    finding = Finding(
        f"has no common planes of rotation: entry {axis} couples different planes by "
        f"{coupling[axis]:.3g}"
    )
    rule = f"couple them by at most the tolerance {bounds[axis]:.3g}"
    remedy = "give generators that commute more exactly, or a larger `tolerance`"
    raise ArgumentError("generators", finding, rule, remedy)


def _best_basis(matrices: Float64, scale: Float64) -> tuple[Float64, Float64]:
    """Return the basis with the least coupling of different planes, and the coupling per matrix."""
    random = np.random.default_rng(0)
    candidates = []
    for _ in range(_COMBINATIONS if len(matrices) > 1 else 1):
        weights = random.uniform(0.5, 1.5, len(matrices)) / scale
        basis = _plane_basis(np.tensordot(weights, matrices, 1))
        candidates.append((basis, _plane_coupling(basis, matrices)))
    return min(candidates, key=lambda candidate: float((candidate[1] / scale).max()))


def _plane_basis(combined: Float64) -> Float64:
    """Return the planes that one antisymmetric matrix rotates, and the directions it fixes."""
    size = len(combined)
    # B v = -iλ v with v = (x + iy)/√2 means B x = λ y and B y = -λ x: plane (x, y) rotates by λ.
    values, vectors = np.linalg.eigh(1j * combined)
    rotating = values > 4 * size * _EPS * max(np.abs(values).max(), np.finfo(float).tiny)
    planes = _fixed_phase(vectors[:, rotating])
    # For tiny frequencies, v is mixed with its conjugate: take the nearest orthonormal set.
    plane_vectors = np.concatenate([planes.real, planes.imag], axis=1)
    left, _, right = np.linalg.svd(np.sqrt(2) * plane_vectors, full_matrices=False)
    frame = left @ right
    fixed = np.eye(size)
    if frame.shape[1]:
        fixed = np.linalg.svd(frame, full_matrices=True)[0][:, frame.shape[1] :]
    count = planes.shape[1]
    spare = fixed.shape[1] // 2
    return np.concatenate(
        [frame[:, :count], fixed[:, :spare], frame[:, count:], fixed[:, spare:]], axis=1
    )


def _fixed_phase(vectors: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Make the largest element of each vector positive, which keeps the basis of block form."""
    if vectors.shape[1] == 0:
        return vectors
    # Rounding first breaks ties between elements of equal size towards the first one.
    largest = np.argmax(np.round(np.abs(vectors), 9), axis=0)
    element = vectors[largest, np.arange(vectors.shape[1])]
    phased: NDArray[np.complex128] = vectors * (element.conj() / np.abs(element))
    return phased


def _plane_coupling(basis: Float64, matrices: Float64) -> Float64:
    """Return the largest element of each matrix outside the 2 x 2 blocks of the planes."""
    rotated = np.abs(basis.T @ matrices @ basis)
    pairs = basis.shape[0] // 2
    plane = np.arange(pairs)
    rotated[:, plane, pairs + plane] = 0.0
    rotated[:, pairs + plane, plane] = 0.0
    coupling: Float64 = rotated.max(axis=(1, 2))
    return coupling
