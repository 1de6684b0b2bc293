"""From a spec and positions to cos and sin: exact inside, one rounding at the end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu import _check, _threads
from rope_cpu._check import Array
from rope_cpu._kernels import angles as kernels
from rope_cpu._kernels.chains import NEAR, RADIAN, SLOW
from rope_cpu._kernels.compiler import DONE
from rope_cpu._kernels.lanes import exact_product, exact_sum
from rope_cpu.spec import MAX_POSITION, Float64, RopeSpec

# What each operation does to the angle.
SIGN = {"rotate": 1, "inverse": -1, "shift": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """A spec as kernels take it to compute cos and sin.

    parts: the frequencies; see `parts_of`. kind: how float32 tables are computed; see `kind_of`. factors: what each
    operation multiplies cos and sin by, (rows,).
    """

    parts: Float64
    kind: str
    factors: dict[str, Float64]

    @classmethod
    def of(cls, spec: RopeSpec) -> Angles:
        """Get a spec ready."""
        parts, factor = parts_of(spec), spec.attention_factor
        factors = {"rotate": factor, "inverse": 1.0 / factor, "shift": np.ones_like(factor)}
        return cls(parts, kind_of(spec, parts), factors)

    def tables(
        self, positions: Float64, ids: ArrayLike, mode: str, dtype: str, out: tuple[Array, Array] | None = None
    ) -> tuple[Array, Array]:
        """Return factor·cos and sign·factor·sin, (batch or 1, seq, heads, pairs) of a dtype.

        positions: float64 (batch or 1, seq, axes or 1), C-contiguous. ids: the positions as given, for error texts.
        mode: an operation. out: arrays of as many elements to write to, C-contiguous and aligned.

        Raises ValueError where a position is not finite or beyond ±2^53; nothing was written.
        """
        (batch, seq, _), (rows, _, heads, _, pairs) = positions.shape, self.parts.shape
        shape, stored = (batch if rows == 1 else rows, seq, heads, pairs), _check.DTYPES[dtype]
        cos, sin = out or (np.empty(shape, stored), np.empty(shape, stored))
        if not self._written(positions, mode, dtype, MAX_POSITION - 1, cos, sin):
            # At the limit itself 2^53 + 1 has been rounded to it: that is told from the ids as they were given.
            _check.position_values("delta" if mode == "shift" else "position_ids", ids)
            if not self._written(positions, mode, dtype, MAX_POSITION, cos, sin):
                raise RuntimeError("positions passed their check, but the kernel refused them")
        return cos, sin

    def _written(self, positions: Float64, mode: str, dtype: str, limit: float, cos: Array, sin: Array) -> bool:
        """Write tables; tell whether that was done, as no position is beyond ±limit."""
        pool = _threads.pool() if cos.size > kernels.SERIAL_PAIRS else 0

        def written(kind: str, limit: float) -> bool:
            write, work = kernels.angles().call, kernels.cos_sin(dtype, kind).address
            return write(positions, limit, self.parts, self.factors[mode], SIGN[mode], cos, sin, work, pool) == DONE

        if self.kind != "usual" or dtype != "float32":
            return written(self.kind, limit)
        # Another kernel computes far positions, and is not compiled to find that they are none.
        return written("usual", NEAR) or (bool((np.abs(positions) <= limit).all()) and written("any", limit))


def parts_of(spec: RopeSpec) -> Float64:
    """Return what the angle kernel keeps of the frequencies: (rows, axes, heads, parts, pairs).

    The two of `turns`. Where several axes share out the pairs, so that each turns with one of them, there is one axis,
    and after the two comes a mask for each of these but the first: all bits for its own pairs, none for others.
    """
    two, omega = turns(spec), spec.inv_freq
    if omega.shape[1] == 1 or (np.count_nonzero(omega, axis=1) > 1).any():
        return two
    # A pair that does not turn has any axis.
    owners = np.argmax(omega != 0, axis=1)[:, None, :, None]
    masks = -(owners == np.arange(1, omega.shape[1])[:, None]).astype(np.int64)
    return np.concatenate([two.sum(axis=1, keepdims=True), masks.view(np.float64)], axis=-2)


def kind_of(spec: RopeSpec, kept: Float64) -> str:
    """Return how float32 tables are computed: as models do in float32, of usual frequencies or of any.

    kept: from `parts_of`.
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
