"""`RMSNorm`: the norm of queries, keys or values before their rotation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import Array
from rope_cpu.caches import set_fields

# What the append kernel takes where nothing is normalised. Nobody writes to it or to joined norms,
# but they are not read-only, because Numba takes 0.05 µs longer to unbox a read-only array.
NO_NORMS: NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass(frozen=True, init=False, repr=False, eq=False)
class RMSNorm:
    """The RMS norm of head vectors: x / sqrt(mean(x²) + eps) · (offset + weight).

    Each head vector is normalised as a whole, before the rotation, in float32. The object is
    immutable, and serves every call of its layer.

    Parameters
    ----------
    weight : array of float, (head_dim,), or None
        A factor for each element, cast to float32 first. None means no factor.
    eps : float, default 1e-6
        Added to the mean of squares; above 0.
    offset : float, default 0
        Added to the weight. Gemma's norms have the offset 1.

    Attributes
    ----------
    weight : array of float32, (head_dim,), or None
        The weight without the offset, read-only.
    eps, offset : float
        The arguments.

    Raises
    ------
    TypeError, ValueError
        If `weight` does not hold finite numbers for one head vector, if `eps` is not above 0, or if
        an offset is given without a weight.

    References
    ----------
    B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.

    Notes
    -----
    Other norms have no form here: over the whole projection of all heads (OLMo 2, MiniMax-M2),
    after the rotation (HunYuan), or with a mean subtracted (LayerNorm, Cohere).

    Examples
    --------
    >>> import numpy as np, rope_cpu
    >>> plan = rope_cpu.RotaryEmbedding(4).plan([0])
    >>> norm = rope_cpu.RMSNorm(np.ones(4, np.float32))
    >>> plan.rotate(np.float32([[[[1, 1, -1, -1]]]]) * 8, norm=norm).round(4)
    array([[[[ 1.,  1., -1., -1.]]]], dtype=float32)
    """

    weight: NDArray[np.float32] | None
    eps: float
    offset: float
    _factors: NDArray[np.float32] | None  # the weight with the offset

    def __init__(self, weight: ArrayLike | None, eps: float = 1e-6, *, offset: float = 0.0) -> None:
        scalars.float32_number("eps", eps)
        added = float(scalars.per_axis("offset", offset, 1)[0])
        checked = None if weight is None else _checked_weight(weight)
        if checked is None and added != 0:
            rule = "be 0, as `weight` is None: it is added to a weight"
            raise ArgumentError("offset", offset, rule, "give both or neither")
        factors = None
        if checked is not None:
            with np.errstate(over="ignore"):
                factors = checked + np.float32(added)
            if np.isinf(factors).any():
                raise ArgumentError("offset", offset, "be finite in float32 added to `weight`")
        set_fields(self, weight=checked, eps=float(eps), offset=added, _factors=factors)

    def __repr__(self) -> str:
        weight = "None" if self.weight is None else f"<{len(self.weight)} elements>"
        return f"RMSNorm(weight={weight}, eps={self.eps:g}, offset={self.offset:g})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RMSNorm, offset=self.offset), (self.weight, self.eps)


def _checked_weight(weight: ArrayLike) -> NDArray[np.float32]:
    """Return a weight as a read-only float32 array; raise unless it is for one head vector."""
    array = scalars.float32_array("weight", weight)
    if array.ndim != 1 or not array.size:
        raise ArgumentError("weight", Finding.shape_of(array), "be (head_dim,)")
    scalars.check_length("weight", array, limits.HEAD_DIM)
    array.flags.writeable = False
    return array


def joined(
    names: tuple[str, ...], norms: tuple[RMSNorm | None, ...], widths: tuple[int, ...]
) -> Array:
    """Return norms as the append kernel takes them, float32 (3, width + 1).

    names: the arguments that hold them, for error texts. widths: of the head vectors that each
    normalises.
    """
    for name, norm in zip(names, norms, strict=True):
        if norm is not None:
            scalars.check_type(name, norm, RMSNorm)
    return _joined(names, norms, widths)


@lru_cache(maxsize=1024)  # above the layers of several models
def _joined(
    names: tuple[str, ...], norms: tuple[RMSNorm | None, ...], widths: tuple[int, ...]
) -> Array:
    rows = np.zeros((3, max(widths) + 1), np.float32)
    for row, name, norm, width in zip(rows, names, norms, widths, strict=False):
        if norm is None:
            continue
        factors = norm._factors
        if factors is not None and len(factors) != width:
            finding = Finding(f"has a weight of {len(factors)} elements")
            raise ArgumentError(name, finding, f"have {width}, those of a head vector")
        row[:width] = 1 if factors is None else factors
        row[width] = norm.eps
    return rows
