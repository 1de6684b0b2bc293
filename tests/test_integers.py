"""Whole numbers written down as LLVM do what Python's do, and never leave it to the processor to divide by zero."""

import numpy as np
import pytest
from small_kernels import kernel, kernel_of_several

from rope_cpu._kernels.integers import choose, either, every, larger, number, same, smaller

NUMBERS = [-(2**62), -9, -8, -1, 0, 1, 2, 7, 8, 63, 64, 2**40 + 3]


def _computed(x, y):
    return (
        x + y, x - 2 - y, 5 * x, abs(x), x % y, abs(x) // y, (x << 2) | (y & 6), x >> 3,
        choose(x < y, x, 7), smaller(x, y) - larger(x, y), 1 << (x & 15),
        x + 0 - 0, x * 1, x * 0 + 5, choose(x < y, 3, -4), abs(x) // 7 + x % 7,
    )  # fmt: skip


def _compared(x, y):
    return x < y, x <= y, x == y, x != y, ~(x > y) & (x >= y), every(x > 0, y > 0, number(x < y) == 1)


def test_what_is_computed_is_what_python_computes():
    computed, compared = kernel_of_several(_computed), kernel_of_several(_compared)
    for x in NUMBERS:
        for y in NUMBERS:
            by = y if y > 0 else 1  # numbers below one divide like one
            expected = (
                x + y, x - 2 - y, 5 * x, abs(x), x % by, abs(x) // by, (x << 2) | (y & 6), x >> 3,
                x if x < y else 7, min(x, y) - max(x, y), 1 << (x & 15),
                x, x, 5, 3 if x < y else -4, abs(x) // 7 + x % 7,
            )  # fmt: skip
            wrapped = [int(np.array(value & (2**64 - 1), np.uint64).view(np.int64)) for value in expected]
            assert computed(x, y) == wrapped, (x, y)
            assert compared(x, y) == [x < y, x <= y, x == y, x != y, x == y, 0 < x < y], (x, y)


def test_what_is_not_asked_for_is_not_computed():
    def raised(count, at):
        return number(either(count < 0, lambda: at.add(count) == 4) & same((count, count), (count, count)))

    memory = np.array([4])
    call = kernel(raised).call
    answers = [call(count, memory.ctypes.data) for count in (-5, 3, 3)]
    assert answers == [True, True, False]
    assert memory[0] == 10


def test_nothing_is_taken_for_true_before_it_is_known():
    def wrong(x):
        return x if x else x + 1

    with pytest.raises(TypeError, match="known when compiled code runs"):
        kernel(wrong)
