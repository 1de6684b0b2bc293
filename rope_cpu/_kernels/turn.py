"""The rotation of a few pairs in one vector or two, as LLVM instructions, for both pairings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from rope_cpu._kernels.formats import call_float, take
from rope_cpu._kernels.integers import Integer
from rope_cpu._kernels.memory import Memory

# Some pairs of a row, made ready: takes vectors of the row's halves, or one of the row, and returns them rotated.
Step = Callable[[Sequence[Any]], list[Any]]


def turn_half(memory: Memory, cos: Integer, sin: Integer, lanes: int) -> Step:
    """Return what rotates `lanes` pairs by cos and sin at addresses, partners in two halves."""
    b, order = memory.b, memory.order(lanes)
    c, s = (memory.load_real(at, lanes, order) for at in (cos, sin))

    def step(halves: Sequence[Any]) -> list[Any]:
        first, second = halves
        turned = call_float(b, "fmuladd", first, c, b.fneg(b.fmul(second, s)))
        return [turned, call_float(b, "fmuladd", second, c, b.fmul(first, s))]

    return step


def turn_interleaved(memory: Memory, cos: Integer, sin: Integer, lanes: int) -> Step:
    """Return what rotates `lanes` pairs by cos and sin at addresses, partners side by side."""
    b, order = memory.b, memory.order(2 * lanes)
    pairs, partners = [n // 2 for n in order], [order.index(n ^ 1) for n in order]
    c, s = (memory.load_real(at, lanes, pairs) for at in (cos, sin))
    s = b.fmul(s, ir.Constant(s.type, [2.0 * (n % 2) - 1.0 for n in order]))

    def step(row: Sequence[Any]) -> list[Any]:
        (z,) = row
        crossed = b.fmul(take(b, z, partners), s)
        return [call_float(b, "fmuladd", z, c, crossed)]

    return step
