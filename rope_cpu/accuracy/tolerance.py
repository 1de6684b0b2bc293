"""The tolerance of rotated values and of cos and sin, shared by tests, `verify` and `validate`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from rope_cpu.array_types import Float64

# Rounding of the arithmetic and of cos and sin, in units of u; ideal arithmetic needs 1.3.
ARITHMETIC_ROUNDINGS = 3.0

# Absolute error of cos and sin before they are rounded to float32.
ANGLE_ERROR = 1e-9


def half_ulp(exact: ArrayLike, dtype: DTypeLike) -> Float64:
    """Return half a unit in the last place of `dtype` at `exact`, the error of one rounding."""
    info = ml_dtypes.finfo(np.dtype(dtype))
    fraction, exponent = np.frexp(np.asarray(exact, np.float64))
    least = int(np.frexp(float(info.smallest_normal))[1])
    # frexp gives zero the exponent 0, as it gives 0.5.
    exponent = np.where(fraction == 0, least, exponent)
    half: Float64 = np.ldexp(1.0, np.maximum(exponent, least) - info.nmant - 2)
    if np.dtype(dtype) == ml_dtypes.bfloat16:
        # Results below the smallest normal number become zero, as in bfloat16 hardware.
        return np.where(exponent < least, np.maximum(half, float(info.smallest_normal)), half)
    return half


def rotation_bound(
    exact: ArrayLike, x_a: ArrayLike, x_b: ArrayLike, attention_factor: float, dtype: DTypeLike
) -> Float64:
    """Return the tolerance of rotated elements: ½ ulp(exact) + 3·u·max(A·(|x_a| + |x_b|), least).

    exact: the float64 result.
    x_a, x_b: the two elements of the pair before rotation.
    u is 2^-53 for float64 and 2^-24 for all other dtypes, which are computed in float32. `least` is
    the smallest normal number: a rounding of a smaller one has an error of up to u·least.
    """
    computed = np.finfo(np.float64 if np.dtype(dtype) == np.float64 else np.float32)
    unit = float(computed.epsneg)
    least = float(computed.smallest_normal)
    size = np.abs(np.asarray(x_a, np.float64)) + np.abs(np.asarray(x_b, np.float64))
    rounded = np.maximum(attention_factor * size, least)
    bound: Any = half_ulp(exact, dtype) + ARITHMETIC_ROUNDINGS * unit * rounded
    return bound  # type: ignore[no-any-return]


def table_bound(
    exact: ArrayLike, attention_factor: float, dtype: DTypeLike = np.float32
) -> Float64:
    """Return the tolerance of cos and sin: ½ ulp(exact) + 1e-9·A, for float64 + 4·2^-53·A."""
    slack = 4 * 2.0**-53 if np.dtype(dtype) == np.float64 else ANGLE_ERROR
    return half_ulp(exact, dtype) + slack * attention_factor


def compare(error: Float64, bound: Float64) -> tuple[float, float]:
    """Return the largest error, and the largest ratio of error to tolerance: above 1 is wrong."""
    with np.errstate(invalid="ignore", divide="ignore"):
        fraction = np.where(error == 0, 0.0, error / bound)
    return float(error.max(initial=0.0)), float(fraction.max(initial=0.0))
