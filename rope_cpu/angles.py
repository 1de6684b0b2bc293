"""From a spec and positions to cos and sin: exact inside, one rounding at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.kernels import threads
from rope_cpu.kernels.angles import RADIAN, cos_sin
from rope_cpu.validation.arrays import DTYPES, FORMAT_OF, Array
from rope_cpu.validation.scalars import Float64

# See Angles.rows.
Row = tuple[Float64, float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """What cos and sin of a spec are computed from.

    rows: for each operation and each row of the spec (frequencies, factor, sign): float64 (2, axes, heads, pairs),
    which add up to revolutions per unit of position, or, where angles are computed in float32, are radians and zeros;
    the factor on cos and sin; and −1 to rotate backwards. shape: (axes, heads, pairs). in_float32: whether angles are
    computed as models do.
    """

    rows: dict[str, list[Row]]
    shape: tuple[int, ...]
    in_float32: bool

    @classmethod
    def of(cls, spec: RopeSpec) -> Angles:
        """Get a spec ready."""
        omega, factor, in_float32 = spec.inv_freq, spec.attention_factor, spec.angle_dtype == "float32"
        parts = np.stack((omega, np.zeros_like(omega)) if in_float32 else revolutions(omega), axis=1)
        operations = {"rotate": (factor, 1.0), "inverse": (1.0 / factor, -1.0), "shift": (np.ones_like(factor), 1.0)}
        rows = {
            name: [(row, float(one), sign) for row, one in zip(parts, factors, strict=True)]
            for name, (factors, sign) in operations.items()
        }
        return cls(rows, omega.shape[1:], in_float32)

    def cos_sin(self, positions: Float64, mode: str, real: str) -> Array:
        """Return factor·cos, and then sign·factor·sin: (2, batch or 1, seq, heads, pairs), float32 or float64.

        positions: float64 (batch or 1, seq, axes or 1), checked. mode: an operation: rotate, inverse or shift.
        """
        if self.in_float32 and real == "float64":
            return self.cos_sin(positions, mode, "float32").astype(np.float64)
        rows, (batch, seq, _), (_, heads, pairs) = self.rows[mode], positions.shape, self.shape
        made = np.empty((2, batch if len(rows) == 1 else len(rows), seq, heads, pairs), DTYPES[real])
        self._compute(positions, rows, real, made[0], made[1])
        return made

    def write(self, positions: Float64, mode: str, cos: Array, sin: Array) -> None:
        """Write what `cos_sin` returns to arrays of as many elements, of any dtype, rounded once."""
        rows, dtype = self.rows[mode], FORMAT_OF[cos.dtype]
        real = "float32" if dtype == "float32" or self.in_float32 else "float64"
        if dtype == real and cos.flags.carray and sin.flags.carray:
            shape = len(positions) if len(rows) == 1 else len(rows), positions.shape[1], *self.shape[1:]
            self._compute(positions, rows, real, cos.reshape(shape), sin.reshape(shape))
        else:
            for table, out in zip(self.cos_sin(positions, mode, real), (cos, sin), strict=True):
                out[...] = _rounded(table, dtype).reshape(out.shape)

    def _compute(self, positions: Float64, rows: list[Row], real: str, cos: Array, sin: Array) -> None:
        """Write to C-contiguous arrays (batch or 1, seq, heads, pairs) of the real dtype."""
        if positions.shape[2] != self.shape[0]:  # one coordinate serves every axis
            positions = np.broadcast_to(positions, (*positions.shape[:2], self.shape[0]))
        write = _write_in_float32 if self.in_float32 else cos_sin(real)
        if len(rows) == 1:
            write(positions, *rows[0], cos, sin, threads.usable())
            return
        for n, row in enumerate(rows):
            at, own = min(n, len(positions) - 1), slice(n, n + 1)
            write(positions[at : at + 1], *row, cos[own], sin[own], threads.usable())


def _write_in_float32(
    positions: Float64, frequencies: Float64, factor: float, sign: float, cos: Array, sin: Array, usable: int
) -> None:
    """Write cos and sin of the angles that models in float32 have; arguments as kernels take them."""
    angle = np.zeros_like(cos)
    for axis, frequency in enumerate(frequencies[0].astype(np.float32)):
        angle += positions[:, :, axis, None, None].astype(np.float32) * frequency
    # To the kernel, each angle is the frequency of a pair, and the position is one radian in revolutions.
    one, high = np.array([[[RADIAN[0]]]]), angle.astype(np.float64).reshape(1, 1, 1, -1)
    parts, flat = np.concatenate([high, high * (RADIAN[1] / RADIAN[0])]), (1, 1, 1, -1)
    cos_sin("float32")(one, parts, 1.0, sign, cos.reshape(flat), sin.reshape(flat), usable)
    cos *= np.float32(factor)
    sin *= np.float32(factor)


def _rounded(table: Array, dtype: str) -> Array:
    """Return a table rounded once to another dtype; bfloat16 below 2^-126 becomes zero, as in rotations."""
    if dtype == "bfloat16":
        # ml_dtypes rounds to float32 first and then to bfloat16, so its eight bits are found here.
        mantissa, exponent = np.frexp(table)
        table = np.where(np.abs(table) < 2.0**-126, 0.0 * table, np.ldexp(np.rint(mantissa * 2.0**8), exponent - 8))
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
