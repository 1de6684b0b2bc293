"""The kernel of cos and sin: exact for every position, and faster than reading a table of them.

Angles are counted in revolutions, so that whole revolutions can be dropped before anything is
rounded. A frequency is the sum of two float64, high + low, that hold ω/2π to about 2^-106. Its
product with a position is formed in two parts as well. The loops over the pairs of a token are
plain, so that LLVM vectorises them.
"""

from __future__ import annotations

from functools import cache, partial
from math import factorial
from typing import Any

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from rope_cpu.kernels import compile

# 1/2π, the revolutions of an angle of one radian, as the sum of three float64 (OEIS A086201).
RADIAN = (0.15915494309189535, -9.839338337591243e-18, -5.360718141446502e-34)

# 2π as the sum of two float64 (OEIS A019692).
_TWO_PI = 6.283185307179586
_TWO_PI_REST = 2.4492935982947064e-16

# The Taylor coefficients of sin and cos from the second on: enough for an eighth of a revolution.
_SIN_COEFFICIENTS = tuple((-1.0) ** n / factorial(2 * n + 1) for n in range(1, 9))
_COS_COEFFICIENTS = tuple((-1.0) ** n / factorial(2 * n) for n in range(1, 9))

# A second thread takes longer to start than the computation of fewer pairs takes.
_PARALLEL_FROM = 2**14


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of float64, rounded once.

    A processor without an instruction for it calls a library.
    """
    signature = types.float64(types.float64, types.float64, types.float64)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


@compile.device_function
def _add_axis(sums, position, frequencies, row, axis, head):
    """Add position · (high + low), less whole revolutions, to sums[0] + sums[1] for each pair.

    sums[1] takes the rounding errors of sums[0] (D. E. Knuth, The Art of Computer Programming 2,
    4.2.2, theorem B).
    """
    for i in range(sums.shape[1]):
        high = frequencies[row, 0, axis, head, i]
        low = frequencies[row, 1, axis, head, i]
        product = position * high
        product_error = fma(position, low, fma(position, high, -product))
        revolutions = sums[0, i]
        fraction = product - np.rint(product)
        total = revolutions + fraction
        shadow = total - revolutions
        sum_error = (revolutions - (total - shadow)) + (fraction - shadow)
        sums[1, i] += sum_error + product_error
        sums[0, i] = total - np.rint(total)


@compile.device_function
def _polynomial(x, c):
    """Return c[0] + c[1]·x + … + c[7]·x^7."""
    return c[0] + x * (
        c[1] + x * (c[2] + x * (c[3] + x * (c[4] + x * (c[5] + x * (c[6] + x * c[7])))))
    )


@compile.device_function
def _write_cos_sin(sums, factors, row, cos, sin, n, t, head):
    """Write cos and sin of the revolutions sums[0] + sums[1], times their factors.

    The error is at most 1.3 units of 2^-53, and one rounding to the dtype of the outputs.
    """
    for i in range(sums.shape[1]):
        total = sums[0, i] + sums[1, i]
        tail = (sums[0, i] - total) + sums[1, i]
        quarters = np.rint(4.0 * total)
        r = fma(quarters, -0.25, total)
        # The angle in radians, at most an eighth of a revolution, is z + dz.
        z = r * _TWO_PI
        dz = fma(r, _TWO_PI, -z) + r * _TWO_PI_REST + tail * _TWO_PI
        z2 = z * z
        s = z + (z * z2 * _polynomial(z2, _SIN_COEFFICIENTS) + dz)
        c = 1.0 + (z2 * _polynomial(z2, _COS_COEFFICIENTS) - z * dz)
        quadrant = np.int64(quarters) & 3
        is_odd = quadrant & 1 == 1
        cosine = s if is_odd else c
        sine = c if is_odd else s
        if (quadrant == 1) | (quadrant == 2):
            cosine = -cosine
        if quadrant >= 2:
            sine = -sine
        cos[n, t, head, i] = factors[row, 0] * cosine
        sin[n, t, head, i] = factors[row, 1] * sine + 0.0  # a sine of 0 is +0, whatever its sign


@compile.device_function
def _write_part(positions, frequencies, factors, cos, sin, sums, part, parts):
    """Write cos and sin for one of several equal parts of the tokens. sums: (2, pairs), scratch."""
    batch, tokens, heads, _ = cos.shape
    start = batch * tokens * part // parts
    stop = batch * tokens * (part + 1) // parts
    for index in range(start, stop):
        n = index // tokens
        t = index % tokens
        position_row = n if positions.shape[0] > 1 else 0
        row = n if frequencies.shape[0] > 1 else 0
        for head in range(heads):
            sums[:] = 0.0
            for axis in range(frequencies.shape[2]):
                position = positions[position_row, t, axis if positions.shape[2] > 1 else 0]
                _add_axis(sums, position, frequencies, row, axis, head)
            _write_cos_sin(sums, factors, row, cos, sin, n, t, head)


@partial(compile.device_function, parallel=True)
def _write_in_parallel(positions, frequencies, factors, cos, sin, sums, parts):
    for index in prange(parts):
        part = np.intp(index)
        _write_part(positions, frequencies, factors, cos, sin, sums[part], part, parts)


def _cos_sin(positions, frequencies, factors, cos, sin, threads):
    """Write cos and sin of positions times frequencies; see `cos_sin_kernel`."""
    parts = threads if cos.size >= _PARALLEL_FROM else 1
    sums = np.empty((parts, 2, cos.shape[3]))
    if parts > 1:
        _write_in_parallel(positions, frequencies, factors, cos, sin, sums, parts)
    else:
        _write_part(positions, frequencies, factors, cos, sin, sums[0], np.intp(0), np.intp(1))


@cache
def cos_sin_kernel(dtype: str) -> Any:
    """Return the compiled kernel that writes cos and sin of a dtype, float32 or float64.

    Its arguments:

    - positions: float64 (batch or 1, tokens, axes or 1);
    - frequencies: float64 (batch or 1, 2, axes, heads, pairs), the high and the low part in
      revolutions per unit of position;
    - factors: float64 (batch or 1, 2), on cos and on sin; a negative factor on sin rotates
      backwards;
    - cos, sin: (batch, tokens, heads, pairs), the outputs;
    - threads: maximum number of threads.
    """
    positions = types.Array(types.float64, 3, "A", readonly=True)
    frequencies = types.Array(types.float64, 5, "C", readonly=True)
    factors = types.Array(types.float64, 2, "C", readonly=True)
    output = types.Array(getattr(types, dtype), 4, "C")
    signature = (positions, frequencies, factors, output, output, types.intp)
    return compile.compile_kernel(_cos_sin, f"cos_sin_{dtype}", signature)
