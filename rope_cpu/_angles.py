"""The angle kernel: exact cos and sin of position times frequency, faster than a table of them could be read.

Each frequency is kept as turns, ω/2π = high + low, two float64 that hold it to about 2^-106. The product with a
position is formed in two parts as well, whole turns are dropped while nothing is lost, and short polynomials do the
rest. So the result is within two ulp of float64 where |position·ω| is below 2^53 radians, and the loop over pairs has
no branch.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from functools import cache
from math import factorial

import numpy as np
from numba import types

from rope_cpu._compile import DONE, LOOK_CLOSER, SOURCES, Kernel, address, array_type, compiled, entry_point, helper
from rope_cpu._muladd import in_widest_vectors, muladd, product_error
from rope_cpu._pool import share
from rope_cpu._words import fetch, least, pointer, room, spill

# 2π, and what float64 leaves of it; the Taylor coefficients of sin and cos, enough for an angle of ⅛ turn.
_TWO_PI, _TWO_PI_REST = 6.283185307179586, 2.4492935982947064e-16
_SIN = tuple((-1.0) ** n / factorial(2 * n + 1) for n in range(8, 0, -1))
_COS = tuple((-1.0) ** n / factorial(2 * n) for n in range(8, 0, -1))


@helper
def _set_turns(count, position, high, low, turns, rest):
    """Split position·(high + low), less whole turns, into turns + rest."""
    in_widest_vectors()
    for i in range(count):
        product = position * high[i]
        turns[i] = product - np.rint(product)
        rest[i] = muladd(position, low[i], product_error(position, high[i], product))


@helper
def _add_turns(count, position, high, low, turns, rest):
    """Add position·(high + low) to turns + rest, less whole turns; what rounding loses of either sum goes to rest."""
    in_widest_vectors()
    for i in range(count):
        product = position * high[i]
        part = product - np.rint(product)
        total = turns[i] + part
        shadow = total - turns[i]
        lost = (turns[i] - (total - shadow)) + (part - shadow)
        rest[i] += lost + muladd(position, low[i], product_error(position, high[i], product))
        turns[i] = total


@helper
def _add_turns32(count, position, high, low, turns):
    """Add the same to turns alone: what rounding loses, 2^-53 of a turn, is far below what float32 rounds away."""
    in_widest_vectors()
    for i in range(count):
        product = position * high[i]
        rest = muladd(position, low[i], product_error(position, high[i], product))
        turns[i] += (product - np.rint(product)) + rest


@helper
def _place(sine, cosine, quarter):
    """Cosine and sine of an angle from those of its rest after so many quarter turns, without a branch.

    A quarter turn swaps the two and a half turn negates both; quarter is a whole number.
    """
    quarter -= 4.0 * np.rint(0.25 * quarter)
    odd, even = quarter * quarter == 1.0, 1.0 - 0.5 * quarter * quarter
    return -quarter * sine if odd else even * cosine, quarter * cosine if odd else even * sine


@helper
def _circle(count, turns, rest, sign, factor, cos, sin):
    """Write factor·cos and sign·factor·sin of turns + rest: to a float64 ulp, then rounded to the array's dtype."""
    in_widest_vectors()
    for i in range(count):
        total = turns[i] + rest[i]
        tail = (turns[i] - total) + rest[i]
        quarter = np.rint(4.0 * total)
        r = muladd(quarter, -0.25, total)
        z = r * _TWO_PI
        dz = muladd(r, _TWO_PI_REST, product_error(r, _TWO_PI, z)) + tail * _TWO_PI
        z2 = z * z
        s, c = _SIN[0], _COS[0]
        s, c = muladd(z2, s, _SIN[1]), muladd(z2, c, _COS[1])
        s, c = muladd(z2, s, _SIN[2]), muladd(z2, c, _COS[2])
        s, c = muladd(z2, s, _SIN[3]), muladd(z2, c, _COS[3])
        s, c = muladd(z2, s, _SIN[4]), muladd(z2, c, _COS[4])
        s, c = muladd(z2, s, _SIN[5]), muladd(z2, c, _COS[5])
        s, c = muladd(z2, s, _SIN[6]), muladd(z2, c, _COS[6])
        s, c = muladd(z2, s, _SIN[7]), muladd(z2, c, _COS[7])
        cosine, sine = _place(z + muladd(z * z2, s, dz), 1.0 + muladd(z2, c, -z * dz), quarter)
        cos[i] = factor * cosine
        sin[i] = factor * sign * sine


@helper
def _circle32(count, turns, sign, factor, cos, sin):
    """Do the same to 1.2e-10, far below what float32 rounds away: half the work, for float32 arrays."""
    in_widest_vectors()
    for i in range(count):
        quarter = np.rint(4.0 * turns[i])
        z = muladd(quarter, -0.25, turns[i]) * _TWO_PI
        z2 = z * z
        s, c = _SIN[3], _COS[3]
        s, c = muladd(z2, s, _SIN[4]), muladd(z2, c, _COS[4])
        s, c = muladd(z2, s, _SIN[5]), muladd(z2, c, _COS[5])
        s, c = muladd(z2, s, _SIN[6]), muladd(z2, c, _COS[6])
        s, c = muladd(z2, s, _SIN[7]), muladd(z2, c, _COS[7])
        cosine, sine = _place(muladd(z * z2, s, z), muladd(z2, c, 1.0), quarter)
        cos[i] = factor * cosine
        sin[i] = factor * sign * sine


# 1 / 2π in two parts: the turns of an angle of one radian.
_TURN, _TURN_REST = 0.15915494309189535, -9.839338337591001e-18


@helper
def _add_radians32(count, position, frequencies, angle):
    """Add the float32 product position·frequency to float32 angles, as a float32 model does."""
    for i in range(count):
        product = np.float32(position) * np.float32(frequencies[i])
        angle[i] = np.float32(angle[i]) + product


@helper
def _scale32(count, factor, cos, sin):
    """Round cos and sin to float32 and multiply them there, as a float32 model does."""
    for i in range(count):
        cos[i] = np.float32(cos[i]) * np.float32(factor)
        sin[i] = np.float32(sin[i]) * np.float32(factor)


_WORDS = 13  # of a job
_PIECE = 128  # pairs whose angles are held on the stack at a time

# Pairs that are worth a thread of their own: 5 µs of work, where it takes 2 to wake one.
_WORTH_A_THREAD = 2**12


@cache
def circles(dtype: str, single: bool) -> Kernel:
    """Return the kernel that computes cos and sin: (address of a job, start, stop), a range of rows of the tables.

    single: repeat float32 arithmetic; the first part of turns is then ω itself, the second unused.
    """
    sources, wide = SOURCES, dtype == "float64"
    size = 8 if wide else 4

    def fill(job, start, stop):
        _ = sources  # a part of the cache key
        (
            positions, position_rows, coordinates, turns, turn_rows, axes, heads, pairs,
            factors, sign, cos_at, sin_at, seq,
        ) = fetch(job, _WORDS)  # fmt: skip
        whole, rest, angle, nothing = room(_PIECE), room(_PIECE), room(_PIECE), room(_PIECE)
        pieces = (pairs + _PIECE - 1) // _PIECE
        for row in range(start, stop):
            b = row // seq
            p, f = least(b, position_rows - 1) * seq + row % seq, least(b, turn_rows - 1)
            factor = pointer(factors, "float64")[f]
            for piece in range(heads * pieces):
                h, first = piece // pieces, piece % pieces * _PIECE
                count = least(pairs - first, _PIECE)
                place = ((row * heads + h) * pairs + first) * size
                cos, sin = pointer(cos_at + place, dtype), pointer(sin_at + place, dtype)
                for i in range(count):
                    whole[i] = angle[i] = nothing[i] = 0.0
                for axis in range(axes):
                    position = pointer(positions, "float64")[p * coordinates + least(axis, coordinates - 1)]
                    omega = turns + (((f * axes + axis) * heads + h) * 2 * pairs + first) * 8
                    high, low = pointer(omega, "float64"), pointer(omega + 8 * pairs, "float64")
                    if single:  # known while compiling
                        _add_radians32(count, position, high, angle)
                    elif not wide:
                        _add_turns32(count, position, high, low, whole)
                    elif axis:
                        _add_turns(count, position, high, low, whole, rest)
                    else:
                        _set_turns(count, position, high, low, whole, rest)
                if single:
                    _set_turns(count, _TURN, angle, nothing, whole, rest)
                    _add_turns(count, _TURN_REST, angle, nothing, whole, rest)
                    _circle(count, whole, rest, sign, 1.0, cos, sin)
                    _scale32(count, factor, cos, sin)
                elif wide:
                    _circle(count, whole, rest, sign, factor, cos, sin)
                else:
                    _circle32(count, whole, sign, factor, cos, sin)
        return DONE

    return compiled(fill, f"circles_{'single_' if single else ''}{dtype}", (types.int64,) * 3)


@cache
def angles(dtype: str) -> Kernel:
    """Return the kernel (positions, limit, turns, factor, sign, cos, sin, work, pool) → DONE or LOOK_CLOSER.

    positions: float64 (1 or batch, seq, 1 or axes); one coordinate serves every axis. turns: float64 (1 or batch, axes,
    heads, 2, pairs), high and low parts of ω/2π. factor: float64 (1 or batch,), on cos and sin. sign: −1 turns back.
    cos, sin: float32 or float64 (1 or batch, seq, heads, pairs). work: where `circles` is. pool: whose threads share
    the work; 0: none.
    LOOK_CLOSER: a position is not finite or beyond ±limit.
    """
    sources = SOURCES

    def check(positions, limit, turns, factor, sign, cos, sin, work, pool):
        _ = sources  # a part of the cache key
        for p in positions.flat:
            if not abs(p) <= limit:
                return LOOK_CLOSER
        job = spill((
            positions.ctypes.data, positions.shape[0], positions.shape[2],
            turns.ctypes.data, turns.shape[0], turns.shape[1], cos.shape[2], cos.shape[3],
            factor.ctypes.data, sign, cos.ctypes.data, sin.ctypes.data, cos.shape[1],
        ))  # fmt: skip
        share(pool, work, job, cos.shape[0] * cos.shape[1], cos.size // _WORTH_A_THREAD)
        return DONE

    real = types.float64 if dtype == "float64" else types.float32
    table = array_type(real, 4, readonly=False, layout="C")
    positions, turns, factor = (array_type(types.float64, n, layout="C") for n in (3, 5, 1))
    signature = (positions, types.float64, turns, factor, types.int64, table, table)
    return compiled(check, f"angles_{dtype}", (*signature, types.int64, types.int64))


@cache
def quick_angles(dtype: str, single: bool) -> tuple[Kernel, int]:
    """Return the same without the check of types, and the `work` it needs."""
    return entry_point(angles(dtype)), address(circles(dtype, single))
