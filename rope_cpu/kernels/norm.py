"""The RMS norm of the head vectors of one token: x / sqrt(mean(x²) + eps) · weight.

Arithmetic is float32. The order of operations is fixed, so that results have the same bits whatever
the threads, the layout and the pages, and in one pass or in steps of this order:

- squares are rounded and added in 64 lanes, then in 8 lanes, then one by one, and each partial sum
  is added to the total in this order; lanes are joined by halves;
- the factor of a head vector is 1 / sqrt(sum / width + eps), each operation rounded;
- an element becomes x · factor, then that times its weight.

Elements are multiplied where they are loaded for what follows, the rotation or a copy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.kernels import compile
from rope_cpu.kernels.vectors import advance, lane_sum, load, splat

FLOAT32_BYTES = np.intp(4)
_ZERO = np.float32(0)
_ONE = np.float32(1)


class Norm(NamedTuple):
    """An RMS norm and the factors of the head vectors that it is applied to."""

    is_given: Any
    factors: Any  # pointer to float32, one for each head
    weight: Any  # pointer to float32, one for each element
    eps: Any


@compile.device_function
def from_head(norm, head):
    """Return the norm of the heads from `head` on."""
    factors = advance(norm.factors, head * FLOAT32_BYTES)
    return Norm(norm.is_given, factors, norm.weight, norm.eps)


def make_load_normalised(lanes: int) -> Any:
    """Return the device function that loads elements of a head vector and normalises them.

    It loads elements from i on of a part of head vector `head`; x: pointer to the part. norm: a
    `Norm`, or None, for which Numba compiles the load alone. element: the place of the first one in
    the whole head vector, and so of its weight.
    """

    @partial(compile.device_function, variant=f"{lanes}", inline=True)
    def load_normalised(x, i, norm, head, element):
        elements = load(x, i, lanes)
        if norm is None:
            return elements
        if norm.is_given:
            scaled = elements * splat(norm.factors[head], lanes)
            elements = scaled * load(norm.weight, element, lanes)
        return elements

    return load_normalised


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


@compile.device_function
def write_factors(x, norm):
    """Write the factors of the head vectors of a token."""
    for head in range(x.count):
        norm.factors[head] = _sum_of_squares(advance(x.pointer, head * x.stride), x.width)
    # A loop of its own, since LLVM vectorises it: divisions and roots are slow.
    for head in range(x.count):
        mean = norm.factors[head] / np.float32(x.width)
        norm.factors[head] = _ONE / np.sqrt(mean + norm.eps)
