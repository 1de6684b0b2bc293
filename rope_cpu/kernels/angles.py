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
from numba import carray, types
from numba.extending import intrinsic

from rope_cpu.kernels import compile
from rope_cpu.kernels.vectors import at, pointer, stored

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

_CHUNK = 64  # pairs whose revolutions are summed in memory on the stack
_SUMS = (0.0,) * (2 * _CHUNK)


@intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of float64, rounded once.

    A processor without an instruction for it calls a library.
    """
    signature = types.float64(types.float64, types.float64, types.float64)
    return signature, lambda context, builder, sig, args: builder.fma(*args)


@partial(compile.device_function, inline=True)
def _add_axis(sums, position, highs, lows, count):
    """Add position · (high + low), less whole revolutions, to sums[0] + sums[1] for some pairs.

    sums[1] takes the rounding errors of sums[0] (D. E. Knuth, The Art of Computer Programming 2,
    4.2.2, theorem B).
    """
    for i in range(count):
        product = position * highs[i]
        product_error = fma(position, lows[i], fma(position, highs[i], -product))
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


@partial(compile.device_function, inline=True)
def _write_cos_sin(sums, factors, row, cos, sin, count):
    """Write cos and sin of the revolutions sums[0] + sums[1], times their factors.

    The error is at most 1.3 units of 2^-53, and one rounding to the dtype of the outputs.
    """
    for i in range(count):
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
        cos[i] = factors[row, 0] * cosine
        sin[i] = factors[row, 1] * sine + 0.0  # a sine of 0 is +0, whatever its sign


def _cos_sin_part(arguments, part, parts):
    """Write cos and sin for one of several equal parts of the tokens.

    Rows of all arrays lie one after the other, so they are found by their number.
    """
    positions, frequencies, factors, cos, sin = arguments[0]
    batch, tokens, heads, pairs = cos.shape
    axes = frequencies.shape[2]
    sums = carray(stored(_SUMS), (2, _CHUNK), np.float64)
    chunks = (pairs + _CHUNK - 1) // _CHUNK  # of a head
    for index in range(batch * tokens * part // parts, batch * tokens * (part + 1) // parts):
        n = index // tokens
        position_row = n if positions.shape[0] > 1 else 0
        row = n if frequencies.shape[0] > 1 else 0
        for chunk in range(heads * chunks):
            start = chunk % chunks * _CHUNK
            count = min(_CHUNK, pairs - start)
            first = chunk // chunks * pairs + start  # among the pairs of all heads
            sums[:] = 0.0
            for axis in range(axes):
                column = axis if positions.shape[2] > 1 else 0
                position = positions[position_row, index % tokens, column]
                # Pointers: LLVM vectorises no loop over an array from another index than 0.
                high_row = 2 * row * axes + axis
                highs = at(pointer(frequencies), high_row * heads * pairs + first)
                lows = at(pointer(frequencies), (high_row + axes) * heads * pairs + first)
                _add_axis(sums, position, highs, lows, count)
            out = index * heads * pairs + first
            _write_cos_sin(sums, factors, row, at(pointer(cos), out), at(pointer(sin), out), count)


def _cos_sin(cos_sin_part, positions, frequencies, factors, cos, sin, threads):
    """Write cos and sin of positions times frequencies; see `cos_sin_kernel`."""
    parts = threads if cos.size >= _PARALLEL_FROM else np.intp(1)
    compile.run_parts(cos_sin_part, (positions, frequencies, factors, cos, sin), parts)


def _array_types(dtype: str) -> tuple[types.Array, ...]:
    """Return the types of the arrays that the kernel takes, in the order of its arguments."""
    positions = types.Array(types.float64, 3, "A", readonly=True)
    frequencies = types.Array(types.float64, 5, "C", readonly=True)
    factors = types.Array(types.float64, 2, "C", readonly=True)
    output = types.Array(getattr(types, dtype), 4, "C")
    return positions, frequencies, factors, output, output


@cache
def cos_sin_part(dtype: str) -> Any:
    """Return the compiled part of the kernel for a dtype of cos and sin, float32 or float64."""
    arrays = types.Tuple(_array_types(dtype))
    return compile.compile_part(_cos_sin_part, f"cos_sin_part_{dtype}", arrays)


@cache
def cos_sin_kernel(dtype: str) -> Any:
    """Return the compiled kernel that writes cos and sin of a dtype, float32 or float64.

    Its arguments:

    - cos_sin_part: the address of the part;
    - positions: float64 (batch or 1, tokens, axes or 1);
    - frequencies: float64 (batch or 1, 2, axes, heads, pairs), the high and the low part in
      revolutions per unit of position;
    - factors: float64 (batch or 1, 2), on cos and on sin; a negative factor on sin rotates
      backwards;
    - cos, sin: (batch, tokens, heads, pairs), the outputs;
    - threads: maximum number of threads.
    """
    signature = (types.intp, *_array_types(dtype), types.intp)
    return compile.compile_kernel(_cos_sin, f"cos_sin_{dtype}", signature)
