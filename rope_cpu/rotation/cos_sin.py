"""Cos and sin of positions: computed exactly from a spec, with one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import DTYPES, Array, Float64, Intp
from rope_cpu.frequencies.rope_types import ScalingRule
from rope_cpu.frequencies.spec import LARGEST_FACTOR, RopeSpec
from rope_cpu.kernels import threads
from rope_cpu.kernels.angles import RADIAN, cos_sin_kernel, cos_sin_part
from rope_cpu.kernels.compile import address_of
from rope_cpu.launch.rotate import repeated

# Rows of frequencies that are remembered together. "longrope" has two for any lengths and
# "dynamic_powers" some ten; those of "dynamic" change at every token, and do not come back.
_REMEMBERED_ROWS = 16

_UNDO = "undo the old rotation with old.rotate(keys, position_ids, inverse=True) and rotate again"


@cache
def _kernel(dtype: str) -> Callable[..., None]:
    """Return the kernel of a dtype, bound to its part."""
    return partial(cos_sin_kernel(dtype), address_of(cos_sin_part(dtype)))


@dataclass(frozen=True, slots=True, eq=False)
class CosSin:
    """The arguments of the cos and sin kernel that follow from a spec.

    Parameters
    ----------
    frequencies : float64 array, (rows, 2, axes, heads, pairs)
        The high and the low part of revolutions per unit of position. With `in_float32`: radians
        per unit of position, and zeros.
    factors : dict of float64 array, (rows, 2)
        The factors on cos and on sin of each operation: "rotate", "inverse" and "shift", or
        "rerotate" alone. A negative factor on sin rotates backwards.
    in_float32 : bool
        Whether angles are computed in float32, step by step as in transformers.
    """

    frequencies: Float64
    factors: dict[str, Float64]
    in_float32: bool

    @classmethod
    def from_spec(cls, spec: RopeSpec) -> CosSin:
        """Precompute the frequencies and factors of a spec."""
        in_float32 = spec.angle_dtype == "float32"
        if in_float32:
            parts = (spec.inv_freq, np.zeros_like(spec.inv_freq))
        else:
            parts = revolutions(spec.inv_freq)
        factor = spec.attention_factor
        one = np.ones_like(factor)
        factors = {
            "rotate": np.stack((factor, factor), axis=1),
            "inverse": np.stack((1.0 / factor, -1.0 / factor), axis=1),
            "shift": np.stack((one, one), axis=1),
        }
        return cls(np.stack(parts, axis=1), factors, in_float32)

    def of_rows(self, rows: Intp) -> CosSin:
        """Return the arguments for batch rows that have these rows of the frequencies."""
        factors = {name: factor.take(rows, axis=0) for name, factor in self.factors.items()}
        return CosSin(self.frequencies.take(rows, axis=0), factors, self.in_float32)

    def from_rotation_of(self, old: CosSin) -> CosSin:
        """Return the arguments for the operation "rerotate": from another rotation to this one.

        The angle is position · (new − old frequency), and the factor new / old. Each difference of
        frequencies is the sum of two float64 as well, to about 2^-105 of the larger one.

        old: of float64 angles like this one; of as many rows, or either has one.
        """
        rows = {len(self.frequencies), len(old.frequencies)} - {1}
        if len(rows) > 1:
            finding = Finding(f"has lengths for {len(old.frequencies)} sequences")
            own = f"this rotary embedding, {len(self.frequencies)} (`at_length([...])`)"
            raise ArgumentError("old", finding, f"have them for as many as {own}, or either for 1")
        factors = self.factors["rotate"] / old.factors["rotate"]
        wrong = (factors < 1 / LARGEST_FACTOR) | (factors > LARGEST_FACTOR)
        if wrong.any():
            finding = Finding(f"makes the quotient of attention factors {factors[wrong][0]}")
            raise ArgumentError("old", finding, "make it 2^-126 to 2^126")
        high, error = _two_sum(self.frequencies[:, 0], -old.frequencies[:, 0])
        low = error + (self.frequencies[:, 1] - old.frequencies[:, 1])
        frequencies = np.stack(_two_sum(high, low), axis=1)
        return CosSin(frequencies, {"rerotate": factors}, in_float32=False)

    def table(self, positions: Float64, operation: str, compute_dtype: str) -> Array:
        """Return cos and sin, times their factors, as one array (2, batch or 1, seq, heads, pairs).

        positions: (batch or 1, seq, axes or 1), checked. operation: a key of `factors`.
        compute_dtype: float32 or float64.
        """
        if self.in_float32:
            return self._float32_table(positions, operation).astype(compute_dtype, copy=False)
        batch, seq, _ = positions.shape
        frequencies = self.frequencies.shape  # indexed, since every call of a rotation is here
        if frequencies[0] != 1:
            batch = frequencies[0]
        table = np.empty((2, batch, seq, frequencies[3], frequencies[4]), DTYPES[compute_dtype])
        # The kernel is loaded before `threads.serial` is read: loading starts Numba's threading
        # layer, which decides whether all kernels must run serially.
        kernel = _kernel(compute_dtype)
        usable = 1 if threads.serial else threads.limit
        factors = self.factors[operation]
        kernel(positions, self.frequencies, factors, table[0], table[1], usable)
        return table

    def packed_table(self, positions: Float64, operation: str, compute_dtype: str) -> Array:
        """Return the table of packed tokens (1, tokens, axes), each with a row of frequencies."""
        table = self.table(positions.swapaxes(0, 1), operation, compute_dtype)
        return table.swapaxes(1, 2)

    def uniform_table(self, positions: Float64, operation: str, compute_dtype: str) -> Array:
        """Return the table of one position, (batch or 1, 1, axes), for any number of tokens."""
        return repeated(self.table(positions, operation, compute_dtype), 1)

    def rounded_table(self, positions: Float64, operation: str, dtype: np.dtype[Any]) -> Array:
        """Return the table in any dtype of arrays, rounded once."""
        compute_dtype = "float32" if self.in_float32 or dtype == DTYPES["float32"] else "float64"
        table = self.table(positions, operation, compute_dtype)
        return table if table.dtype == dtype else _rounded(table, dtype)

    def _float32_table(self, positions: Float64, operation: str) -> Array:
        """Return the table of the angles that transformers computes in float32.

        It reuses the exact kernel for given angles: every head of every token becomes a batch row
        of one token, its angles become the frequencies, and the position is one radian.
        """
        inv_freq = self.frequencies[:, 0].astype(np.float32)
        angles: Any = np.float32(0)
        for axis in range(inv_freq.shape[1]):
            coordinate = positions[:, :, min(axis, positions.shape[2] - 1), None, None]
            angles = angles + coordinate.astype(np.float32) * inv_freq[:, axis, None]
        high = angles.reshape(-1, 1, 1, 1, angles.shape[3])
        frequencies = high * np.array([1.0, RADIAN[1] / RADIAN[0]])[:, None, None, None]
        exact = CosSin(frequencies, {"rotate": np.ones((len(high), 2))}, in_float32=False)
        one_radian = np.array([[[RADIAN[0]]]])
        table = exact.table(one_radian, "rotate", "float32").reshape(2, *angles.shape)
        table *= self.factors[operation].T[:, :, None, None, None].astype(np.float32)
        table[1] += np.float32(0.0)  # a sine of 0 is +0, whatever its sign
        return table


def rows_of_lengths(
    spec: RopeSpec, rule: ScalingRule, lengths: Sequence[int]
) -> tuple[RopeSpec, CosSin, list[int]]:
    """Return the distinct frequencies of sequences, as spec and as cos and sin, and their rows.

    spec, rule: a rotation, and its rule.
    lengths: checked lengths in tokens. For each, the last result has the index of its row.
    """
    representatives = rule.representatives(lengths)
    distinct = sorted(set(representatives))
    row_of = {length: row for row, length in enumerate(distinct)}
    evaluate = _remembered if len(distinct) <= _REMEMBERED_ROWS else _evaluated
    evaluated, cos_sin = evaluate(spec, tuple(distinct))
    return evaluated, cos_sin, [row_of[length] for length in representatives]


def _evaluated(spec: RopeSpec, lengths: tuple[int, ...]) -> tuple[RopeSpec, CosSin]:
    at_lengths = spec.at_length(lengths)
    return at_lengths, CosSin.from_spec(at_lengths)


_remembered = lru_cache(maxsize=16)(_evaluated)


def check_rerotation(new: RopeSpec, old: RopeSpec) -> None:
    """Raise unless keys rotated as `old` says can be rotated on to `new`."""
    for spec in (new, old):
        spec.check_length()
    for name in ("head_dim", "rotary_dim", "interleaved", "blocks", "axes", "frequency_heads"):
        value = getattr(new, name)
        other = getattr(old, name)
        if other != value:
            finding = Finding(f"has {name} {shown(other)}")
            rule = f"have that of this rotary embedding, {shown(value)}"
            raise ArgumentError("old", finding, rule, _UNDO)
    if "float32" in (new.angle_dtype, old.angle_dtype):
        finding = Finding(f"has angle_dtype {old.angle_dtype!r}, and this one {new.angle_dtype!r}")
        rule = "have exact angles, and so must this one: float32 rounds them at each position"
        raise ArgumentError("old", finding, rule, _UNDO)


def _rounded(table: Array, dtype: np.dtype[Any]) -> Array:
    """Return a table rounded once to a dtype.

    bfloat16 below 2^-126 becomes zero, as in rotations.
    """
    if dtype == DTYPES["bfloat16"]:
        # ml_dtypes rounds to float32 first and to bfloat16 afterwards, so the eight bits of the
        # mantissa are rounded here.
        mantissa, exponent = np.frexp(table)
        eight_bits = np.ldexp(np.rint(mantissa * 2.0**8), exponent - 8)
        table = np.where(np.abs(table) < 2.0**-126, 0.0 * table, eight_bits)
    with np.errstate(over="ignore", under="ignore"):
        return table.astype(dtype)


def revolutions(inv_freq: Float64) -> tuple[Float64, Float64]:
    """Return inv_freq/2π as two float64 arrays, whose sum holds it to about 2^-106."""
    first, second, third = RADIAN
    with np.errstate(under="ignore"):
        high, high_error = _two_product(inv_freq, first)
        middle, middle_error = _two_product(inv_freq, second)
        low, low_error = _two_sum(high_error, middle)
        return _two_sum(high, low + (low_error + (middle_error + inv_freq * third)))


def _two_sum(x: Float64, y: Float64) -> tuple[Float64, Float64]:
    """Return x + y as float64 rounds it, and the rounding error (D. E. Knuth)."""
    total = x + y
    shadow = total - x
    return total, (x - (total - shadow)) + (y - shadow)


def _two_product(x: Float64, y: float) -> tuple[Float64, Float64]:
    """Return x·y as float64 rounds it, and the rounding error, which is exact below 2^996.

    Source: T. J. Dekker, A floating-point technique for extending the available precision,
    Numerische Mathematik 18, 1971: each factor is split into two halves.
    """
    product = x * y
    x_high, x_low = _halves(x)
    y_high, y_low = _halves(np.array(y))
    error = ((x_high * y_high - product) + x_high * y_low) + x_low * y_high
    return product, error + x_low * y_low


def _halves(x: Float64) -> tuple[Float64, Float64]:
    """Split float64 into two numbers of 26 bits that add up to it."""
    scaled = x * 134217729.0  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high
