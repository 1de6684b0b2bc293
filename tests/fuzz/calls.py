"""Random rotations: the call, its arrays and the expected result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from fuzz import exact
from fuzz.placed import PLAIN, Memory, Place, places, strides_of
from fuzz.rotaries import SIZED, Rotary, plain, rotaries
from hypothesis import assume
from hypothesis import strategies as st

import rope_cpu
from rope_cpu.array_types import DTYPES, LAYOUT_AXES
from rope_cpu.rotation import dispatch

# Where batch, token, head and element stand in each layout; packed tokens are a batch of one.
ORDER = oracle.ORDER | {"thd": (0, 1, 2, 3)}
BATCHED = tuple(layout for layout in LAYOUT_AXES if layout != "thd")
WAYS = ("rotate", "call", "plan.rotate", "plan", "shift", "apply_rotary")
PAIRED = ("call", "plan")
PLANNED = ("plan", "plan.rotate")
OUTS = ("new", "in place", "own", "shifted")
TABLE_ROWS = 7  # of cos and sin that are looked up
TOGETHER = ("apart", "heads", "inside heads")
# The largest ids of narrow dtypes.
LARGEST = {"int8": 2.0**7 - 1, "uint16": 2.0**16 - 1, "int32": 2.0**31 - 1, ">i4": 2.0**31 - 1}


@dataclass(frozen=True)
class Ids:
    """Position ids.

    form: "none", "offset", "offsets" (one per batch row), "row" (seq,), "one row" (1, seq), "rows"
    (batch, seq), or "number" (of a shift alone). dtype: of the array, "list" for a list. scale: the
    largest. place: of the array in memory, its last axes.
    """

    form: str
    dtype: str
    scale: float
    seed: int
    place: Place = PLAIN


@dataclass(frozen=True)
class Call:
    """One rotation; see `perform`."""

    rotary: Rotary
    way: str
    layout: str
    dtype: str
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    inverse: bool
    ids: Ids
    values: str
    seed: int
    places: tuple[Place, Place, Place, Place] = (PLAIN,) * 4
    together: str = "apart"
    out: str = "new"
    out_shift: int = 0
    read_only: bool = False
    past_caches: bool = False
    table: str = "float32"
    table_by_row: bool = False
    table_heads: int = 0  # 0: the same cos and sin for every head

    @property
    def cu_seqlens(self):
        """The ends of packed sequences, one for each length; None for calls that take none."""
        if self.layout != "thd" or self.way not in PLANNED:
            return None
        random = np.random.default_rng(self.seed)
        inner = random.integers(0, self.tokens + 1, self.rotary.rows - 1)
        return np.array([0, *np.sort(inner), self.tokens])


@st.composite
def ids(draw, rotary, way, layout):
    """Draw position ids that a call may be given."""
    forms = ["row"] if layout == "thd" else ["row", "row", "one row", "rows"]
    if way in ("rotate", "call") and layout != "thd" and (rotary.axes == 1 or rotary.shared_id):
        forms += ["none", "offset", "offsets"]
    if way == "shift" and (rotary.axes == 1 or rotary.shared_id):
        forms += ["number"]
    if way == "apply_rotary":
        forms += ["none"]
    form = draw(st.sampled_from(forms))
    if way == "apply_rotary" or form in ("offset", "offsets"):
        dtype = draw(st.sampled_from(("int64", "int32", "uint16", ">i4", "list")))
    else:
        integers = ("int64", "int64", "int32", "int8", "uint64", ">i8")
        dtype = draw(st.sampled_from((*integers, "float64", "float32", ">f8")))
    most = LARGEST.get(dtype, 2.0**53 - 2**12)
    scale = min(draw(st.sampled_from((0.0, 9.0, 5000.0, 2.0**31 - 1, 2.0**53))), most)
    if rotary.in_float32:
        scale = min(scale, 2.0**20)  # of float32 angles beyond it only whole revolutions are left
    return Ids(form, dtype, scale, draw(st.integers(0, 2**32)), draw(places()))


@st.composite
def calls(draw, large=False, packed=False):
    """Draw a call that must succeed, or, where its arrays overlap, may be refused.

    packed: only packed sequences that have lengths of their own, whose ends plans alone take.
    """
    rotary = draw(plain(SIZED, fewest_lengths=2) if packed else rotaries())
    way = draw(st.sampled_from(PLANNED if packed else WAYS))
    layouts = tuple(LAYOUT_AXES) if rotary.rows == 1 else BATCHED
    layout = draw(st.sampled_from(("thd",) if packed else layouts))
    dtype, inverse = draw(st.sampled_from(tuple(DTYPES))), draw(st.booleans()) and way != "shift"
    batches = (1, 1, 2, 3, 0) if rotary.rows == 1 else (rotary.rows,)
    batch = 1 if layout == "thd" else draw(st.sampled_from(batches))
    tokens = draw(st.sampled_from((1, 1, 2, 3, 5, 8, 0)))
    counts = st.sampled_from((1, 2, 3, 4, 8)).map(lambda n: n * rotary.heads)
    width = rotary.rope.head_dim
    heads, kv_heads = draw(counts), draw(counts)
    if large:
        tokens, heads = draw(_large(rotary, max(batch, 1)))
        batch = max(batch, 1)
    return Call(
        rotary,
        way,
        layout,
        dtype,
        batch,
        tokens,
        heads,
        kv_heads,
        inverse,
        draw(ids(rotary, way, layout)),
        draw(st.sampled_from(("normal", "normal", "wide", "special"))),
        draw(st.integers(0, 2**32)),
        tuple(draw(places(repeated=index < 2)) for index in range(4)),
        draw(st.sampled_from(TOGETHER)) if way in PAIRED else "apart",
        draw(st.sampled_from(OUTS)),
        draw(st.integers(-3, 3) | st.sampled_from((width, -width)) | st.integers(-999, 999)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(("float32", "float64"))),
        draw(st.booleans()),
        draw(st.sampled_from((0, 0, 1, math.gcd(heads, 4), heads))),
    )


@st.composite
def _large(draw, rotary, batch):
    """Draw tokens and heads of arrays that several threads rotate, or compute cos and sin of."""
    head_dim, pairs = rotary.rope.head_dim, rotary.rope.rotary_dim // 2
    if draw(st.booleans()):  # cos and sin of 2^14 and more, few elements
        tokens = 2**14 // (pairs * rotary.heads * batch) + draw(st.integers(1, 40))
        return tokens, rotary.heads
    tokens = draw(st.integers(1, 60))
    heads = 2**17 // (head_dim * tokens * batch * rotary.heads) + draw(st.integers(1, 5))
    return tokens, heads * rotary.heads


def shape_in(layout, batch, tokens, heads, width):
    """Return the shape of an array in a layout; thd has four axes too, the first of length 1."""
    sizes = batch, tokens, heads, width
    return tuple(sizes[axis] for axis in ORDER[layout])


def draw_values(random, shape, kind, dtype):
    """Return random elements.

    kind: "normal"; "wide": of any exponent; "special": some are NaN, infinite, zero or the largest.
    """
    x = random.standard_normal(shape)
    if kind != "normal":
        info = ml_dtypes.finfo(dtype)
        x = np.ldexp(x, random.integers(int(info.minexp) - 6, int(info.maxexp) - 3, shape))
    with np.errstate(over="ignore", under="ignore"):
        x = np.asarray(x.astype(dtype))
    if kind == "special":
        chosen = random.random(shape) < 0.1
        extremes = [np.nan, np.inf, -np.inf, 0.0, -0.0, info.max, info.smallest_subnormal]
        with np.errstate(under="ignore"):
            x[chosen] = random.choice(np.float64(extremes), int(chosen.sum())).astype(dtype)
    return x


@dataclass
class Arranged:
    """A call's arrays: inputs and outs by name, ids as given, and the positions that they mean."""

    call: Call
    memory: Memory
    inputs: dict[str, Any]
    outs: dict[str, Any] | None
    ids: Any
    positions: Any
    tables: Any

    def share(self):
        """Return whether outputs share an element with each other or, unless in place, inputs."""
        if self.outs is None:
            return False
        outs = list(self.outs.values())
        if any(_repeats(out) for out in outs) or (len(outs) == 2 and np.shares_memory(*outs)):
            return True
        for out, (of, x) in zip(outs, self.inputs.items(), strict=True):
            for read, y in self.inputs.items():
                if not (read == of and _same(out, x)) and np.shares_memory(out, y):
                    return True
        return False


def _repeats(x):
    """Return whether elements of an array that `Place` describes are the same memory."""
    return x.size > 0 and any(
        step == 0 and count > 1 for step, count in zip(x.strides, x.shape, strict=True)
    )


def _same(a, b):
    """Return whether two arrays of one shape are the same memory, element for element."""
    steps = zip(a.shape, a.strides, b.strides, strict=True)
    return a.ctypes.data == b.ctypes.data and all(
        count <= 1 or one == other for count, one, other in steps
    )


def arrange(call, memory):
    """Return the arrays of a call, in new memory."""
    random, dtype = np.random.default_rng(call.seed), DTYPES[call.dtype]
    names = {"call": ("q", "k"), "plan": ("q", "k"), "shift": ("keys",)}.get(call.way, ("x",))
    heads = (call.heads, call.kv_heads)[: len(names)]
    width = call.rotary.rope.head_dim
    shapes = [shape_in(call.layout, call.batch, call.tokens, count, width) for count in heads]
    if call.together == "apart":
        placed = zip(shapes, call.places[:2], strict=False)
        held = [_apart(memory, shape, dtype, call, place) for shape, place in placed]
    else:
        held = [(x, None) for x in _packed(memory, call, heads, width, dtype)]
    inputs = {name: x for name, (x, _) in zip(names, held, strict=True)}
    for x in inputs.values():
        x[...] = draw_values(random, x.shape, call.values, dtype)
    outs = _outs(memory, call, heads, width, held, shapes, dtype)
    if outs is not None:
        outs = {f"{name}_out": out for name, out in zip(inputs, outs, strict=True)}
    positions, ids = _positions(call, memory)
    tables = _tables(call, memory, random) if call.way == "apply_rotary" else None
    if call.layout == "thd":
        inputs = {name: x[0] for name, x in inputs.items()}
        outs = outs and {name: x[0] for name, x in outs.items()}
    if call.read_only and (outs is None or call.out == "own"):
        for x in inputs.values():
            x.flags.writeable = False
    return Arranged(call, memory, inputs, outs, ids, positions, tables)


def _apart(memory, shape, dtype, call, place):
    """Return an array, and where `out` is shifted one of the same memory, some elements further."""
    if call.out != "shifted" or not np.prod(shape):
        return memory.array(shape, dtype, place), None
    place = Place(place.order, place.steps, place.backwards, (), place.shift, place.at_end)
    strides, low, high = strides_of(shape, dtype.itemsize, place)
    by = call.out_shift * dtype.itemsize
    buffer = memory.bytes(high - low + abs(by))
    first = -low + max(-by, 0)
    return tuple(np.ndarray(shape, dtype, buffer, first + shift, strides) for shift in (0, by))


def _packed(memory, call, heads, width, dtype):
    """Return q and k as views of one buffer that holds v as well, as `together` says."""
    q_heads, k_heads = heads
    if call.together == "inside heads" and q_heads == k_heads:
        buffer = memory.array((call.batch, call.tokens, q_heads, 3 * width), dtype)
        views = (buffer[..., :width], buffer[..., width : 2 * width])
    else:
        buffer = memory.array((call.batch, call.tokens, q_heads + 2 * k_heads, width), dtype)
        views = (buffer[:, :, :q_heads], buffer[:, :, q_heads : q_heads + k_heads])
    return [view.transpose(ORDER[call.layout]) for view in views]


def _outs(memory, call, heads, width, held, shapes, dtype):
    """Return the outputs that are given, or None."""
    if call.out == "new":
        return None
    if call.out == "in place":
        return [x[:] for x, _ in held]
    if call.out == "shifted" and held[0][1] is not None:
        return [further for _, further in held]
    if call.together != "apart":
        return _packed(memory, call, heads, width, dtype)
    placed = zip(shapes, call.places[2:], strict=False)
    return [memory.array(shape, dtype, place) for shape, place in placed]


def _positions(call, memory):
    """Return the positions (batch or 1, tokens, axes), and the ids or the offset that give them."""
    given, rotary = call.ids, call.rotary
    random = np.random.default_rng(given.seed)
    counted = np.arange(call.tokens, dtype=np.float64)[:, None]
    signed = given.dtype not in ("uint16", "uint64")
    if given.form == "none":
        return np.repeat(counted[None], rotary.axes, 2), None
    rows = {"rows": call.batch, "offsets": call.batch}.get(given.form, 1)
    low = -given.scale if signed and call.way != "apply_rotary" else 0.0
    counts = {"offset": (), "offsets": (rows,), "number": ()}
    tail = (rotary.axes,) if rotary.axes > 1 else ()
    shape = counts.get(given.form, (rows, call.tokens, *tail))
    if call.way == "apply_rotary":
        looked_up = random.integers(0, TABLE_ROWS, (rows, call.tokens))
        return None, _as_given(looked_up, call, memory)
    drawn = random.uniform(low, given.scale, shape)
    name = "int64" if given.dtype == "list" else given.dtype
    values = (drawn if np.dtype(name).kind == "f" else np.trunc(drawn)).astype(name)
    ids = _as_given(values, call, memory)
    exactly = values.astype(np.float64)
    if given.form in ("offset", "offsets"):
        return np.repeat(exactly.reshape(-1, 1, 1) + counted, rotary.axes, 2), ids
    if given.form == "number":
        return np.full((1, call.tokens, rotary.axes), exactly), ids
    return exactly.reshape(rows, call.tokens, rotary.axes), ids


def _as_given(values, call, memory):
    """Return ids as the call gives them: a list, a number, or an array somewhere in memory."""
    given = call.ids
    if given.form == "row":
        values = values[0]
    if given.form == "offset":
        return int(values)
    if given.dtype == "list":
        # A nested list without numbers loses its shape, and with it the number of tokens.
        return values.tolist() if values.size or values.ndim == 1 else values.astype(np.int64)
    dtype = np.dtype(given.dtype)
    if given.form == "number":
        return values.astype(dtype)[()]
    wide = (1,) * (4 - values.ndim) + values.shape
    place = Place(given.place.order, given.place.steps, given.place.backwards)
    placed = memory.array(wide, dtype, place)
    placed[...] = values.reshape(wide)
    return placed.reshape(values.shape) if not placed.size else placed[(0,) * (4 - values.ndim)]


def _tables(call, memory, random):
    """Return cos and sin for `apply_rotary`."""
    looked_up = call.ids.form != "none"
    packed = call.layout == "thd"
    # Three axes with heads could be taken for rows of a batch, which the axis of length 1 excludes.
    by_row = not looked_up and not packed and (call.table_by_row or call.table_heads > 0)
    rows = call.batch if call.table_by_row and by_row else 1
    tokens = TABLE_ROWS if looked_up else call.tokens
    shape = (rows, tokens, call.table_heads or 1, call.rotary.rope.rotary_dim // 2)
    dtype = np.dtype(call.table)
    tables = [memory.array(shape, dtype, place) for place in call.places[2:]]
    angle = random.uniform(-np.pi, np.pi, shape)
    tables[0][...] = np.cos(angle)
    tables[1][...] = np.sin(angle)
    if not by_row:
        tables = [table[0] for table in tables]
    if not call.table_heads:
        tables = [table[..., 0, :] for table in tables]
    return tables


def run(arranged):
    """Make the call; return its results as a tuple."""
    call, rope = arranged.call, arranged.call.rotary.rope
    if call.past_caches:
        dispatch.last_level_cache = lambda: 0
    dispatch.launcher.cache_clear()
    try:
        return _run(call, rope, arranged)
    finally:
        dispatch.last_level_cache = LAST_LEVEL_CACHE
        dispatch.launcher.cache_clear()


# The error of an angle beyond 2^53 radians, in units of 2^-105 of the angle: ½ for the frequency in
# two parts, 1 for the product with its lower part, and 1 for each of the two sums that this goes
# into. Together 3½, so at most 2^-103.
LOST_ABOVE = 2.0**-103
# The error of angles in float32: cos as a neighbour (1), the factor (½) and the product (1).
LOST_IN_FLOAT32 = 2.5 * 2.0**-24
LAST_LEVEL_CACHE = dispatch.last_level_cache


def _run(call, rope, arranged):
    arrays = tuple(arranged.inputs.values())
    outs = None if arranged.outs is None else tuple(arranged.outs.values())
    out = outs if outs is None or len(outs) == 2 else outs[0]
    options = {"layout": call.layout, "inverse": call.inverse}
    name = "offset" if call.ids.form in ("offset", "offsets") else "position_ids"
    placed = {name: arranged.ids}
    if call.way == "apply_rotary":
        options |= {"interleaved": rope.interleaved, "out": out}
        return (rope_cpu.apply_rotary(*arrays, *arranged.tables, arranged.ids, **options),)
    if call.way == "rotate":
        return (rope.rotate(*arrays, **placed, **options, out=out),)
    if call.way == "call":
        return rope(*arrays, **placed, **options, out=out)
    if call.way == "shift" and call.seed % 2:
        return (rope.shift_plan(arranged.ids, layout=call.layout).rotate(*arrays, out),)
    if call.way == "shift":
        return (rope.shift(*arrays, arranged.ids, layout=call.layout, out=out),)
    plan = rope.plan(arranged.ids, **options, cu_seqlens=call.cu_seqlens)
    return (plan.rotate(*arrays, out),) if call.way == "plan.rotate" else plan(*arrays, out)


def exact_tables(arranged):
    """Return the exact cos and sin, and for each row or token the factor in them and their error.

    Cos and sin are (batch or 1, tokens, heads, pairs), factor and error of as many axes.
    The error is 0, except for angles in float32 and for products of position and frequency beyond
    2^53 radians: cos and sin lose digits there, as the README says.
    """
    call, rotary = arranged.call, arranged.call.rotary
    if call.way == "apply_rotary":
        cos, sin = (np.asarray(table, np.float64) for table in arranged.tables)
        if call.ids.form != "none":
            rows = np.asarray(arranged.ids).astype(int)
            cos, sin = cos[rows], sin[rows]
        with_rows = 4 if call.table_heads else 3
        batch = len(cos) if cos.ndim == with_rows else 1
        shape = (batch, call.tokens, call.table_heads or 1, cos.shape[-1])
        cos = cos.reshape(shape)
        sin = sin.reshape(shape)
        return cos, -sin if call.inverse else sin, np.ones((1,) * 4), np.zeros((1,) * 4)
    inv_freq, factor = rotary.frequencies()
    factor = np.ones_like(factor) if call.way == "shift" else 1 / factor if call.inverse else factor
    tables = []
    for row in range(max(len(inv_freq), len(arranged.positions))):
        positions = arranged.positions[row if len(arranged.positions) > 1 else 0]
        omega = inv_freq[row if len(inv_freq) > 1 else 0]
        cos_sin = exact.cos_sin_in_float32 if rotary.in_float32 else exact.cos_sin
        tables.append([cos_sin(positions, omega[:, head]) for head in range(rotary.heads)])
    cos, sin = np.moveaxis(np.array(tables), 2, 0).swapaxes(2, 3)
    farthest = np.abs(arranged.positions[..., None]).max(axis=1, initial=0.0)
    radians = farthest * np.abs(inv_freq).max(axis=2)
    largest = radians.sum(axis=1).max(axis=1)
    lost = np.where(largest > 2.0**53, LOST_ABOVE * largest, 0.0)
    lost += rotary.in_float32 * LOST_IN_FLOAT32
    sin = -sin if call.inverse else sin
    tables = [cos, sin, factor[:, None, None, None], lost[:, None, None, None]]
    if call.cu_seqlens is not None and rotary.rows > 1:
        tables = [_of_packed(call, table) for table in tables]
    cos, sin, factor, lost = tables
    return cos * factor, sin * factor, factor, lost


def _of_packed(call, table):
    """Return a table (rows, tokens or 1, …) as (1, tokens, …), each token by its sequence's row."""
    rows = np.repeat(np.arange(len(table)), np.diff(call.cu_seqlens))
    tokens = np.arange(call.tokens) if table.shape[1] > 1 else 0
    return table[rows, tokens][None]


def check(call, memory):
    """Make a call, and raise unless its result is right and nothing else was written."""
    arranged = arrange(call, memory)
    sources = {name: x.copy() for name, x in arranged.inputs.items()}
    if call.way != "apply_rotary":
        assume(np.isfinite(arranged.positions).all())
    memory.remember()
    shared = arranged.share()
    try:
        results = run(arranged)
    except (TypeError, ValueError):
        if not shared:
            raise
        assert memory.changed_outside([]) == 0, "what was refused wrote something"
        return
    assert not shared, "an output that shares memory was not refused"
    if arranged.outs is not None:
        for result, out in zip(results, arranged.outs.values(), strict=True):
            assert result is out
    outs = [] if arranged.outs is None else list(arranged.outs.values())
    assert memory.changed_outside(outs) == 0, "bytes outside the output changed"
    if call.batch * call.tokens == 0:
        assert [result.shape for result in results] == [x.shape for x in sources.values()]
        return
    tables = exact_tables(arranged)
    for result, x in zip(results, sources.values(), strict=True):
        check_rotated(call, result, x, *tables)


def check_rotated(call, result, x, cos, sin, factor, lost):
    """Raise unless a result is the rotation of x."""
    rope, dtype = call.rotary.rope, DTYPES[call.dtype]
    assert result.dtype == dtype
    assert result.shape == x.shape
    y, x = (oracle.from_layout(array, call.layout) for array in (result, x))
    tail = slice(rope.rotary_dim, None)
    assert np.array_equal(y[..., tail], x[..., tail], equal_nan=True), (
        "elements that are not rotated were not copied"
    )
    blocks = [rope.rotary_dim] if call.way == "apply_rotary" else call.rotary.blocks()
    expected, reach = exact.rotate(x, cos, sin, rope.interleaved, blocks)
    allowed = bound(expected, reach, dtype, factor, _unit(call) + lost / 3)
    # A pair whose products may overflow, or that holds NaN or infinity, is not compared.
    largest = float(np.finfo(np.float64 if call.dtype == "float64" else np.float32).max) / 4
    largest = min(largest, float(ml_dtypes.finfo(dtype).max) / 2)
    with np.errstate(over="ignore", invalid="ignore"):
        usable = np.isfinite(reach) & (reach * np.maximum(factor, 1.0) <= largest)
    usable[..., tail] = False
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(y.astype(np.float64) - expected)
    wrong = usable & ~(error <= allowed)
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{wrong.sum()} of {wrong.size} elements are wrong; "
            f"element {at} is {y[at]}, exactly {expected[at]}, "
            f"which is {error[at] / allowed[at]:.3g} of the tolerance off"
        )


def _unit(call):
    """Return how far one rounding of the arithmetic, or of cos and sin, is off."""
    in_float32 = call.way != "apply_rotary" and call.rotary.in_float32
    return 2.0**-24 if call.dtype != "float64" or in_float32 else 2.0**-53


def bound(expected, reach, dtype, factor, unit):
    """Return the allowed error: ½ ulp of the dtype + 3·u·A·(|x_a| + |x_b|) + rounding here.

    Three further roundings below the least normal number are half a subnormal step each.
    """
    info = ml_dtypes.finfo(dtype)
    size = np.nan_to_num(np.abs(expected), nan=0.0, posinf=0.0)
    exponent = np.maximum(np.frexp(np.where(size > 0, size, 1e-320))[1] - 1, int(info.minexp))
    half_ulp = np.ldexp(0.5, exponent - int(info.nmant))
    if dtype == ml_dtypes.bfloat16:  # results below the least normal number become zero
        half_ulp = np.where(size < 2.0**-126 * (1 + 2.0**-8), 2.0**-126, half_ulp)
    computed = np.float64 if dtype == np.float64 else np.float32
    least = 2 * float(np.finfo(computed).smallest_subnormal)
    with np.errstate(over="ignore", invalid="ignore"):
        return half_ulp + least + (3 * unit + exact.OWN_ROUNDINGS * 2.0**-53) * factor * reach
