"""The rotation of a few pairs in one vector or two, as LLVM instructions, for both pairings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from rope_cpu._formats import I32, I64, Memory, call_float, vector

# Some pairs of a row, made ready: takes the row, and returns values with the indices where they are stored.
Step = Callable[[Any], list[tuple[Any, Any]]]


def turn_half(memory: Memory, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
    """Return what rotates `lanes` pairs from pair i on, each partner `pairs` elements away."""
    b, partner = memory.b, memory.b.add(i, pairs)
    c, s = memory.load_real(cos, i, lanes), memory.load_real(sin, i, lanes)

    def step(x: Any) -> list[tuple[Any, Any]]:
        first, second = memory.load(x, i, lanes), memory.load(x, partner, lanes)
        turned = call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s)))
        return [(turned, i), (call_float(b, "fmuladd", second, c, b.fmul(first, s)), partner)]

    return step


def turn_interleaved(memory: Memory, cos: Any, sin: Any, i: Any, lanes: int, pairs: Any) -> Step:
    """Return what rotates `lanes` pairs from pair i on, partners side by side."""
    b, real, at = memory.b, memory.format.real, memory.b.mul(i, I64(2))

    def take(value: Any, mask: list[int]) -> Any:
        return b.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, len(mask)), mask))

    def twice(base: Any) -> Any:
        value = memory.load_real(base, i, lanes)
        if lanes == 1:
            value = b.insert_element(ir.Constant(vector(real, 2), ir.Undefined), value, I32(0))
        return take(value, [lane // 2 for lane in range(2 * lanes)])

    c = twice(cos)
    s = b.fmul(twice(sin), ir.Constant(vector(real, 2 * lanes), [-1.0, 1.0] * lanes))

    def step(x: Any) -> list[tuple[Any, Any]]:
        z = memory.load(x, at, 2 * lanes)
        crossed = b.fmul(take(z, [lane ^ 1 for lane in range(2 * lanes)]), s)
        return [(call_float(b, "fmuladd", z, c, crossed), at)]

    return step
