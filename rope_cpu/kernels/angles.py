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
    return types.float64(
        types.float64, types.float64, types.float64
    ), lambda context, b, sig, args: b.fma(*args)


@compile.inner
def _add_axis(sums, position, frequencies, row, axis, head):
    """Add position · (high + low) to sums[0] + sums[1], less whole revolutions, for each pair of a head.

    What rounding the sum loses goes to sums[1] (D. E. Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
    """
    for i in range(sums.shape[1]):
        high, low, revolutions = (
            frequencies[row, 0, axis, head, i],
            frequencies[row, 1, axis, head, i],
            sums[0, i],
        )
        product = position * high
        lost = fma(position, low, fma(position, high, -product))
        part = product - np.rint(product)
        total = revolutions + part
        shadow = total - revolutions
        sums[1, i] += (revolutions - (total - shadow)) + (part - shadow) + lost
        sums[0, i] = total - np.rint(total)


@compile.inner
def _finish(sums, factors, row, cos, sin, n, t, head):
    """Write cos and sin of sums[0] + sums[1] times their factors, to 1.3 units of 2^-53 and a rounding."""
    for i in range(sums.shape[1]):
        total = sums[0, i] + sums[1, i]
        tail = (sums[0, i] - total) + sums[1, i]
        quarters = np.rint(4.0 * total)
        r = fma(quarters, -0.25, total)
        z = r * _TWO_PI
        dz = fma(r, _TWO_PI, -z) + r * _TWO_PI_REST + tail * _TWO_PI
        z2 = z * z
        s = _S1 + z2 * (
            _S2 + z2 * (_S3 + z2 * (_S4 + z2 * (_S5 + z2 * (_S6 + z2 * (_S7 + z2 * _S8)))))
        )
        c = _C1 + z2 * (
            _C2 + z2 * (_C3 + z2 * (_C4 + z2 * (_C5 + z2 * (_C6 + z2 * (_C7 + z2 * _C8)))))
        )
        s, c = z + (z * z2 * s + dz), 1.0 + (z2 * c - z * dz)
        quadrant = np.int64(quarters) & 3
        odd, left, below = quadrant & 1 == 1, (quadrant == 1) | (quadrant == 2), quadrant >= 2
        cosine, sine = (s, c) if odd else (c, s)
        cos[n, t, head, i] = factors[row, 0] * (-cosine if left else cosine)
        sin[n, t, head, i] = (
            factors[row, 1] * (-sine if below else sine) + 0.0
        )  # a sine of 0 is +0, whatever its sign


@compile.inner
def _rows(positions, frequencies, factors, cos, sin, part, parts):
    """Write the rows of one of several equal parts of the tokens."""
    batch, tokens, heads, pairs = cos.shape
    start, stop = batch * tokens * part // parts, batch * tokens * (part + 1) // parts
    sums = np.empty((2, pairs))
    for index in range(start, stop):
        n, t = index // tokens, index % tokens
        given, row = n if positions.shape[0] > 1 else 0, n if frequencies.shape[0] > 1 else 0
        for head in range(heads):
            sums[:] = 0.0
            for axis in range(frequencies.shape[2]):
                position = positions[given, t, axis if positions.shape[2] > 1 else 0]
                _add_axis(sums, position, frequencies, row, axis, head)
            _finish(sums, factors, row, cos, sin, n, t, head)


@partial(compile.inner, parallel=True)
def _rows_in_parallel(positions, frequencies, factors, cos, sin, parts):
    for part in prange(parts):
        _rows(positions, frequencies, factors, cos, sin, np.intp(part), parts)


def _cos_sin(positions, frequencies, factors, cos, sin, threads):
    """Write cos and sin of positions times frequencies; see `cos_sin`."""
    if threads > 1 and cos.size >= _PARALLEL_FROM:
        _rows_in_parallel(positions, frequencies, factors, cos, sin, threads)
    else:
        _rows(positions, frequencies, factors, cos, sin, np.intp(0), np.intp(1))


@cache
def cos_sin(dtype: str) -> Any:
    """Return the kernel that writes cos and sin in float32 or float64.

    Its arguments: positions, float64 (batch or 1, tokens, axes or 1). frequencies: float64 (batch or 1, 2, axes, heads,
    pairs), the high and the low part of revolutions per unit of position. factors: float64, of as many rows, (…, 2),
    those on cos and on sin; a negative one on sin rotates backwards. cos, sin (batch, tokens, heads, pairs). threads:
    on how many at most.
    """
    positions = types.Array(types.float64, 3, "A", readonly=True)
    frequencies = types.Array(types.float64, 5, "C", readonly=True)
    factors, table = (
        types.Array(types.float64, 2, "C", readonly=True),
        types.Array(getattr(types, dtype), 4, "C"),
    )
    signature = (positions, frequencies, factors, table, table, types.intp)
    return compile.compiled(_cos_sin, f"cos_sin_{dtype}", signature)
