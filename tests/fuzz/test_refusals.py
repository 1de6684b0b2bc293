"""Calls with one wrong argument: TypeError or ValueError, and no array was written."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace
from functools import partial

import numpy as np
from fuzz import appends, calls
from fuzz.mutations import LARGEST_NUMBER
from fuzz.placed import Memory
from hypothesis import assume
from hypothesis import strategies as st
from refusals import check_ours, check_text

import rope_cpu
from rope_cpu import positions


class Subclass(np.ndarray):
    """A subclass that changes nothing."""


def other_order(x):
    return x.astype(x.dtype.newbyteorder()) if x.dtype.kind == "f" else x.astype(">f4")


# Functions from a valid array to a wrong value in its place.
WRONG_ARRAYS = {
    "other byte order": other_order,
    "int32": lambda x: np.zeros(x.shape, np.int32),
    "int16": lambda x: np.zeros(x.shape, np.int16),
    "uint16": lambda x: np.zeros(x.shape, np.uint16),
    "complex": lambda x: np.zeros(x.shape, np.complex64),
    "long double": lambda x: np.zeros(x.shape, np.complex128),
    "bool": lambda x: np.zeros(x.shape, bool),
    "objects": lambda x: np.zeros(x.shape, object),
    "structured": lambda x: np.zeros(x.shape, [("re", "f4")]),
    "masked": lambda x: np.ma.masked_array(x),
    "list": lambda x: x.tolist(),
    "None": lambda x: None,
    "number": lambda x: 1.0,
    "memory": lambda x: memoryview(np.zeros(4)),
    "string": lambda x: "x",
    "one axis less": lambda x: x[0],
    "one axis more": lambda x: x[None],
    "no axes": lambda x: np.zeros((), x.dtype),
    "wider": lambda x: np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype),
    "narrower": lambda x: x[..., :-1],
}
WRONG_OUTS = {name: WRONG_ARRAYS[name] for name in WRONG_ARRAYS if name != "None"} | {
    "read-only": lambda x: _read_only(np.zeros(x.shape, x.dtype)),
    "repeated": lambda x: np.broadcast_to(np.zeros((1,) * x.ndim, x.dtype), x.shape),
    "repeated, not read-only": lambda x: _strided(x, 0),
    "rolling": lambda x: _strided(x, x.itemsize),
}
WRONG_IDS = {
    "NaN": lambda ids: _with(ids, np.nan),
    "infinite": lambda ids: _with(ids, -np.inf),
    "too large": lambda ids: _with(ids, 2.0**54),
    "bool": lambda ids: np.zeros(ids.shape, bool),
    "complex": lambda ids: np.zeros(ids.shape, complex),
    "float16": lambda ids: np.zeros(ids.shape, np.float16),
    "strings": lambda ids: np.full(ids.shape, "1"),
    "dates": lambda ids: np.zeros(ids.shape, "M8[s]"),
    "objects": lambda ids: np.full(ids.shape, None),
    "huge objects": lambda ids: np.full(ids.shape, 10**400, object),
    "masked": lambda ids: np.ma.masked_array(ids),
    "ragged": lambda ids: [[1], [2, 3]],
    "one more": lambda ids: np.insert(ids, 0, 0, axis=min(ids.ndim - 1, 1)),
    "two axes more": lambda ids: ids[None, None, None],
    "string": lambda ids: "0",
    "dict": lambda ids: {},
}
BATCH = {"seq_lens": [1], "query_lens": [1], "page_table": [[10**6]], "page_size": 64}
WRONG_SLOTS = {
    "past the cache": lambda slots: slots + 10**6,
    "below -1": lambda slots: slots - 10**6,
    "twice": lambda slots: np.zeros_like(slots),
    "one more": lambda slots: np.concatenate([slots, -np.ones_like(slots[..., :1])], axis=-1),
    "one axis more": lambda slots: slots[None],
    "floats": lambda slots: slots.astype(float),
    "huge objects": lambda slots: np.full(slots.shape, 10**400, object),
    "masked": lambda slots: np.ma.masked_array(slots),
    "None": lambda slots: None,
    "string": lambda slots: "0",
    "batch": lambda slots: rope_cpu.Batch(**BATCH),
}
WRONG_OPTIONS = {
    "layout": ["bsdh", "", None, 1, "BSHD", ["bshd"], b"bshd"],
    "inverse": [None, 0, 1, "yes", np.array([True, False]), 1.0],
}


def _read_only(x):
    x.flags.writeable = False
    return x


def _strided(x, step):
    """Return an array whose axes all have this stride."""
    buffer = np.zeros(sum(x.shape), x.dtype)
    return np.lib.stride_tricks.as_strided(buffer, x.shape, (step,) * x.ndim)


def _with(ids, value):
    changed = np.array(ids, np.float64)
    changed.flat[-1] = value
    return changed


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


@st.composite
def wrong_calls(draw):
    """Draw a call, its wrong argument, and the kind of mistake."""
    call = _filled(draw(calls.calls()))
    kinds = {"array": WRONG_ARRAYS, "out": WRONG_OUTS, "ids": WRONG_IDS, "option": WRONG_OPTIONS}
    which = draw(st.sampled_from(tuple(kinds)))
    how = draw(st.sampled_from(tuple(kinds[which])))
    if which == "option":
        assume(not (how == "inverse" and call.way == "shift"))
        how = how, draw(st.sampled_from(range(len(WRONG_OPTIONS[how]))))
    if which == "out":
        call = replace(call, out="own")
    # The tables of apply_rotary rotate the first elements of heads of any sufficient width.
    of_any_width = call.way == "apply_rotary" and which == "array"
    assume(not (of_any_width and how in ("wider", "narrower")))
    return call, which, how


def assert_refused(memory, call, mistake, check_error):
    """Raise unless a call is refused, and has written nothing."""
    memory.remember()
    try:
        call()
    except (TypeError, ValueError) as error:
        check_error(error)
    else:
        raise AssertionError(f"{mistake} was not refused")
    assert memory.changed_outside([]) == 0, "a refused call wrote to an array"


def test_wrong_calls(search):
    search(check, 80, drawn=wrong_calls())


def check(drawn):
    call, which, how = drawn
    memory = Memory(call.seed)
    arranged = calls.arrange(call, memory)
    name = next(reversed(arranged.inputs))
    if which == "array":
        arranged.inputs[name] = WRONG_ARRAYS[how](arranged.inputs[name])
    elif which == "out":
        x = arranged.inputs[name]
        assume(x.size > 1 or not ("repeated" in how or how == "rolling"))
        assume(sum(size > 1 for size in x.shape) > 1 or how != "rolling")
        arranged.outs[f"{name}_out"] = WRONG_OUTS[how](x)
    elif which == "ids":
        assume(call.rotary.axes == 1 or how not in ("one more", "ragged"))
        arranged.ids = WRONG_IDS[how](np.asarray(arranged.ids))
    else:
        call = replace(call, **{how[0]: WRONG_OPTIONS[how[0]][how[1]]})
        arranged.call = call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        assert_refused(memory, lambda: calls.run(arranged), f"{which}: {how}", check_text)


@st.composite
def wrong_appends(draw):
    """Draw an append, the name of its wrong argument, and the kind of mistake."""
    case = draw(appends.appends())
    case = replace(
        case,
        operation="append",
        tokens=max(case.tokens, 2),
        places=tuple(replace(place, repeated=()) for place in case.places),
    )
    kinds = dict.fromkeys("qkv", WRONG_ARRAYS)
    kinds |= {"out": WRONG_OUTS, "slot_mapping": WRONG_SLOTS, "cache": WRONG_ARRAYS}
    name = draw(st.sampled_from(tuple(kinds)))
    return case, name, draw(st.sampled_from(tuple(kinds[name])))


def test_wrong_appends(search):
    search(check_append, 80, drawn=wrong_appends())


def check_append(drawn):
    case, name, how = drawn
    memory = Memory(case.seed)
    arranged = appends.arrange(case, memory)
    arguments = arranged.arguments
    if name == "slot_mapping":
        arguments[name] = WRONG_SLOTS[how](arguments[name])
    elif name == "out":
        q = arguments["q"]
        assume(sum(size > 1 for size in q.shape) > 1 or how != "rolling")
        arguments[name] = WRONG_OUTS[how](q)
    else:
        right = arguments["cache"].key if name == "cache" else arguments[name]
        arguments[name] = WRONG_ARRAYS[how](right)
    call = partial(arranged.plan.append, **arguments)
    assert_refused(memory, call, f"{name}: {how}", check_ours)


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
