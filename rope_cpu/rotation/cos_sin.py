"""From a spec and positions to cos and sin: exact inside, one rounding at the end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rope_cpu.array_types import DTYPE_NAMES, DTYPES, Array, Float64
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.kernels import threads
from rope_cpu.kernels.angles import RADIAN, cos_sin


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """What cos and sin of a spec are computed from.

    frequencies: float64 (rows, 2, axes, heads, pairs), two parts that add up to revolutions per unit of position, or,
    where angles are computed in float32, radians and zeros. factors: for each operation float64 (rows, 2), those on cos
    and on sin; negative ones on sin rotate backwards. in_float32: whether angles are computed as models do.
    """

    frequencies: Float64
    factors: dict[str, Float64]
    in_float32: bool

    @classmethod
    def of(cls, spec: RopeSpec) -> Angles:
        """Get a spec ready."""
        omega, factor, in_float32 = (
            spec.inv_freq,
            spec.attention_factor,
            spec.angle_dtype == "float32",
        )
        parts = (omega, np.zeros_like(omega)) if in_float32 else revolutions(omega)
        one = np.ones_like(factor)
        factors = {
            "rotate": (factor, factor),
            "inverse": (1.0 / factor, -1.0 / factor),
            "shift": (one, one),
        }
        return cls(
            np.stack(parts, axis=1),
            {name: np.stack(f, axis=1) for name, f in factors.items()},
            in_float32,
        )

    def cos_sin(self, positions: Float64, mode: str, real: str) -> Array:
        """Return cos, and then sin, times their factors: (2, batch or 1, seq, heads, pairs), float32 or float64.

        positions: float64 (batch or 1, seq, axes or 1), checked. mode: an operation: rotate, inverse or shift.
        """
        if self.in_float32 and real == "float64":
            return self.cos_sin(positions, mode, "float32").astype(np.float64)
        made = np.empty((2, *self._shape(positions)), DTYPES[real])
        self._compute(positions, mode, real, made[0], made[1])
        return made

    def write(self, positions: Float64, mode: str, cos: Array, sin: Array) -> None:
        """Write what `cos_sin` returns to arrays of as many elements, of any dtype, rounded once."""
        dtype = DTYPE_NAMES[cos.dtype]
        real = "float32" if dtype == "float32" or self.in_float32 else "float64"
        if dtype == real and cos.flags.carray and sin.flags.carray:
            shape = self._shape(positions)
            self._compute(positions, mode, real, cos.reshape(shape), sin.reshape(shape))
        else:
            for table, out in zip(self.cos_sin(positions, mode, real), (cos, sin), strict=True):
                out[...] = _rounded(table, dtype).reshape(out.shape)

    def _shape(self, positions: Float64) -> tuple[int, ...]:
        """Return that of cos: (batch or 1, seq, heads, pairs)."""
        (rows, _, _, heads, pairs), (batch, seq, _) = self.frequencies.shape, positions.shape
        return batch if rows == 1 else rows, seq, heads, pairs

    def _compute(self, positions: Float64, mode: str, real: str, cos: Array, sin: Array) -> None:
        """Write to C-contiguous arrays (batch or 1, seq, heads, pairs) of the real dtype."""
        kernel = cos_sin(
            real
        )  # fetched first: the first kernel finds out whether all must be serial
        write = partial(_write_in_float32, kernel) if self.in_float32 else kernel
        write(
            positions,
            self.frequencies,
            self.factors[mode],
            cos,
            sin,
            1 if threads.serial else threads.limit,
        )


def _write_in_float32(
    kernel: Any,
    positions: Float64,
    frequencies: Float64,
    factors: Float64,
    cos: Array,
    sin: Array,
    usable: int,
) -> None:
    """Write cos and sin of the angles that models in float32 have; arguments as the kernel takes them."""
    angle = np.zeros_like(cos)
    for axis, frequency in enumerate(frequencies[:, 0].astype(np.float32).swapaxes(0, 1)):
        coordinate = positions[:, :, min(axis, positions.shape[2] - 1), None, None]
        angle += coordinate.astype(np.float32) * frequency[:, None]
    # To the kernel, each angle is the frequency of a pair, the position is one radian in revolutions, and every head of
    # every token is a batch row.
    rows, pairs = cos[..., 0].size, cos.shape[3]
    one, high = np.array([[[RADIAN[0]]]]), angle.astype(np.float64).reshape(rows, 1, 1, 1, pairs)
    parts, flat = (
        np.concatenate([high, high * (RADIAN[1] / RADIAN[0])], axis=1),
        (rows, 1, 1, pairs),
    )
    kernel(one, parts, np.ones((rows, 2)), cos.reshape(flat), sin.reshape(flat), usable)
    for table, factor in zip((cos, sin), factors.astype(np.float32).T, strict=True):
        table *= factor[:, None, None, None]
    sin += np.float32(0.0)  # a sine of 0 is +0, whatever its sign


def _rounded(table: Array, dtype: str) -> Array:
    """Return a table rounded once to another dtype; bfloat16 below 2^-126 becomes zero, as in rotations."""
    if dtype == "bfloat16":
        # ml_dtypes rounds to float32 first and then to bfloat16, so its eight bits are found here.
        mantissa, exponent = np.frexp(table)
        table = np.where(
            np.abs(table) < 2.0**-126,
            0.0 * table,
            np.ldexp(np.rint(mantissa * 2.0**8), exponent - 8),
        )
    with np.errstate(over="ignore", under="ignore"):
        return table.astype(DTYPES[dtype])


def revolutions(omega: Float64) -> tuple[Float64, Float64]:
    """Return ω/2π as two float64 arrays, whose sum holds it to about 2^-106."""
    first, second, third = RADIAN
    with np.errstate(under="ignore"):
        high, lost = _exact_product(omega, first)
        more, rest = _exact_product(omega, second)
        low, rounding = _exact_sum(lost, more)
        return _exact_sum(high, low + (rounding + (rest + omega * third)))


def _exact_sum(x: Float64, y: Float64) -> tuple[Float64, Float64]:
    """Return x + y as float64 rounds it, and what that loses (D. E. Knuth)."""
    total = x + y
    shadow = total - x
    return total, (x - (total - shadow)) + (y - shadow)


def _exact_product(x: Float64, y: float) -> tuple[Float64, Float64]:
    """Return x·y as float64 rounds it, and what that loses, exactly below 2^996.

    Source: T. J. Dekker, A floating-point technique for extending the available precision, Numerische Mathematik 18,
    1971: each factor is split into two halves.
    """
    product = x * y
    (x1, x2), (y1, y2) = _halves(x), _halves(np.array(y))
    return product, (((x1 * y1 - product) + x1 * y2) + x2 * y1) + x2 * y2


def _halves(x: Float64) -> tuple[Float64, Float64]:
    """Split float64 into two of 26 bits that add up to it."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high
