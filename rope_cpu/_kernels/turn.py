"""The rotation of a few pairs in one vector or two, as LLVM instructions, for both pairings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.formats import I32, Memory, call_float, vector
from rope_cpu._kernels.integers import Integer

# Some pairs of a row, made ready: takes vectors of the row's halves, or one of the row, and returns them rotated.
Step = Callable[[Sequence[Any]], list[Any]]


def turn_half(memory: Memory, cos: Integer, sin: Integer, lanes: int) -> Step:
    """Return what rotates `lanes` pairs by cos and sin at addresses, partners in two halves."""
    b, c, s = memory.b, memory.load_real(cos, lanes), memory.load_real(sin, lanes)

    def step(halves: Sequence[Any]) -> list[Any]:
        first, second = halves
        turned = call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s)))
        return [turned, call_float(b, "fmuladd", second, c, b.fmul(first, s))]

    return step


def turn_interleaved(memory: Memory, cos: Integer, sin: Integer, lanes: int) -> Step:
    """Return what rotates `lanes` pairs by cos and sin at addresses, partners side by side."""
    b, real = memory.b, memory.format.real

    def take(value: Any, mask: list[int]) -> Any:
        return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(mask)), mask))

    def twice(at: Integer) -> Any:
        value = memory.load_real(at, lanes)
        if lanes == 1:
            value = b.insert_element(ir.Constant(vector(real, 2), ir.Undefined), value, I32(0))
        return take(value, [lane // 2 for lane in range(2 * lanes)])

    c = twice(cos)
    s = b.fmul(twice(sin), ir.Constant(vector(real, 2 * lanes), [-1.0, 1.0] * lanes))

    def step(row: Sequence[Any]) -> list[Any]:
        (z,) = row
        crossed = b.fmul(take(z, [lane ^ 1 for lane in range(2 * lanes)]), s)
        return [call_float(b, "fmuladd", z, c, crossed)]

    return step
