"""A vector type for Numba: lanes that are loaded, multiplied, shuffled and stored as one value.

LLVM cannot vectorise a plain loop over rows that may be rotated in place. So the rotation kernels
name their vectors, and `a * c - b * s` on 64 lanes becomes as many instructions as the processor
needs for them.

NumPy's 16-bit floats are passed as the integers of their bits: int16 for float16, uint16 for
bfloat16. Loads convert both to float32 vectors, and stores round once.
"""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

from rope_cpu.array_types import GROUP

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)

# The LLVM type of a lane in a vector, and of an element in memory, for each Numba type.
_LANES = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}
_ELEMENTS = _LANES | {types.int16: _I16, types.uint16: _I16, types.int8: _I8}

ALIGNMENT = 64  # bytes: the alignment of nontemporal stores


class Vector(types.Type):
    """Numba's type of `lanes` numbers of one floating-point type."""

    def __init__(self, real: types.Float, lanes: int) -> None:
        self.real = real
        self.lanes = lanes
        super().__init__(name=f"Vector({real}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, ir.VectorType(_LANES[kind.real], kind.lanes))


def _define_operator(operation: Callable[..., Any], instruction: str) -> None:
    """Define one of Python's operators for two vectors of one type."""

    @infer_global(operation)
    class _Typing(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            if len(args) != 2 or args[0] != args[1] or not isinstance(args[0], Vector):
                return None
            return signature(args[0], *args)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(operation, Vector, Vector)(emit)


_define_operator(operator.add, "fadd")
_define_operator(operator.sub, "fsub")
_define_operator(operator.mul, "fmul")


@intrinsic
def muladd(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once if the processor has an instruction for it, else twice."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _muladd(builder, *args)

    return x(x, x, x), emit


def _muladd(builder: Any, x: Any, y: Any, z: Any) -> Any:
    name = f"llvm.fmuladd.v{x.type.count}{x.type.element.intrinsic_name}"
    function_type = ir.FunctionType(x.type, [x.type, x.type, x.type])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, (x, y, z))


@intrinsic(prefer_literal=True)
def splat(typing: Any, x: Any, lanes: Any) -> Any:
    """Return the vector of a float32 in every lane; lanes: a constant."""
    count = lanes.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _splat(builder, args[0], count)

    return Vector(types.float32, count)(types.float32, lanes), emit


def _splat(builder: Any, x: Any, count: int) -> Any:
    """Return the vector of a number in every lane."""
    undefined = ir.Constant(ir.VectorType(x.type, count), ir.Undefined)
    first = builder.insert_element(undefined, x, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, count), None))


def _every(kind: Any, number: float) -> Any:
    """Return the constant vector of a type with a number in every lane."""
    return ir.Constant(kind, [number] * kind.count)


def _shuffled(builder: Any, x: Any, y: Any, lanes: Sequence[int]) -> Any:
    """Return some lanes of two vectors, which are counted on from those of x to those of y."""
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


# Sums of lanes. Halves are added until one lane is left: the same order, and so the same bits, on
# every processor.


@intrinsic
def lane_sum(typing: Any, v: Any) -> Any:
    """Return the sum of the lanes, of which there are 2^n."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[0]
        while value.type.count > 1:
            half = value.type.count // 2
            low = _part(builder, value, 0, half)
            value = builder.fadd(low, _part(builder, value, half, half))
        return builder.extract_element(value, _I32(0))

    return v.real(v), emit


@intrinsic
def sixteen_sums(typing: Any, v: Any) -> Any:
    """Return the vector of the sums of sixteen equal parts of 1, 8 or 16 lanes.

    Each is added as by `lane_sum`, two at a time: the lanes that one has no more use for
    serve the other.
    """
    count = v.lanes // 16

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if count == 1:
            return args[0]
        chosen = partial(_shuffled, builder)
        lanes = range(count)
        parts = {
            n: chosen(args[0], args[0], [n * count + lane for lane in lanes]) for n in range(16)
        }
        step = count // 2
        while step > 0:
            kept = [lane + count * bool(lane & step) for lane in lanes]
            added = [(lane ^ step) + count * bool(lane & step) for lane in lanes]
            pairs = {n: (x, parts[n + step]) for n, x in parts.items() if not n & step}
            parts = {
                n: builder.fadd(chosen(*pair, kept), chosen(*pair, added))
                for n, pair in pairs.items()
            }
            step //= 2
        return parts[0] if count == 16 else chosen(parts[0], parts[8], [*range(16)])

    return Vector(v.real, 16)(v), emit


@intrinsic
def joined(typing: Any, vectors: Any) -> Any:
    """Return the lanes of four vectors as one vector."""
    kind = Vector(vectors.dtype.real, 4 * vectors.dtype.lanes)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _in_a_row(builder, cgutils.unpack_tuple(builder, args[0]))

    return kind(vectors), emit


@intrinsic
def largest_magnitude(typing: Any, v: Any) -> Any:
    """Return the largest magnitude of float32 lanes; NaN if one is. As integers NaN is largest."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], ir.VectorType(_I32, v.lanes))
        magnitudes = builder.and_(bits, _every(bits.type, 0x7FFFFFFF))
        function_type = ir.FunctionType(_I32, [bits.type])
        name = f"llvm.vector.reduce.umax.v{v.lanes}i32"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        return builder.bitcast(builder.call(function, [magnitudes]), ir.FloatType())

    return types.float32(v), emit


@intrinsic
def comes_first(typing: Any, v: Any, x: Any) -> Any:
    """Return True unless −x comes before x among the lanes of a vector."""
    bits = ir.IntType(v.lanes)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        def index(number: Any) -> Any:
            every = _splat(builder, number, v.lanes)
            equal = builder.bitcast(builder.fcmp_ordered("==", args[0], every), bits)
            return builder.cttz(equal, ir.Constant(ir.IntType(1), 0))

        return builder.icmp_unsigned("<=", index(args[1]), index(builder.fneg(args[1])))

    return types.boolean(v, types.float32), emit


# Numba's `min` and `max` are functions that compile for 30 ms.


def _make_choice(comparison: str) -> Any:
    """Return the device function of integers x and y that returns x if x `comparison` y, else y."""

    @intrinsic
    def choose(typing: Any, x: Any, y: Any) -> Any:
        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.select(builder.icmp_signed(comparison, *args), *args)

        return types.intp(types.intp, types.intp), emit

    return choose


smaller = _make_choice("<")
larger = _make_choice(">")


# Memory. Nothing is checked.


@intrinsic
def pointer(typing: Any, array: Any) -> Any:
    """Return a pointer to the first element of an array."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), emit


@intrinsic
def elements(typing: Any, start: Any) -> Any:
    """Return the number of elements in an item at a pointer: 2 for uint8, which holds 4 bits."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.get_constant(types.intp, 2 if start.dtype == types.uint8 else 1)

    return types.intp(start), emit


@intrinsic
def advance(typing: Any, start: Any, offset: Any) -> Any:
    """Return the pointer `offset` bytes after `start`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return cgutils.pointer_add(builder, *args)

    return start(start, types.intp), emit


@intrinsic
def at(typing: Any, start: Any, index: Any) -> Any:
    """Return the pointer `index` elements after `start`."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return start(start, types.intp), emit


@intrinsic
def four(typing: Any, start: Any, step: Any) -> Any:
    """Return four pointers, `step` elements apart, as a tuple."""
    result = types.UniTuple(start, 4)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        offsets = [builder.mul(args[1], args[1].type(n)) for n in range(4)]
        places = [builder.gep(args[0], [offset]) for offset in offsets]
        return context.make_tuple(builder, result, places)

    return result(start, types.intp), emit


@intrinsic
def cast(typing: Any, kind: Any, value: Any) -> Any:
    """Return a pointer as one to elements of another type, or a number with the bits of another."""
    is_pointer = isinstance(value, types.CPointer)
    result = types.CPointer(kind.dtype) if is_pointer else kind.dtype

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[1], context.get_value_type(result))

    return result(kind, value), emit


@intrinsic
def address(typing: Any, start: Any) -> Any:
    """Return a pointer as an integer."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], context.get_value_type(types.intp))

    return types.intp(start), emit


@intrinsic
def stored(typing: Any, value: Any) -> Any:
    """Return a pointer to a copy of a value, which ends with the call that makes it."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = cgutils.alloca_once_value(builder, args[0])
        return builder.bitcast(place, _I8.as_pointer())

    return types.voidptr(value), emit


@intrinsic
def call_part(typing: Any, function: Any, arguments: Any, part: Any, parts: Any) -> Any:
    """Call the part of a kernel at an address with the address of its arguments.

    Their types are those that the part was compiled for; nothing is checked. A part returns
    nothing. It raises nothing but with NUMBA_BOUNDSCHECK: its caller raises the same, unless it is
    a prange, in which that is lost.
    """
    kinds = (types.voidptr, types.intp, types.intp)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        convention = context.call_conv
        function_type = convention.get_function_type(types.none, kinds)
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        place = builder.inttoptr(args[1], _I8.as_pointer())
        values = (place, *args[2:])
        status, _ = convention.call_function(builder, callee, types.none, kinds, values)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), emit


@intrinsic(prefer_literal=True)
def load(typing: Any, start: Any, index: Any, lanes: Any) -> Any:
    """Return the vector of the elements start[index] to start[index + lanes - 1].

    lanes: a constant.
    """
    element = start.dtype
    count = lanes.literal_value
    real = element if element in _LANES else types.float32

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load_floats(builder, args[0], args[1], element, count)

    return Vector(real, count)(start, types.intp, lanes), emit


@intrinsic(prefer_literal=True)
def load_value(typing: Any, start: Any, index: Any, lanes: Any, scales: Any) -> Any:
    """Return what `load` does, and elements of 4 bits, as uint8, times the scales of their groups.

    lanes: a constant, for 4 bits 1, 16, or a multiple of 32; the index is a multiple of it. scales:
    pointer to float32, of the groups of the head vector.
    """
    element = start.dtype
    count = lanes.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _load_floats(builder, args[0], args[1], element, count)

    def emit_int4(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        start, index, _, scales = args
        halves = _load_int4(builder, start, index, count)
        first = builder.udiv(index, index.type(GROUP))
        groups = range(max(count // GROUP, 1))
        size = min(count, GROUP)
        parts = []
        for n in groups:
            place = builder.gep(scales, [builder.add(first, index.type(n))])
            part = _part(builder, halves, n * size, size)
            parts.append(_scaled_int4(builder, part, builder.load(place)))
        return _in_a_row(builder, parts)

    result = Vector(types.float32, count)(start, types.intp, lanes, scales)
    return result, emit_int4 if element == types.uint8 else emit


def _load_floats(builder: Any, start: Any, index: Any, element: Any, count: int) -> Any:
    """Return elements of a Numba type as floats."""
    vector = ir.VectorType(_ELEMENTS[element], count)
    place = builder.bitcast(builder.gep(start, [index]), vector.as_pointer())
    return _to_float(builder, builder.load(place, align=element.bitwidth // 8), element)


def _load_int4(builder: Any, start: Any, index: Any, count: int) -> Any:
    """Return integers whose lowest 4 bits are elements of 4 bits, 8 more than their numbers.

    Byte i of the 16 of a group holds element i in its low half and i + 16 in its high half. The
    bytes of whole groups are loaded once.
    """
    half = GROUP // 2
    size = count // 2 if count >= GROUP else count
    integer = index.type
    group = builder.mul(builder.udiv(index, integer(GROUP)), integer(half))
    byte = builder.gep(start, [builder.add(group, builder.urem(index, integer(half)))])
    place = builder.bitcast(byte, ir.VectorType(_I8, size).as_pointer())
    stored = builder.zext(builder.load(place, align=1), ir.VectorType(_I32, size))
    if count < GROUP:
        is_high = builder.urem(builder.udiv(index, integer(half)), integer(2))
        shift = builder.trunc(builder.mul(is_high, integer(4)), _I32)
        return builder.lshr(stored, _splat(builder, shift, count))
    high = builder.lshr(stored, _every(stored.type, 4))
    lanes = [n % half + n // GROUP * half + n // half % 2 * size for n in range(count)]
    return _shuffled(builder, stored, high, lanes)


_TABLE_LANES = 16  # of AVX-512's lookup


def _scaled_int4(builder: Any, halves: Any, scale: Any) -> Any:
    """Return the numbers of elements of 4 bits times a scale: exactly, in at most 15 bits."""
    count = halves.type.count
    low_bits = builder.and_(halves, _every(halves.type, 15))
    if count % _TABLE_LANES == 0 and has_feature("avx512f"):
        # The products of all 16 numbers are a table, in which lanes are looked up.
        numbers = [float(n) for n in range(-8, 8)]
        floats = ir.VectorType(ir.FloatType(), _TABLE_LANES)
        scales = _splat(builder, scale, _TABLE_LANES)
        table = builder.fmul(ir.Constant(floats, numbers), scales)
        parts = [
            _looked_up(builder, table, _part(builder, low_bits, first, _TABLE_LANES))
            for first in range(0, count, _TABLE_LANES)
        ]
        return _in_a_row(builder, parts)
    number = builder.sub(low_bits, _every(halves.type, 8))
    floats = ir.VectorType(ir.FloatType(), count)
    return builder.fmul(builder.sitofp(number, floats), _splat(builder, scale, count))


def _looked_up(builder: Any, table: Any, indices: Any) -> Any:
    """Return the lanes of a table at indices. For AVX-512, LLVM makes one instruction of this."""
    result = ir.Constant(table.type, ir.Undefined)
    for lane in range(table.type.count):
        index = builder.extract_element(indices, _I32(lane))
        element = builder.extract_element(table, index)
        result = builder.insert_element(result, element, _I32(lane))
    return result


def _part(builder: Any, v: Any, first: int, count: int) -> Any:
    """Return lanes first … first + count − 1 of a vector."""
    return _shuffled(builder, v, v, [*range(first, first + count)])


def _in_a_row(builder: Any, parts: list[Any]) -> Any:
    """Return the lanes of 2^n vectors as one vector."""
    while len(parts) > 1:
        lanes = [*range(2 * parts[0].type.count)]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffled(builder, *pair, lanes) for pair in pairs]
    return parts[0]


@intrinsic
def store_quarters(typing: Any, starts: Any, v: Any) -> Any:
    """Store a quarter of the lanes at each of four pointers to float32."""
    lanes = v.lanes // 4

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        for n, start in enumerate(cgutils.unpack_tuple(builder, args[0])):
            part = _part(builder, args[1], n * lanes, lanes)
            builder.store(part, builder.bitcast(start, part.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(starts, v), emit


@intrinsic
def prefetch(typing: Any, start: Any) -> Any:
    """Load the cache line at a pointer into the second cache, ahead of its use."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = builder.bitcast(args[0], _I8.as_pointer())
        function_type = ir.FunctionType(ir.VoidType(), [place.type, _I32, _I32, _I32])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, function_type, name)
        # To read, into the second cache, of data.
        builder.call(function, [place, _I32(0), _I32(2), _I32(1)])
        return context.get_dummy_value()

    return types.void(start), emit


@intrinsic
def store(typing: Any, start: Any, index: Any, vector: Any, nontemporal: Any) -> Any:
    """Write a vector to the elements from start[index] on.

    nontemporal: whether to store past the caches; the memory must be aligned to `ALIGNMENT` then.
    """
    element = start.dtype
    itemsize = element.bitwidth // 8

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = args[2]
        if element == types.int16:
            value = _to_float16(builder, value)
        elif element == types.uint16:
            features = context.codegen().magic_tuple()[2]
            value = _to_bfloat16(builder, value, features)
        place = builder.bitcast(builder.gep(args[0], [args[1]]), value.type.as_pointer())
        if itemsize * vector.lanes < ALIGNMENT:
            builder.store(value, place, align=itemsize)
            return context.get_dummy_value()
        with builder.if_else(args[3]) as (past_caches, usual):
            with past_caches:
                instruction = builder.store(value, place, align=ALIGNMENT)
                metadata = builder.module.add_metadata([_I32(1)])
                instruction.set_metadata("nontemporal", metadata)
            with usual:
                builder.store(value, place, align=itemsize)
        return context.get_dummy_value()

    return types.void(start, types.intp, vector, types.boolean), emit


# 1.5 · 2^23. A float32 within ±2^22 added to it is rounded to an integer, which the low bits hold.
_INTEGER_IN_LOW_BITS = 12582912.0


@intrinsic
def store_int8(typing: Any, start: Any, index: Any, vector: Any) -> Any:
    """Write float32 from −127 to 127 as int8, rounded to nearest, ties to even; NaN as 0."""

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        count = vector.lanes
        value = args[2]
        is_nan = builder.fcmp_unordered("uno", value, value)
        zero = ir.Constant(value.type, None)
        number = builder.select(is_nan, zero, value)
        moved = builder.fadd(number, _every(value.type, _INTEGER_IN_LOW_BITS))
        bits = builder.bitcast(moved, ir.VectorType(_I32, count))
        low = builder.trunc(bits, ir.VectorType(_I8, count))
        place = builder.bitcast(builder.gep(args[0], [args[1]]), low.type.as_pointer())
        builder.store(low, place, align=1)
        return context.get_dummy_value()

    return types.void(start, types.intp, vector), emit


@intrinsic
def store_int4(typing: Any, start: Any, vector: Any) -> Any:
    """Write a group of numbers from −8 to 8 in 4 bits, rounded as ggml does: up from a half.

    NaN is written as 0.
    """
    half = GROUP // 2

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        floats = args[1].type
        moved = builder.fadd(args[1], _every(floats, 8.5))
        most = _every(floats, 15.0)
        limited = builder.select(builder.fcmp_ordered("<", moved, most), moved, most)
        is_nan = builder.fcmp_unordered("uno", moved, moved)
        number = builder.select(is_nan, _every(floats, 8.0), limited)
        integers = builder.fptoui(number, ir.VectorType(_I32, GROUP))
        low = _part(builder, integers, 0, half)
        high = _part(builder, integers, half, half)
        shifted = builder.shl(high, _every(high.type, 4))
        stored = builder.trunc(builder.or_(low, shifted), ir.VectorType(_I8, half))
        builder.store(stored, builder.bitcast(args[0], stored.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(start, vector), emit


@intrinsic(prefer_literal=True)
def butterfly(typing: Any, v: Any, step: Any) -> Any:
    """Return the sums and differences of the lanes `step` apart: a stage of a Hadamard transform.

    step: a constant power of two. Of lanes i and i + step, the first becomes their sum, and the
    second the first minus the second.
    """
    count = v.lanes
    distance = step.literal_value

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        other = _shuffled(builder, args[0], args[0], [n ^ distance for n in range(count)])
        signs = [-1.0 if n & distance else 1.0 for n in range(count)]
        return _muladd(builder, args[0], ir.Constant(other.type, signs), other)

    return v(v, step), emit


# Shuffles of the lanes of one vector, for pairs of neighbours.


def _make_shuffle(source_lane: Callable[[int], int], factor: int) -> Any:
    """Return the device function to a vector of `factor` times as many lanes.

    source_lane: from a lane of the result to the lane of the argument that it takes.
    """

    @intrinsic
    def shuffle(typing: Any, v: Any) -> Any:
        lanes = factor * v.lanes

        def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            source_lanes = [source_lane(lane) for lane in range(lanes)]
            return _shuffled(builder, args[0], args[0], source_lanes)

        return Vector(v.real, lanes)(v), emit

    return shuffle


doubled = _make_shuffle(lambda lane: lane // 2, 2)  # 0 0 1 1 2 2 …
swapped = _make_shuffle(lambda lane: lane ^ 1, 1)  # 1 0 3 2 5 4 …


@intrinsic
def even_negated(typing: Any, v: Any) -> Any:
    """Return a vector with lanes 0, 2, 4 … negated."""
    signs = [-1.0, 1.0] * (v.lanes // 2)

    def emit(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fmul(args[0], ir.Constant(args[0].type, signs))

    return v(v), emit


# 16-bit floats.


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, for which llvmlite has no type."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()


def _to_float(builder: Any, value: Any, element: Any) -> Any:
    """Return loaded elements as float32; float64 as it is."""
    floats = ir.VectorType(ir.FloatType(), value.type.count)
    if element == types.int8:
        return builder.sitofp(value, floats)
    if element == types.int16:
        return _from_float16(builder, value)
    if element == types.uint16:
        wide = ir.VectorType(_I32, value.type.count)
        bits = builder.shl(builder.zext(value, wide), _every(wide, 16))
        return builder.bitcast(bits, floats)
    return value


# A float32 of the bits of a float16, shifted to their places, is smaller by this factor.
_FLOAT16_FACTOR = 2.0**112


def _from_float16(builder: Any, value: Any) -> Any:
    """Return float16 as float32."""
    count = value.type.count
    floats = ir.VectorType(ir.FloatType(), count)
    if _converts_float16():
        return builder.fpext(builder.bitcast(value, ir.VectorType(ir.HalfType(), count)), floats)
    wide = ir.VectorType(_I32, count)
    lanes = partial(_every, wide)
    bits = builder.zext(value, wide)
    moved = builder.shl(builder.and_(bits, lanes(0x7FFF)), lanes(13))
    factor = _every(floats, _FLOAT16_FACTOR)
    number = builder.bitcast(builder.fmul(builder.bitcast(moved, floats), factor), wide)
    is_special = builder.icmp_unsigned(">=", moved, lanes(0x7C00 << 13))  # infinity or NaN
    magnitude = builder.select(is_special, builder.or_(moved, lanes(0x7F800000)), number)
    sign = builder.shl(builder.and_(bits, lanes(0x8000)), lanes(16))
    return builder.bitcast(builder.or_(magnitude, sign), floats)


def _to_float16(builder: Any, value: Any) -> Any:
    """Round float32 to the nearest float16, ties to even."""
    count = value.type.count
    narrow = ir.VectorType(_I16, count)
    if _converts_float16():
        halves = builder.fptrunc(value, ir.VectorType(ir.HalfType(), count))
        return builder.bitcast(halves, narrow)
    wide = ir.VectorType(_I32, count)
    lanes = partial(_every, wide)
    bits = builder.bitcast(value, wide)
    magnitude = builder.and_(bits, lanes(0x7FFFFFFF))
    last_kept_bit = builder.and_(builder.lshr(magnitude, lanes(13)), lanes(1))
    carried = builder.add(builder.add(magnitude, lanes(0xFFF)), last_kept_bit)
    normal = builder.sub(builder.lshr(carried, lanes(13)), lanes(0x1C000))
    # Below 2^-14, the sum with 1/2 has the wanted number in its low bits.
    half = _every(value.type, 0.5)
    moved = builder.bitcast(builder.fadd(builder.bitcast(magnitude, value.type), half), wide)
    subnormal = builder.sub(moved, builder.bitcast(half, wide))
    is_normal = builder.icmp_unsigned(">=", magnitude, lanes(0x38800000))
    number = builder.select(is_normal, normal, subnormal)
    is_infinite = builder.icmp_unsigned(">", number, lanes(0x7C00))
    finite = builder.select(is_infinite, lanes(0x7C00), number)
    quiet_nan = builder.or_(builder.lshr(magnitude, lanes(13)), lanes(0x7E00))
    is_nan = builder.icmp_unsigned(">", magnitude, lanes(0x7F800000))
    rounded = builder.select(is_nan, builder.and_(quiet_nan, lanes(0x7FFF)), finite)
    sign = builder.and_(builder.lshr(bits, lanes(16)), lanes(0x8000))
    return builder.trunc(builder.or_(rounded, sign), narrow)


def _to_bfloat16(builder: Any, value: Any, features: str) -> Any:
    """Round float32 to the nearest bfloat16, ties to even.

    Results below the smallest normal number become zero, as in hardware.
    """
    count = value.type.count
    wide = ir.VectorType(_I32, count)
    narrow = ir.VectorType(_I16, count)
    if "+avx512bf16" in features:  # Arm's instruction keeps subnormal numbers
        return builder.bitcast(builder.fptrunc(value, ir.VectorType(_BFloat(), count)), narrow)
    lanes = partial(_every, wide)
    bits = builder.bitcast(value, wide)
    upper = builder.lshr(bits, lanes(16))
    last_kept_bit = builder.and_(upper, lanes(1))
    carried = builder.add(builder.add(bits, lanes(0x7FFF)), last_kept_bit)
    rounded = builder.lshr(carried, lanes(16))
    quiet_nan = builder.or_(upper, lanes(0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    number = builder.select(is_nan, quiet_nan, rounded)
    magnitude = builder.and_(bits, lanes(0x7FFFFFFF))
    is_tiny = builder.icmp_unsigned("<", magnitude, lanes(0x00800000))
    signed_zero = builder.and_(upper, lanes(0x8000))
    return builder.trunc(builder.select(is_tiny, signed_zero, number), narrow)


def _converts_float16() -> bool:
    """Return True if the processor that Numba compiles for has instructions for float16.

    Otherwise LLVM would call a library.
    """
    return platform.machine().lower() in ("aarch64", "arm64") or has_feature("f16c")


def has_feature(name: str) -> bool:
    """Return True if the processor that Numba compiles for has a feature, by LLVM's name."""
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return f"+{name}" in features.split(",")
