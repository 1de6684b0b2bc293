"""The norm, the Hadamard transform, the copy and the rounding of the head vectors of one token.

Arithmetic is float32. The RMS norm is x / sqrt(mean(x²) + eps) · weight. The order of its
operations is fixed, so that results have the same bits whatever the threads, the layout and the
pages, and in one pass or in steps of this order:

- squares are rounded and added in 64 lanes, then in 8 lanes, then one by one, and each partial sum
  is added to the total in this order; lanes are joined by halves;
- the factor of a head vector is 1 / sqrt(sum / width + eps), each operation rounded;
- an element becomes x · factor, then that times its weight;
- the transform multiplies elements by 1 / sqrt(block) and then adds and subtracts those 1, 2, 4 …
  places apart.

Elements are multiplied where they are loaded for the rotation or a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.array_types import GROUP
from rope_cpu.kernels import compile
from rope_cpu.kernels.rotate import ELEMENT, HEAD, View, make_load_normalised
from rope_cpu.kernels.vectors import (
    advance,
    at,
    butterfly,
    cast,
    comes_first,
    lane_sum,
    largest_magnitude,
    load,
    splat,
    store,
    store_int4,
    store_int8,
)

_FLOAT32_BYTES = np.intp(4)
_ZERO = np.float32(0)
_ONE = np.float32(1)
_INFINITY = np.float32(np.inf)
_NAN = np.float32(np.nan)
_LARGEST_INT8 = np.float32(127)

# A head vector of smaller magnitude is stored as zeros with scale 0: 127 / max|x| would be infinite
# below 2^-121.
_SMALLEST_QUANTISED = np.float32(2.0**-120)

# Scales that float16 rounds to 0, and those that it has no number for.
_ZERO_IN_FLOAT16 = np.float32(2.0**-25)
_INFINITE_IN_FLOAT16 = np.float32(65520)


# The device functions of a token take pointers, not arrays: counting references to arrays would
# take longer than the rotation of a token. Those of a token are views of arrays from that token on.


class Norm(NamedTuple):
    """An RMS norm and the factors of the head vectors that it is applied to."""

    is_given: Any
    factors: Any  # pointer to float32, one for each head
    weight: Any  # pointer to float32, one for each element
    eps: Any


@partial(compile.device_function, inline=True)
def from_head(norm, head):
    """Return the norm of the heads from `head` on."""
    factors = advance(norm.factors, head * _FLOAT32_BYTES)
    return Norm(norm.is_given, factors, norm.weight, norm.eps)


@compile.device_function
def _sum_of_squares(x, width):
    squares = splat(_ZERO, 64)
    for i in range(0, width & -64, 64):
        v = load(x, i, 64)
        squares = squares + v * v
    total = lane_sum(squares)
    if width & 63:
        few_squares = splat(_ZERO, 8)
        for i in range(width & -64, width & -8, 8):
            w = load(x, i, 8)
            few_squares = few_squares + w * w
        total += lane_sum(few_squares)
        for i in range(width & -8, width):
            single = load(x, i, 1)
            total += lane_sum(single * single)
    return total


@partial(compile.device_function, inline=True)
def write_factors(x, norm):
    """Write the factors of the head vectors of a token."""
    for head in range(x.shape[HEAD]):
        row = advance(x.pointer, head * x.strides[HEAD])
        norm.factors[head] = _sum_of_squares(row, x.shape[ELEMENT])
    # A loop of its own, since LLVM vectorises it: divisions and roots are slow.
    for head in range(x.shape[HEAD]):
        mean = norm.factors[head] / np.float32(x.shape[ELEMENT])
        norm.factors[head] = _ONE / np.sqrt(mean + norm.eps)


# Head vectors are loaded 64 elements at a time, then 8 and one. The loop over head vectors is
# inside the loop over elements: the other way LLVM unrolls the remainder into three times as much
# code.


def _make_over_elements(operation: Callable[[int], Any]) -> Any:
    """Return the device function that applies an operation to the elements of head vectors.

    It goes over elements from `first` on. operation: makes the device function for a number of
    elements of every head vector, from element i on. operand: the norm or the factors it needs.
    """
    by_64 = operation(64)
    by_8 = operation(8)
    by_1 = operation(1)

    @partial(compile.device_function, variant=operation.__name__, inline=True)
    def over_elements(x, out, operand, first):
        stop_64 = first + ((x.shape[ELEMENT] - first) & -64)
        stop_8 = first + ((x.shape[ELEMENT] - first) & -8)
        for i in range(first, stop_64, 64):
            by_64(x, out, operand, i)
        for i in range(stop_64, stop_8, 8):
            by_8(x, out, operand, i)
        for i in range(stop_8, x.shape[ELEMENT]):
            by_1(x, out, operand, i)

    return over_elements


def _copy(lanes: int) -> Any:
    """Return the device function that copies elements and normalises them."""
    load_normalised = make_load_normalised(lanes)

    @partial(compile.device_function, variant=f"{lanes}")
    def copy(x, out, norm, i):
        source = x.pointer
        target = out.pointer
        for head in range(x.shape[HEAD]):
            store(target, i, load_normalised(source, i, norm, head, i), False)
            source = advance(source, x.strides[HEAD])
            target = advance(target, out.strides[HEAD])

    return copy


def _round(lanes: int) -> Any:
    """Return the device function that multiplies elements by factors and rounds them to int8."""

    @partial(compile.device_function, variant=f"{lanes}")
    def round_elements(x, out, factors, i):
        source = x.pointer
        target = out.pointer
        for head in range(x.shape[HEAD]):
            store_int8(target, i, load(source, i, lanes) * splat(factors[head], lanes))
            source = advance(source, x.strides[HEAD])
            target = advance(target, out.strides[HEAD])

    return round_elements


copy_elements = _make_over_elements(_copy)
_round_elements = _make_over_elements(_round)


@compile.device_function
def scratch_rows(x, scratch):
    """Return the part of the scratch memory that holds the head vectors of a token."""
    start = advance(scratch, x.shape[HEAD] * _FLOAT32_BYTES)
    strides = (0, 0, x.shape[ELEMENT] * _FLOAT32_BYTES, _FLOAT32_BYTES)
    return View(start, x.shape, strides, _FLOAT32_BYTES)


@partial(compile.device_function, inline=True)
def _load_transformed(x, i, block, factor):
    """Return 64 elements after the stages of the transform that they hold both operands of."""
    v = load(x, i, 64) * splat(factor, 64)
    if block > 1:
        v = butterfly(v, 1)
    if block > 2:
        v = butterfly(v, 2)
    if block > 4:
        v = butterfly(v, 4)
    if block > 8:
        v = butterfly(v, 8)
    if block > 16:
        v = butterfly(v, 16)
    if block > 32:
        v = butterfly(v, 32)
    return v


@compile.device_function
def transform(x, count, width):
    """Multiply contiguous float32 head vectors by the Hadamard matrix, in place.

    count: of elements in all. They are followed by room for a multiple of 64.
    """
    block = width & -width
    factor = _ONE / np.sqrt(np.float32(block))
    if block < 128:
        for i in range(0, count, 64):
            store(x, i, _load_transformed(x, i, block, factor), False)
    else:
        for i in range(0, count, 128):
            v = _load_transformed(x, i, 64, factor)
            w = _load_transformed(x, i + 64, 64, factor)
            store(x, i, v + w, False)
            store(x, i + 64, v - w, False)
    step = 128
    while step < block:
        for start in range(0, count, 2 * step):
            for i in range(start, start + step, 64):
                v = load(x, i, 64)
                w = load(x, i + step, 64)
                store(x, i, v + w, False)
                store(x, i + step, v - w, False)
        step *= 2


@compile.device_function
def write_elements(x, out, scales, scratch):
    """Write float32 head vectors, rounded to the type of `out`."""
    copy_elements(x, out, Norm(False, scratch, scratch, _ZERO), 0)


@compile.device_function
def quantise_groups(x, out, scales, scratch):
    """Write contiguous float32 head vectors in 4 bits, each group of 32 with a scale in float16.

    The scale is −1/8 of the element of largest magnitude, the first of several. It is NaN if that
    is NaN, infinite, or too large for a scale, so that all of the group reads as NaN. After the
    head vectors there is room for two float32 for each group.
    """
    groups = x.shape[ELEMENT] // GROUP
    count = x.shape[HEAD] * groups
    steps = at(x.pointer, count * GROUP)
    inverse_steps = at(steps, count)
    for n in range(count):
        group = load(x.pointer, n * GROUP, GROUP)
        largest = largest_magnitude(group)
        steps[n] = (-largest if comes_first(group, largest) else largest) / np.float32(8)
    # A loop of its own, as in `write_factors`.
    for n in range(count):
        size = abs(steps[n])
        fits = size < _INFINITE_IN_FLOAT16
        inverse_steps[n] = _ONE / steps[n] if fits and size > _ZERO_IN_FLOAT16 else _ZERO
        steps[n] = steps[n] if fits else _NAN
    for head in range(x.shape[HEAD]):
        target = advance(out.pointer, head * out.strides[HEAD])
        scale = advance(scales.pointer, head * scales.strides[HEAD])
        for group in range(groups):
            n = head * groups + group
            elements = load(x.pointer, n * GROUP, GROUP) * splat(inverse_steps[n], GROUP)
            store_int4(at(target, group * (GROUP // 2)), elements)
            store(scale, group, splat(steps[n], 1), False)


@partial(compile.device_function, inline=True)
def _largest_magnitude(x, width):
    """Return the largest magnitude of float32 elements; NaN if one is.

    As integers NaN is above infinity, and LLVM vectorises their maximum.
    """
    bits = cast(np.int32, x)
    largest = np.int32(0)
    for i in range(width):
        magnitude = np.int32(bits[i] & 0x7FFFFFFF)
        largest = magnitude if magnitude > largest else largest
    return cast(np.float32, largest)


@compile.device_function
def quantise(x, out, scales, inverse_scales):
    """Write float32 head vectors as int8 with scales max|x| / 127, rounded to nearest even.

    Below `_SMALLEST_QUANTISED` the scale is 0. A head vector that holds NaN or infinity gets the
    scale NaN, so that all of it reads as NaN. inverse_scales: pointer to float32, scratch memory
    for a number for each head: its largest magnitude, and then 127 over it.
    """
    scale = scales.pointer
    for head in range(x.shape[HEAD]):  # the largest magnitude at first
        row = advance(x.pointer, head * x.strides[HEAD])
        inverse_scales[head] = _largest_magnitude(row, x.shape[ELEMENT])
    for head in range(x.shape[HEAD]):
        largest = inverse_scales[head]
        inverse_scales[head] = _ZERO
        if largest < _SMALLEST_QUANTISED:
            scale[0] = _ZERO
        elif largest < _INFINITY:
            scale[0] = largest / _LARGEST_INT8
            inverse_scales[head] = _LARGEST_INT8 / largest
        else:
            scale[0] = _NAN
        scale = advance(scale, scales.strides[HEAD])
    _round_elements(x, out, inverse_scales, 0)
