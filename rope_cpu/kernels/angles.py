"""The kernel of cos and sin: exact for any position, and faster than a table of them could be read.

Angles are counted in revolutions, so that whole ones can be dropped before anything is rounded. A frequency is kept as
two float64, high + low, that hold ω/2π to about 2^-106, and its product with a position is formed in two parts as well.
The loops are over the pairs of a token and plain, so that LLVM vectorises them.
"""

from __future__ import annotations

from functools import cache, partial
from math import factorial
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from rope_cpu.kernels import compile

# 1/2π, the revolutions of an angle of one radian, as three float64, and 2π as two (OEIS A086201, A019692).
RADIAN = 0.15915494309189535, -9.839338337591243e-18, -5.360718141446502e-34
_TWO_PI, _TWO_PI_REST = 6.283185307179586, 2.4492935982947064e-16
# The Taylor coefficients of sin and cos from the second on, enough for an angle of an eighth of a revolution.
_S1, _S2, _S3, _S4, _S5, _S6, _S7, _S8 = ((-1.0) ** n / factorial(2 * n + 1) for n in range(1, 9))
_C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = ((-1.0) ** n / factorial(2 * n) for n in range(1, 9))

# Fewer pairs than these are computed faster than a second thread starts.
_PARALLEL_FROM = 2**14


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of float64, rounded once; a processor without an instruction for it calls a library."""
    return types.float64(types.float64, types.float64, types.float64), lambda context, b, sig, args: b.fma(*args)


@compile.inner
def _add_axis(revolutions, rest, position, high, low):
    """Add position · (high + low) to revolutions + rest, less whole revolutions; all but position are over pairs.

    What rounding the sum loses goes to the rest (D. E. Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
    """
    for i in range(revolutions.size):
        product = position * high[i]
        lost = fma(position, low[i], fma(position, high[i], -product))
        part = product - np.rint(product)
        total = revolutions[i] + part
        shadow = total - revolutions[i]
        rest[i] += (revolutions[i] - (total - shadow)) + (part - shadow) + lost
        revolutions[i] = total - np.rint(total)


@compile.inner
def _finish(revolutions, rest, factor, sign, cos, sin):
    """Write factor · cos and sign · factor · sin of revolutions + rest, to 1.3 units of 2^-53 and a rounding."""
    for i in range(revolutions.size):
        total = revolutions[i] + rest[i]
        tail = (revolutions[i] - total) + rest[i]
        quarters = np.rint(4.0 * total)
        r = fma(quarters, -0.25, total)
        z = r * _TWO_PI
        dz = fma(r, _TWO_PI, -z) + r * _TWO_PI_REST + tail * _TWO_PI
        z2 = z * z
        s = _S1 + z2 * (_S2 + z2 * (_S3 + z2 * (_S4 + z2 * (_S5 + z2 * (_S6 + z2 * (_S7 + z2 * _S8))))))
        c = _C1 + z2 * (_C2 + z2 * (_C3 + z2 * (_C4 + z2 * (_C5 + z2 * (_C6 + z2 * (_C7 + z2 * _C8))))))
        s, c = z + (z * z2 * s + dz), 1.0 + (z2 * c - z * dz)
        quadrant = np.int64(quarters) & 3
        odd, left, below = quadrant & 1 == 1, (quadrant == 1) | (quadrant == 2), quadrant >= 2
        cosine, sine = (s, c) if odd else (c, s)
        cos[i] = factor * (-cosine if left else cosine)
        sin[i] = sign * factor * (-sine if below else sine) + 0.0  # a sine of 0 is +0, whatever its sign


@compile.inner
def _rows(positions, frequencies, factor, sign, cos, sin, part, parts):
    """Write the rows of one of several equal parts of the tokens."""
    batch, tokens, heads, pairs = cos.shape
    start, stop = batch * tokens * part // parts, batch * tokens * (part + 1) // parts
    scratch = np.empty((2, pairs))
    revolutions, rest = scratch[0], scratch[1]
    for n in range(batch):
        for t in range(max(start - n * tokens, 0), min(stop - n * tokens, tokens)):
            for head in range(heads):
                revolutions[:] = 0.0
                rest[:] = 0.0
                for axis in range(positions.shape[2]):
                    high, low = frequencies[0, axis, head], frequencies[1, axis, head]
                    _add_axis(revolutions, rest, positions[n, t, axis], high, low)
                _finish(revolutions, rest, factor, sign, cos[n, t, head], sin[n, t, head])


@partial(compile.inner, parallel=True)
def _rows_in_parallel(positions, frequencies, factor, sign, cos, sin, parts):
    for part in prange(parts):
        _rows(positions, frequencies, factor, sign, cos, sin, np.intp(part), parts)


def _cos_sin(positions, frequencies, factor, sign, cos, sin, threads):
    """Write cos and sin of positions times frequencies; see `cos_sin`."""
    if threads > 1 and cos.size >= _PARALLEL_FROM:
        _rows_in_parallel(positions, frequencies, factor, sign, cos, sin, threads)
    else:
        _rows(positions, frequencies, factor, sign, cos, sin, np.intp(0), np.intp(1))


@cache
def cos_sin(dtype: str) -> Any:
    """Return the kernel that writes cos and sin in float32 or float64.

    Its arguments: positions, float64 (batch, tokens, axes). frequencies: float64 (2, axes, heads, pairs), the high and
    the low part of revolutions per unit of position. factor: on cos and sin. sign: −1.0 rotates backwards. cos, sin
    (batch, tokens, heads, pairs). threads: on how many at most.
    """
    positions = types.Array(types.float64, 3, "A", readonly=True)
    frequencies, table = types.Array(types.float64, 4, "C", readonly=True), types.Array(getattr(types, dtype), 4, "C")
    real = types.float64
    signature = (positions, frequencies, real, real, table, table, types.intp)
    return compile.compiled(_cos_sin, f"cos_sin_{dtype}", signature)
