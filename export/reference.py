"""What a rotation is, in float64 and without any of the code that it is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rope_cpu import tolerance

if TYPE_CHECKING:
    from rope_cpu import RotaryEmbedding

Float64 = NDArray[np.float64]
Wide = NDArray[np.longdouble]


def turns(rope: RotaryEmbedding, ids: NDArray[Any], factor: float) -> tuple[Wide, Wide, Float64]:
    """Return cos and sin times a factor, and how many roundings of 2^-53 a float64 angle may be off by.

    Those are |p·ω| for one axis; a sum over n axes rounds n products and n − 1 sums of them. With angle_dtype float32
    angles, cos, sin and their products with the factor are rounded to float32, as that arithmetic does.
    ids: (batch, seq), or (batch, seq, axes) with several axes. Each result is (batch, seq, heads or 1, pairs).
    """
    omega = rope.spec.inv_freq[0]
    position = ids.reshape(*ids.shape[:2], rope.axes, 1, 1)
    size = np.abs(position * omega).sum(axis=2) * np.maximum((omega != 0).sum(axis=0), 1)
    if rope.spec.angle_dtype == "float32":
        products = position.astype(np.float32) * omega.astype(np.float32)
        made = _cos_sin(products.sum(axis=2, dtype=np.float32))
        cos, sin = ((x.astype(np.float32) * np.float32(factor)).astype(np.longdouble) for x in made)
    else:
        cos, sin = (factor * x for x in _exact_cos_sin(position, omega))
    return cos, sin, size


def _cos_sin(angle: NDArray[Any]) -> tuple[Wide, Wide]:
    wide = angle.astype(np.longdouble)
    return np.cos(wide), np.sin(wide)


def _exact_cos_sin(position: NDArray[Any], omega: Float64) -> tuple[Wide, Wide]:
    """Return cos and sin of Σ position·omega over the axes, without rounding an angle.

    A frequency is two parts of at most 29 bits, whose products with positions below 2^35 are exact in the 64 bits of a
    long double (where it has them); rotations by the products follow each other.
    """
    high = omega.astype(np.float32).astype(np.float64)
    shape = (*position.shape[:2], *omega.shape[1:])
    cos, sin = np.ones(shape, np.longdouble), np.zeros(shape, np.longdouble)
    for axis, part in ((axis, part) for part in (high, omega - high) for axis in range(len(omega))):
        c, s = _cos_sin(position[:, :, axis].astype(np.longdouble) * part[axis].astype(np.longdouble))
        cos, sin = cos * c - sin * s, sin * c + cos * s
    return cos, sin


def rotated(
    rope: RotaryEmbedding, x: NDArray[Any], ids: NDArray[Any], dtype: np.dtype[Any], *, inverse: bool, computed: bool
) -> tuple[Float64, Float64, Float64]:
    """Return the exact rotation of `x` (batch, seq, heads, head_dim) and how far a result of `dtype` may lie from it.

    computed: angles are products in float64, rounded, rather than looked up. How much farther that may take a result,
    0 without, is the third array.
    """
    factor = 1 / rope.attention_factor if inverse else rope.attention_factor
    cos, sin, size = turns(rope, ids, factor)
    repeat = x.shape[2] // cos.shape[2] if cos.shape[2] > 1 else 1
    cos, sin, size = np.repeat(cos, repeat, axis=2), np.repeat(sin, repeat, axis=2), np.repeat(size, repeat, axis=2)
    sin = -sin if inverse else sin
    first, second = rope.spec.pair_elements()
    exact = x.astype(np.float64)
    a, b = exact[..., first], exact[..., second]
    bound, by_angles = np.zeros_like(exact), np.zeros_like(exact)
    off = size * 2.0**-53 * factor * (np.abs(a) + np.abs(b)) if computed else 0.0
    for elements, value in ((first, a * cos - b * sin), (second, b * cos + a * sin)):
        rounded = value.astype(np.float64)  # the one rounding of this reference
        exact[..., elements] = rounded
        allowed = tolerance.rotation_bound(rounded, a, b, factor, dtype) + tolerance.half_ulp(rounded, np.float64)
        bound[..., elements], by_angles[..., elements] = allowed, off
    return exact, bound, by_angles


def carried(rope: RotaryEmbedding, variance: Float64) -> Float64:
    """Return what a rotation makes of variances (…, head_dim) that its input comes with: each one's and its pair's."""
    first, second = rope.spec.pair_elements()
    grown = variance.copy()
    both = rope.attention_factor**2 * (variance[..., first] + variance[..., second])
    grown[..., first] = grown[..., second] = both
    return grown
