"""The angle kernel: exact cos and sin of position times frequency, faster than a table of them could be read.

Each frequency is kept as turns, ω/2π = high + low, two float64 that hold it to about 2^-106. The product with a
position is formed in two parts as well, whole turns are dropped while nothing is lost, and short polynomials do the
rest, see `_circle`. So float64 is within 2^-52 of the exact value where |position·ω| is below 2^53 radians.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, var-annotated"

from __future__ import annotations

from functools import cache

from numba import types

from rope_cpu._circle import write_circles
from rope_cpu._compile import DONE, LOOK_CLOSER, SOURCES, Kernel, address, compiled, entry_point
from rope_cpu._formats import FORMATS
from rope_cpu._integers import emitted, number, smaller
from rope_cpu._objects import OBJECT, location, look, where
from rope_cpu._pool import share
from rope_cpu._words import fetch, pointer, spill

_WORDS = 13  # of a job
# Pairs that are worth a thread of their own: 5 µs of work, where it takes 2 to wake one.
_WORTH_A_THREAD = 2**12


@emitted(types.Tuple((types.UniTuple(types.int64, 9), types.int64)))
def _token(job, b, t, row, head, size):
    """Return the token of a row of the tables in one head, as `write_circles` takes it, and where its factor stands.

    job: words. b, t: batch row and number of the token. size: bytes of an element of the tables.
    """
    (
        positions, position_rows, coordinates, turns, turn_rows, axes, heads, pairs,
        factors, sign, cos_at, sin_at, seq,
    ) = job  # fmt: skip
    place, own = smaller(b, position_rows - 1) * seq + t, smaller(b, turn_rows - 1)
    first, step, to = (own * axes * heads + head) * pairs, heads * pairs, (row * heads + head) * pairs * size
    return (
        positions + 8 * coordinates * place, 8 * number(coordinates > 1), turns + 16 * first, 16 * step,
        axes, pairs, sign, cos_at + to, sin_at + to,
    ), factors + 8 * own  # fmt: skip


@cache
def circles(dtype: str, single: bool) -> Kernel:
    """Return the kernel that computes cos and sin: (address of a job, start, stop), a range of rows of the tables.

    single: repeat float32 arithmetic; the first part of turns is then ω itself, the second unused.
    """
    kind = "model" if single else "float32" if dtype == "float32" else "float64"
    sources, size = SOURCES, FORMATS[dtype].size

    def fill(job, start, stop):
        _ = sources  # a part of the cache key
        words = fetch(job, _WORDS)
        heads, seq = words[6], words[12]
        b, t = start // seq, start % seq
        for row in range(start, stop):
            for head in range(heads):
                token, factor = _token(words, b, t, row, head, size)
                write_circles(token, pointer(factor, "float64")[0], kind, dtype)
            t += 1
            if t == seq:
                b, t = b + 1, 0
        return DONE

    return compiled(fill, f"circles_{'single_' if single else ''}{dtype}", (types.int64,) * 3)


@cache
def angles() -> Kernel:
    """Return the kernel (positions, limit, turns, factor, sign, cos, sin, work, pool) → DONE or LOOK_CLOSER.

    Arrays come as objects, C-contiguous and aligned; the caller holds them, and has made sure of their dtype and shape.
    positions: float64 (1 or batch, seq, 1 or axes); one coordinate serves every axis. turns: float64 (1 or batch, axes,
    heads, 2, pairs), high and low parts of ω/2π. factor: float64 (1 or batch,), on cos and sin. sign: −1 turns back.
    cos, sin: (1 or batch, seq, heads, pairs) of what `circles` writes. work: where that is. pool: whose threads share
    the work; 0: none.
    LOOK_CLOSER: a position is not finite or beyond ±limit.
    """
    look()
    sources = SOURCES

    def check(positions, limit, turns, factor, sign, cos, sin, work, pool):
        _ = sources  # a part of the cache key
        (positions_at, positions_shape), (turns_at, turns_shape) = location(where(positions)), location(where(turns))
        batch, seq, coordinates = fetch(positions_shape, 3)
        given = pointer(positions_at, "float64")
        for n in range(batch * seq * coordinates):
            if not abs(given[n]) <= limit:
                return LOOK_CLOSER
        turn_rows, axes, heads, _two, pairs = fetch(turns_shape, 5)
        rows = seq * (batch if turn_rows == 1 else turn_rows)
        job = spill((
            positions_at, batch, coordinates, turns_at, turn_rows, axes, heads, pairs,
            location(where(factor))[0], sign, location(where(cos))[0], location(where(sin))[0], seq,
        ))  # fmt: skip
        share(pool, work, job, rows, rows * heads * pairs // _WORTH_A_THREAD)
        return DONE

    signature = (OBJECT, types.float64, OBJECT, OBJECT, types.int64, OBJECT, OBJECT, types.int64, types.int64)
    return compiled(check, "angles", signature)


@cache
def quick_angles(dtype: str, single: bool) -> tuple[Kernel, int]:
    """Return the same without the check of types, and the `work` it needs to write a dtype."""
    return entry_point(angles()), address(circles(dtype, single))
