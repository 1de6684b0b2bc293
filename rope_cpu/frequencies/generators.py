"""Commuting antisymmetric generators → frequencies and an orthogonal basis: the most general rotation there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.frequencies.spec import LARGEST_FREQUENCY, RopeSpec, from_inv_freq
from rope_cpu.validation.scalars import Float64, real_array

# Draws of the one combination whose eigenvectors are used; the best is kept. A draw is bad only where two different
# planes happen to get nearly the same frequency in it.
_DRAWS = 6


def solve(generators: ArrayLike) -> tuple[RopeSpec, Float64]:
    """Return the spec and the basis Q of commuting generators, see `RotaryEmbedding.from_generators`."""
    matrices, eps = _matrices(generators)
    _refuse_asymmetry(matrices, eps)
    _refuse_noncommuting(matrices, eps)
    basis, inv_freq = _planes(matrices, eps)
    pairs = inv_freq.shape[1]
    order = np.lexsort(-np.abs(inv_freq[::-1]))  # fastest planes first, axis 0 before the others
    columns = np.concatenate([order, pairs + order, np.arange(2 * pairs, len(basis))])
    spec = from_inv_freq(inv_freq[:, order], head_dim=len(basis), rope_type="generators")
    return spec, np.ascontiguousarray(basis[:, columns])


def _matrices(generators: ArrayLike) -> tuple[Float64, float]:
    given = real_array("generators", generators)
    shape = given.shape
    matrices = given.astype(np.float64).reshape(1, *shape) if given.ndim == 2 else given.astype(np.float64)
    if matrices.ndim != 3 or matrices.shape[0] == 0 or matrices.shape[1] != matrices.shape[2] or matrices.shape[1] < 2:
        raise ValueError(f"`generators` has shape {shape}; it must be (axes, head_dim, head_dim), square matrices")
    for axis, matrix in enumerate(matrices):
        if not np.isfinite(matrix).all():
            raise ValueError(f"`generators`[{axis}] holds {matrix[~np.isfinite(matrix)][0]}; it must be finite")
        if np.abs(matrix).max() > LARGEST_FREQUENCY:  # no entry is larger than the fastest frequency
            raise ValueError(f"`generators`[{axis}] reaches {np.abs(matrix).max()}, which is beyond ±2^40")
    # Rounding of the entries as they were given, and of sums of head_dim products of them.
    eps = float(np.finfo(given.dtype if given.dtype.kind == "f" else np.float64).eps)
    return matrices, 4 * matrices.shape[1] * eps


def _refuse_asymmetry(matrices: Float64, eps: float) -> None:
    for axis, matrix in enumerate(matrices):
        worst = np.abs(matrix + matrix.T)
        if worst.max() > eps * np.abs(matrix).max():
            row, column = np.unravel_index(worst.argmax(), worst.shape)
            raise ValueError(
                f"`generators`[{axis}] is not antisymmetric: B + Bᵀ is {worst.max():.3g} at ({row}, {column}), "
                "it must be 0"
            )


def _refuse_noncommuting(matrices: Float64, eps: float) -> None:
    for first, second in combinations(range(len(matrices)), 2):
        a, b = matrices[first], matrices[second]
        worst = np.abs(a @ b - b @ a).max()
        if worst > eps * _norm(a) * _norm(b):
            raise ValueError(
                f"`generators`[{first}] and `generators`[{second}] do not commute: |B{first}·B{second} - "
                f"B{second}·B{first}| reaches {worst:.3g}, it must be 0"
            )


def _planes(matrices: Float64, eps: float) -> tuple[Float64, Float64]:
    """Return the orthogonal basis [x of all planes, y of all planes, leftover] and the frequencies (axes, planes)."""
    scale = np.array([_norm(matrix) or 1.0 for matrix in matrices])
    random = np.random.default_rng(0)
    weights = [random.uniform(0.5, 1.5, len(matrices)) for _ in range(_DRAWS if len(matrices) > 1 else 1)]
    draws = [_planes_of(np.tensordot(weight / scale, matrices, 1), eps) for weight in weights]
    off = [_off_planes(basis, matrices / scale[:, None, None]) for basis in draws]
    best = int(np.argmin(off))
    # The planes are determined to rounding, amplified by how close together frequencies lie.
    if off[best] > 1e3 * eps:
        raise ValueError(
            f"`generators` have no common planes of rotation: what couples different planes reaches {off[best]:.3g} "
            "of their norm; they commute too inexactly"
        )
    basis, pairs = draws[best], len(matrices[0]) // 2
    inv_freq = np.einsum("di,adi->ai", basis[:, pairs : 2 * pairs], matrices @ basis[:, :pairs])
    return basis, inv_freq


def _planes_of(combined: Float64, eps: float) -> Float64:
    """Return a basis: the planes that one antisymmetric matrix rotates, and the directions that it leaves."""
    size = len(combined)
    # B v = -iλ v with v = (x + iy)/√2 means B x = λ y and B y = -λ x: the plane (x, y) rotates by λ.
    values, vectors = np.linalg.eigh(1j * combined)
    rotating = values > eps * max(np.abs(values).max(), np.finfo(float).tiny)
    planes = _phased(vectors[:, rotating])
    # Where frequencies are tiny, v is mixed with its conjugate: the nearest orthonormal set mends it.
    left, _, right = np.linalg.svd(np.sqrt(2) * np.concatenate([planes.real, planes.imag], axis=1), full_matrices=False)
    frame = left @ right
    rest = np.linalg.svd(frame, full_matrices=True)[0][:, frame.shape[1] :] if frame.shape[1] else np.eye(size)
    count, spare = planes.shape[1], rest.shape[1] // 2
    return np.concatenate([frame[:, :count], rest[:, :spare], frame[:, count:], rest[:, spare:]], axis=1)


def _phased(vectors: NDArray[np.complex128]) -> NDArray[np.complex128]:
    """Make the largest element of each vector positive, so that block-diagonal generators keep their basis."""
    if vectors.shape[1] == 0:
        return vectors
    # Ties between elements of one size are broken towards the first, whatever the rounding.
    largest = np.argmax(np.round(np.abs(vectors), 9), axis=0)
    element = vectors[largest, np.arange(vectors.shape[1])]
    phased: NDArray[np.complex128] = vectors * (element.conj() / np.abs(element))
    return phased


def _off_planes(basis: Float64, matrices: Float64) -> float:
    """Return the largest element that the matrices have outside the 2 x 2 blocks of the planes."""
    seen = np.abs(basis.T @ matrices @ basis)
    pairs = basis.shape[0] // 2
    here = np.arange(pairs)
    seen[:, here, pairs + here] = 0.0
    seen[:, pairs + here, here] = 0.0
    return float(seen.max())


def _norm(matrix: Float64) -> float:
    return float(np.linalg.norm(matrix, 2))
