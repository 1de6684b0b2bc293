"""The angle kernel: exact cos and sin of position times frequency, faster than a table of them could be read.

Each frequency is kept as turns, ω/2π = high + low, two float64 that hold it to about 2^-106. The product with a
position is formed in two parts as well, whole turns are dropped while nothing is lost, and short polynomials do the
rest, see `chains`. So float64 is within 2^-52 of the exact value where |position·ω| is below 2^53 radians.
"""

from __future__ import annotations

from functools import cache, partial, reduce
from typing import Any, NamedTuple

from llvmlite import ir

from rope_cpu._kernels.builder import kept
from rope_cpu._kernels.circle import Token, write_cos_sin
from rope_cpu._kernels.compiler import DONE, LOOK_CLOSER, Kernel, compiled
from rope_cpu._kernels.entry import float_bits, object_at, whole
from rope_cpu._kernels.flow import Ending, Variable, each, plain_loop
from rope_cpu._kernels.formats import FORMATS, I64
from rope_cpu._kernels.integers import Integer, choose, larger, number, smaller
from rope_cpu._kernels.objects import location, look
from rope_cpu._kernels.sharing import share
from rope_cpu._kernels.words import spill

_MAGNITUDE = 2**63 - 1  # of the bits of a float64, all but its sign
# Up to so many pairs of cos and sin, at 0.5 to 1.5 ns each, it costs more than it saves to share the work.
SERIAL_PAIRS = 2**14
# Pairs that are worth a thread of their own: 5 µs of work, where it takes 2 to wake one.
_WORTH_A_THREAD = 2**12
_LOOKED_AT = 16  # positions at a time


class Job(NamedTuple):
    """What is told of tables that are to be computed: addresses, and what `angles` says of the arrays there."""

    positions: Any
    position_rows: Any
    coordinates: Any
    turns: Any
    turn_rows: Any
    axes: Any
    heads: Any
    parts: Any
    pairs: Any
    factors: Any
    sign: Any
    cos: Any
    sin: Any
    seq: Any


def _token(job: Job, b: Integer, t: Integer, row: Integer, head: Integer, size: int) -> tuple[Token, Integer]:
    """Return the token of a row of the tables in one head, and where its factor stands.

    b, t: batch row and number of the token. size: bytes of an element of the tables.
    """
    place, own = smaller(b, job.position_rows - 1) * job.seq + t, smaller(b, job.turn_rows - 1)
    turns, to = job.pairs * job.parts * 8, (row * job.heads + head) * job.pairs * size
    several = job.coordinates > 1
    token = Token(
        job.positions + 8 * job.coordinates * place, 8 * number(several),
        job.turns + turns * (own * job.axes * job.heads + head), turns * job.heads, job.axes,
        choose(several, job.parts - 1, 1), job.pairs, job.sign, job.cos + to, job.sin + to,
    )  # fmt: skip
    return token, job.factors + 8 * own


def _fill(job: Integer, start: Integer, stop: Integer, kind: str, dtype: str) -> int:
    """Write some rows of the tables; see `cos_sin`."""
    told, size = Job(*job.words(len(Job._fields))), FORMATS[dtype].size
    b, t = Variable(job.b, start // told.seq), Variable(job.b, start % told.seq)
    with each(start, stop) as row:
        with each(0, told.heads) as head:
            write_cos_sin(*_token(told, b.now, t.now, row, head, size), kind, dtype)
        following = t.now + 1
        b.set(b.now + number(following == told.seq))
        t.set(choose(following == told.seq, 0, following))
    return DONE


def kinds(dtype: str) -> tuple[str, ...]:
    """Return the ways in which tables of a dtype may be computed, keys of `chains.KINDS`."""
    return ("usual", "any", "model") if dtype == "float32" else ("exact", "model")


@cache
def cos_sin(dtype: str, kind: str) -> Kernel:
    """Return the kernel that computes cos and sin: (address of a job, start, stop), a range of rows of the tables.

    kind: how float32 would be computed, see `kind_of` in `rope_cpu.angles`; other dtypes are exact, but for "model".
    """
    if dtype != "float32" and kind not in ("exact", "model"):
        return cos_sin(dtype, "exact")
    return compiled(partial(_fill, kind=kind, dtype=dtype), f"cos_sin_{kind}_{dtype}", [whole] * 3)


def furthest_of_few(at: Integer, count: Integer, start: Integer | int = 0, before: Integer | int = 0) -> Integer:
    """Return the bits of the largest of positions `start` to `count` without their signs, or those of one `before`.

    Infinity and then NaN are largest.
    """
    found = Variable(at.b, before)
    with each(start, count) as n:
        (word,) = (at + n * 8).words(1)
        found.set(larger(found.now, word & _MAGNITUDE))
    return found.now


def _furthest(at: Integer, count: Integer) -> Integer:
    """Return the same of many.

    As LLVM sees no array in an address, it would look at one after the other, which took a tenth of the time of tables.
    """
    b, several = at.b, ir.VectorType(I64, _LOOKED_AT)
    magnitude, none = (ir.Constant(several, [bits] * _LOOKED_AT) for bits in (_MAGNITUDE, 0))
    place = kept(b, none)
    with plain_loop(count // _LOOKED_AT, [at], [8 * _LOOKED_AT]) as (first,):
        bits = b.load(b.inttoptr(first.value, several.as_pointer()))
        bits.align = 8
        bits, before = b.and_(bits, magnitude), b.load(place)
        b.store(b.select(b.icmp_signed(">", bits, before), bits, before), place)
    seen = b.load(place)
    lanes = (Integer(b, b.extract_element(seen, I64(lane))) for lane in range(_LOOKED_AT))
    return furthest_of_few(at, count, count & -_LOOKED_AT, reduce(larger, lanes))


def _write(
    positions: Integer,
    limit: Integer,
    turns: Integer,
    factor: Integer,
    sign: Integer,
    cos: Integer,
    sin: Integer,
    work: Integer,
    pool: Integer,
) -> Integer:
    """Look at positions and have tables written; see `angles`."""
    b, end = sign.b, Ending(sign.b)
    (positions_at, positions_shape), (turns_at, turns_shape) = location(positions), location(turns)
    batch, seq, coordinates = positions_shape.words(3)
    end.leave_if(_furthest(positions_at, batch * seq * coordinates) > limit, LOOK_CLOSER)
    turn_rows, axes, heads, parts, pairs = turns_shape.words(5)
    rows = seq * choose(turn_rows == 1, batch, turn_rows)
    job = Job(
        positions_at, batch, coordinates, turns_at, turn_rows, axes, heads, parts, pairs,
        location(factor)[0], sign, location(cos)[0], location(sin)[0], seq,
    )  # fmt: skip
    share(pool, work, spill(b, job), rows, rows * heads * pairs // _WORTH_A_THREAD)
    return end.reached(DONE)


@cache
def angles() -> Kernel:
    """Return the kernel (positions, limit, turns, factor, sign, cos, sin, work, pool) → DONE or LOOK_CLOSER.

    Arrays come as objects, C-contiguous and aligned; the caller holds them, and has made sure of their dtype and shape.
    positions: float64 (1 or batch, seq, 1 or axes); one coordinate serves every axis. turns: float64 (1 or batch, axes,
    heads, parts, pairs), see `parts_of` in `rope_cpu.angles`. factor: float64 (1 or batch,), on cos and sin. sign: −1
    turns back. cos, sin: (1 or batch, seq, heads, pairs) of what `cos_sin` writes. work: where that is. pool: whose
    threads share the work; 0: none.
    LOOK_CLOSER: a position is not finite or beyond ±limit.
    """
    look()
    parameters = [object_at, float_bits, object_at, object_at, whole, object_at, object_at, whole, whole]
    return compiled(_write, "angles", parameters)
