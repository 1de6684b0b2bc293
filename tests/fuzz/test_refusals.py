"""Subclasses of arrays, tables, and functions of plain arguments: right results, or refusals.

Wrong arrays, outputs, ids and slots are rows of the tables in tests/rotation and tests/launch.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
from fuzz import calls
from fuzz.mutations import LARGEST_NUMBER
from fuzz.placed import Memory
from hypothesis import assume
from hypothesis import strategies as st
from refusals import check_ours

import rope_cpu
from rope_cpu import positions


class Subclass(np.ndarray):
    """A subclass that changes nothing."""


def _filled(call):
    """Return a call with non-empty arrays that share no memory."""
    return replace(
        call,
        batch=max(call.batch, 1),
        tokens=max(call.tokens, 2),
        out="own" if call.out == "shifted" else call.out,
        places=tuple(replace(place, repeated=()) for place in call.places),
        ids=replace(call.ids, form="row") if call.ids.form != "rows" else call.ids,
    )


def test_subclasses(search):
    """A subclass is rotated like its base array, or refused."""

    def check_subclass(call):
        memory = Memory(call.seed)
        arranged = calls.arrange(call, memory)
        sources = {name: x.copy() for name, x in arranged.inputs.items()}
        arranged.inputs = {name: x.view(Subclass) for name, x in arranged.inputs.items()}
        memory.remember()
        results = calls.run(arranged)
        assert memory.changed_outside([*(arranged.outs or {}).values()]) == 0
        tables = calls.exact_tables(arranged)
        for result, x in zip(results, sources.values(), strict=True):
            calls.check_rotated(call, np.asarray(result), x, *tables)

    search(check_subclass, 20, call=calls.calls().map(_filled))


TABLE_DTYPES = st.sampled_from(tuple(calls.DTYPES))


@st.composite
def tables(draw):
    """Draw arguments of `cos_sin`."""
    rotary = draw(calls.rotaries())
    assume(rotary.rows == 1)
    return replace(
        _filled(draw(calls.calls())),
        rotary=rotary,
        way="plan",
        layout="thd",
        inverse=False,
        batch=1,
        ids=draw(calls.ids(rotary, "plan", "thd")),
        dtype=draw(TABLE_DTYPES),
    )


def test_tables(search):
    """Cos and sin of every dtype, in new arrays and in given ones."""

    def check_tables(call, into):
        memory = Memory(call.seed)
        positions, ids = calls._positions(call, memory)
        arranged = calls.Arranged(call, memory, {}, None, ids, positions, None)
        dtype = calls.DTYPES[call.dtype]
        heads = (call.rotary.heads,) if call.rotary.heads > 1 else ()
        shape = (call.tokens, *heads, call.rotary.rope.rotary_dim // 2)
        outs = None
        if into:
            unused = (1,) * (4 - len(shape))
            placed = (memory.array((*unused, *shape), dtype, place) for place in call.places[2:])
            outs = tuple(out[(0,) * len(unused)] for out in placed)
        memory.remember()
        made = call.rotary.rope.cos_sin(ids, dtype, out=outs)
        assert memory.changed_outside(outs or []) == 0
        cos, sin, factor, lost = calls.exact_tables(arranged)
        unit = 2.0**-53 if call.dtype == "float64" else 2.0**-24
        slack = 1e-9 if unit > 2.0**-53 or call.rotary.in_float32 else 4 * unit
        slack += lost + calls.exact.OWN_ROUNDINGS * 2.0**-53
        for table, exact in zip(made, (cos, sin), strict=True):
            exact = exact.reshape(table.shape)
            allowed = calls.bound(exact, np.zeros_like(exact), dtype, 1.0, unit) + slack * factor
            with np.errstate(over="ignore", invalid="ignore"):
                error = np.abs(table.astype(np.float64) - exact)
                beyond = np.abs(exact) > float(calls.ml_dtypes.finfo(dtype).max) / 2
            assert (beyond | (error <= allowed)).all()

    search(check_tables, 30, call=tables(), into=st.booleans())


def argument_names(function):
    """Return the names of a function's arguments after the positional ones."""
    called = function.__init__ if isinstance(function, type) else function
    skipped = FUNCTIONS[function] + isinstance(function, type)
    return list(inspect.signature(called).parameters)[skipped:]


ODD = ("", "half", "interleaved", "float32", b"", float("nan"), float("inf"), -(10**400))
# Functions of plain arguments, by how many of these are given by position.
BY_POSITION = {
    0: (rope_cpu.Batch,),
    1: (
        *(positions.packed, positions.left_padded, positions.grid, positions.patches),
        *(positions.with_unrotated, positions.mrope, positions.token_types),
        *(rope_cpu.set_num_threads, rope_cpu.RMSNorm, rope_cpu.RotaryEmbedding),
        *(rope_cpu.RotaryEmbedding.from_inv_freq, rope_cpu.RotaryEmbedding.from_generators),
    ),
    2: (
        *(rope_cpu.sinusoidal, rope_cpu.convert_weight, rope_cpu.KVCache),
        *(rope_cpu.RotaryEmbedding.axial, rope_cpu.RotaryEmbedding.mrope),
    ),
    4: (rope_cpu.KVCache.zeros,),
}
FUNCTIONS = {function: count for count, each in BY_POSITION.items() for function in each}


def test_refused_arguments_of_functions(search):
    """Functions of plain arguments return, or raise TypeError or ValueError."""
    number = st.integers(-1, 9)
    odd = st.none() | st.booleans() | st.integers(-3, 40) | st.floats(-3, 40)
    odd |= st.sampled_from((*ODD, LARGEST_NUMBER)) | st.lists(number, max_size=4)
    odd |= st.lists(st.lists(number, max_size=3), max_size=3)
    names = {name for function in FUNCTIONS for name in argument_names(function)}
    sensible = {"to": "half", "image_token_id": 7, "video_token_id": 8, "rope_theta": 1e4}
    sensible |= {"seq_lens": [3, 9], "query_lens": [3, 1], "page_size": 8}
    sensible |= {"page_table": [[4, -1], [0, 2]], "dtype": "float32"}

    def check_function(function, arguments, options):
        allowed = argument_names(function)
        given = {name: value for name, value in (sensible | options).items() if name in allowed}
        threads = rope_cpu.get_num_threads()
        try:
            function(*arguments[: FUNCTIONS[function]], **given)
        except (TypeError, ValueError) as error:
            check_ours(error)
        finally:
            rope_cpu.set_num_threads(threads)

    search(
        check_function,
        150,
        function=st.sampled_from(tuple(FUNCTIONS)),
        arguments=st.lists(odd, min_size=4, max_size=4),
        options=st.dictionaries(st.sampled_from(sorted(names)), odd, max_size=3),
    )
