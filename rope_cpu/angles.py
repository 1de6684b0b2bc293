"""From a spec and positions to cos and sin: exact inside, one rounding at the end."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rope_cpu import _threads
from rope_cpu._kernels.angles import quick_angles
from rope_cpu._kernels.chains import NEAR, RADIAN, SLOW
from rope_cpu._kernels.compiler import DONE
from rope_cpu._kernels.lanes import exact_product, exact_sum
from rope_cpu.spec import Float64, RopeSpec

# Beyond it float64 does not hold every whole number. At the limit itself 2^53 + 1 has been rounded to it, so tables are
# first asked for with one less, and the ids as they were given are looked at before the limit is allowed.
MAX_POSITION = 2.0**53

_DTYPES = {np.dtype(kind).name: np.dtype(kind) for kind in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)}


def parts(spec: RopeSpec) -> Float64:
    """Return what the angle kernel keeps of the frequencies: (rows, axes, heads, parts, pairs).

    The two of `turns`. Where several axes share out the pairs, so that each turns with one of them, there is one axis,
    and after the two comes for each of these 1 for its own pairs and 0 for others.
    """
    two, omega = turns(spec), spec.inv_freq
    if omega.shape[1] == 1 or (np.count_nonzero(omega, axis=1) > 1).any():
        return two
    # A pair that does not turn has any axis.
    owners = np.argmax(omega != 0, axis=1)[:, None, :, None]
    weights = owners == np.arange(omega.shape[1])[:, None]
    return np.concatenate([two.sum(axis=1, keepdims=True), weights], axis=-2)


def kind_of(spec: RopeSpec, kept: Float64) -> str:
    """Return how float32 tables are computed: as models do in float32, of usual frequencies or of any.

    kept: from `parts`.
    """
    if spec.angle_dtype == "float32":
        return "model"
    return "usual" if kept.shape[1] == 1 and np.abs(spec.inv_freq).max() <= SLOW else "any"


def turns(spec: RopeSpec) -> Float64:
    """Return frequencies as turns: (rows, axes, heads, 2, pairs).

    Two float64 whose sum is ω/2π to about 2^-106; for angle_dtype float32 ω itself and zeros.
    """
    omega = np.asarray(spec.inv_freq, np.float64)
    high, low = (omega, np.zeros_like(omega)) if spec.angle_dtype == "float32" else _in_turns(omega)
    return np.stack([high, low], axis=-2)


def _in_turns(omega: Float64) -> tuple[Float64, Float64]:
    first, second, third = RADIAN
    with np.errstate(under="ignore"):
        high, lost = exact_product(omega, first)
        more, rest = exact_product(omega, second)
        low, rounding = exact_sum(lost, more)
        return exact_sum(high, low + (rounding + (rest + omega * third)))


def tables(
    kept: Float64,
    kind: str,
    positions: Float64,
    factor: Float64,
    sign: int,
    dtype: str,
    limit: float = MAX_POSITION - 1,
    out: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return factor·cos and sign·factor·sin, (batch or 1, seq, heads, pairs) of a dtype.

    kept, kind: from `parts` and `kind_of`. positions: float64 (batch or 1, seq, axes or 1), C-contiguous. out: arrays
    of as many elements to write to, C-contiguous and aligned. None: a position is not finite or beyond ±limit; nothing
    was written.
    """
    (batch, seq, _), (rows, _, heads, _, pairs) = positions.shape, kept.shape
    shape, stored = (batch if rows == 1 else rows, seq, heads, pairs), _DTYPES[dtype]
    cos, sin = out or (np.empty(shape, stored), np.empty(shape, stored))
    pool = _threads.pool() if cos.size > _threads.SERIAL_PAIRS else 0

    def written(kind: str, limit: float) -> bool:
        kernel, work = quick_angles(dtype, kind)
        return kernel(positions, limit, kept, factor, sign, cos, sin, work, pool) == DONE

    if kind != "usual" or dtype != "float32":
        return (cos, sin) if written(kind, limit) else None
    if written(kind, NEAR):
        return cos, sin
    # Another kernel computes far positions, and is not compiled to find that they are none.
    return (cos, sin) if (np.abs(positions) <= limit).all() and written("any", limit) else None
