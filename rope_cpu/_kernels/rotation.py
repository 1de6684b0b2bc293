"""The rotation kernel: q and k of any strides in one launch, checked in compiled code.

A kernel that finds its arguments unfit writes nothing and returns LOOK_CLOSER; `_check` then says in words what is
wrong, or brings the arguments into a form the kernel takes. So a good call pays for its checks in compiled code alone.
It also says when it is told of another dtype, and when it needs threads that are not started.
"""

from __future__ import annotations

import struct
from functools import cache, partial, reduce
from operator import mul
from typing import Any, NamedTuple

from rope_cpu._kernels.angles import SERIAL_PAIRS, Job, furthest_of_few
from rope_cpu._kernels.chains import NEAR
from rope_cpu._kernels.compiler import (
    DONE,
    LOOK_CLOSER,
    NO_THREADS,
    OTHER_DTYPE,
    Kernel,
    compiled,
)
from rope_cpu._kernels.division import FEW_TOKENS, divide
from rope_cpu._kernels.entry import object_at, whole
from rope_cpu._kernels.flow import Ending, Variable, each, when, whether
from rope_cpu._kernels.form import LAYOUTS, Form
from rope_cpu._kernels.integers import Integer, Words, choose, either, every, smaller
from rope_cpu._kernels.objects import ITEMS, ArrayView, items, location, look, view
from rope_cpu._kernels.overlap import aliasing_allowed, are_tables, fits, in_place
from rope_cpu._kernels.sharing import THREADS, share
from rope_cpu._kernels.words import LINE, allocate, call, free, spill, write_float

ALONE, TRUSTED, GIVEN = 1, 2, 4  # flags of a rotation
_FLAGS = 3  # bits
FIRST = 1 << _FLAGS  # times a position, added to flags
# Of a rotation on the way: elements of q, up to which it is faster, and how far its positions may be, also as the bits
# of a float64.
FEW_ELEMENTS, _FURTHEST = 2**17, int(NEAR)
(_FURTHEST_BITS,) = struct.unpack("q", struct.pack("d", NEAR))

# Elements of q and k for which one more thread than two may be woken: that takes longer the slower the processor.
_ONE_MORE = 2**15
_GIVEN_AT = 4  # which item of what is prepared holds positions
_BLOCKS = len(Form._fields)  # where the pairs of blocks begin in what is told


def _in_order(array: ArrayView, layout: Integer) -> ArrayView:
    """Return an array with its axes in the order batch, token, head, element."""
    at, *both = array
    by_head, by_token = layout == LAYOUTS["bhsd"], layout == LAYOUTS["sbhd"]
    shape, strides = (
        (
            choose(by_token, second, first),
            choose(by_token, first, choose(by_head, third, second)),
            choose(by_head, second, third),
            last,
        )
        for first, second, third, last in both
    )
    return at, shape, strides


def _arrays(q: Integer, k: Integer, out: Integer, flags: Integer, form: Form, end: Ending) -> list[ArrayView]:
    """Return where q and k and what they are written to lie; end: left where that is not what it should be."""
    out_q, out_k = Variable(q.b, out), Variable(q.b, out)
    with when(flags & ALONE == 0):
        for place, item in zip((out_q, out_k), items(out, form.tuple_kind, end), strict=True):
            place.set(item)
    views = [view(at, form.array_kind, form.rank, end) for at in (q, k, out_q.now, out_k.now)]
    arrays, dtype_words, writeable = zip(*views, strict=True)
    end.leave_if(~every(*writeable[2:]), LOOK_CLOSER)
    known = (flags & TRUSTED != 0) | every(*(word == form.dtype_word for word in dtype_words))
    end.leave_if(~known, choose(dtype_words[0] == form.dtype_word, LOOK_CLOSER, OTHER_DTYPE))
    return [_in_order(array, form.layout) for array in arrays]


def _fit(
    q: ArrayView,
    k: ArrayView,
    out_q: ArrayView,
    out_k: ArrayView,
    both: Integer,
    table: Words,
    size: int,
    width: Integer,
) -> Integer:
    """Tell whether arrays can be rotated as they stand."""
    k_fits = fits(k, out_k, table, size, width) & (q[1][0] == k[1][0])
    return fits(q, out_q, table, size, width) & (k_fits | ~both)


class _Places(NamedTuple):
    """Positions of a rotation on the way.

    first: that of the first token, where those of all are yet to be written. at: where they lie, 0 where they do not.
    rows, tokens, coordinates: their shape.
    """

    first: Any
    at: Any
    rows: Any
    tokens: Any
    coordinates: Any


def _places(prepared: Integer, flags: Integer, tokens: Integer, end: Ending) -> _Places:
    """Return the positions that are given, or follow the first; end: left where they are too far."""
    first, found = flags >> _FLAGS, [Variable(flags.b, start) for start in (0, 1, tokens, 1)]
    with whether(flags & GIVEN != 0) as (given, following):
        with given:
            at, shape = location((prepared + (ITEMS + 8 * _GIVEN_AT)).words(1)[0])
            rows, seq, coordinates = shape.words(3)
            end.leave_if(furthest_of_few(at, rows * seq * coordinates) > _FURTHEST_BITS, LOOK_CLOSER)
            for variable, number in zip(found, (at, rows, seq, coordinates), strict=True):
                variable.set(number)
        with following:
            end.leave_if(abs(first) + tokens > _FURTHEST, LOOK_CLOSER)
    return _Places(first, *(variable.now for variable in found))


def _table(turns: Integer, places: _Places, size: int) -> tuple[Words, Words]:
    """Return the shape of a table that is computed on the way, and its strides but for the last."""
    rows, _axes, heads, _parts, pairs = location(turns)[1].words(5)
    row = heads * pairs * size
    shape = choose(rows == 1, places.rows, rows), places.tokens, heads, pairs
    return shape, (places.tokens * row, row, pairs * size)


def _cos_sin(
    turns: Integer, factor: Integer, places: _Places, table: tuple[Words, Words], form: Form, end: Ending
) -> tuple[Integer, ArrayView, ArrayView]:
    """Compute cos and sin on the way; return the memory that holds them, and where they lie."""
    b, ((table_rows, tokens, _heads, _pairs), (row_step, *_)) = turns.b, table
    # Positions, to the end of a memory line, then cos and sin.
    written = choose(places.at == 0, tokens, 0)
    before, size = (written * 8 + (LINE - 1)) & -LINE, table_rows * row_step
    memory = allocate(b, before + size * 2 + LINE)
    end.leave_if(memory == 0, LOOK_CLOSER)
    own = (memory + LINE) & -LINE
    with each(0, written) as n:
        write_float(own + n * 8, places.first + n)
    positions, cos, sin = choose(places.at == 0, own, places.at), own + before, own + before + size
    turns_at, turns_shape = location(turns)
    (rows, axes, heads, parts, pairs), factors = turns_shape.words(5), location(factor)[0]
    job = Job(
        positions, places.rows, places.coordinates, turns_at, rows, axes, heads, parts, pairs,
        factors, form.sign, cos, sin, tokens,
    )  # fmt: skip
    call(form.cos_sin, spill(b, job), 0, table_rows * tokens)
    return memory, (cos, *table), (sin, *table)


def _rotate(
    q: Integer, k: Integer, out: Integer, prepared: Integer, flags: Integer, size: int, on_the_way: bool
) -> Integer:
    """Rotate q and k if they can be as they stand; see `rotation`."""
    b, end, real_size = flags.b, Ending(flags.b), max(size, 4)
    _kernel, cos, sin, told = (prepared + ITEMS).words(4)
    form_at, form_shape = location(told)
    form, both, trusted = Form(*form_at.words(_BLOCKS)), flags & ALONE == 0, flags & TRUSTED != 0
    q_view, k_view, oq_view, ok_view = _arrays(q, k, out, flags, form, end)
    (batch, tokens, q_heads, _width), k_heads = q_view[1], choose(both, k_view[1][2], 0)
    q_elements = batch * tokens * q_heads * form.width
    if on_the_way:
        # Without heads there may be any number of tokens.
        end.leave_if(q_elements > FEW_ELEMENTS, LOOK_CLOSER)
        places = _places(prepared, flags, tokens, end)
        table = _table(cos, places, real_size)
        end.leave_if(reduce(mul, table[0]) > SERIAL_PAIRS, LOOK_CLOSER)
    else:
        cos_view, sin_view = (view(at, form.array_kind, 4, end)[0] for at in (cos, sin))
        end.leave_if(~are_tables(cos_view, sin_view, real_size), LOOK_CLOSER)
        table = cos_view[1:]
    end.leave_if(~_fit(q_view, k_view, oq_view, ok_view, both, table[0], size, form.width), LOOK_CLOSER)

    elements = q_elements + batch * tokens * k_heads * form.width
    # Few tokens of one sequence are two units, q and k, and shared only if these are about equal.
    shared = (batch > 1) | (tokens > FEW_TOKENS) | (q_heads <= k_heads * 2)
    pool = choose(shared & (elements >= form.worth * 2), form.in_use.load(), 0)
    end.leave_if((pool < 0) & ~trusted, NO_THREADS)
    q_in_place, k_in_place = in_place(q_view, oq_view), in_place(k_view, ok_view)
    arrays = q_view, q_in_place, k_view, k_in_place, oq_view, ok_view
    end.leave_if(~either(trusted, lambda: aliasing_allowed(*arrays, both, size)), LOOK_CLOSER)

    if on_the_way:
        memory, cos_view, sin_view = _cos_sin(cos, sin, places, table, form, end)
    most, threads = Variable(b, 1), Variable(b, 1)
    with when(pool > 0):
        most.set(smaller(elements // form.worth, elements // _ONE_MORE + 2))
        threads.set(smaller(most.now, (pool + THREADS).load()))
    blocks = form_at + 8 * _BLOCKS, form_shape.words(1)[0] - _BLOCKS
    q_side, k_side = (q_view, oq_view, q_in_place), (k_view, ok_view, k_in_place)
    units, job = divide(q_side, k_side, both, cos_view, sin_view, form, blocks, most.now, threads.now, size)
    share(pool, form.work, spill(b, job), units, most.now)
    if on_the_way:
        free(b, memory)
    return end.reached(DONE)


@cache
def rotation(size: int, on_the_way: bool) -> Kernel:
    """Return the kernel (q, k, out, prepared, flags) → DONE, LOOK_CLOSER, OTHER_DTYPE or NO_THREADS.

    size: bytes of an element. q, k: any objects; what is no array of as many axes as the layout has, in its order, is
    not touched. If q is of another dtype than the form is for, OTHER_DTYPE. out: a pair of the like. prepared: a tuple
    of this kernel, of cos and sin, float32 (float64 for float64), (batch or 1, seq, frequency heads, pairs), and of the
    form, see `form_words`. flags: ALONE rotates q only, into out itself (k is then ignored); TRUSTED says that dtypes
    and aliasing were checked before.

    on_the_way: compute cos and sin; in their place come turns and factor, as the kernel `angles` takes them. Flags hold
    also the position of the first token times FIRST, and others follow it; or GIVEN, and positions, as `angles` takes
    them, come last in `prepared`. Many tokens, and those beyond ±_FURTHEST, need a closer look.

    The caller holds the arrays, and nobody else changes their shape meanwhile.
    """
    look()
    name = "rotation_at" if on_the_way else "rotation"
    write = partial(_rotate, size=size, on_the_way=on_the_way)
    return compiled(write, f"{name}_{size}", [*[object_at] * 4, whole])
