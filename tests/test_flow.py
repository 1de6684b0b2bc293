"""Branches and loops written down as LLVM do what Python's do."""

import numpy as np
import pytest
from llvmlite import ir
from small_kernels import kernel, kernel_of_several

from rope_cpu._kernels.entry import float_bits
from rope_cpu._kernels.flow import Ending, Variable, each, plain_loop, repeat, separately, when, whether
from rope_cpu._kernels.integers import number
from rope_cpu._kernels.words import foreign, spill

RANGES = [(0, 5, 1), (3, 3, 1), (4, 1, 1), (-3, 4, 2), (0, 10, 7), (-9, -8, 3)]


def _summed(start, stop, step):
    """Add up the numbers of a range, each weighted by how many came before."""
    total, count = Variable(start.b, 0), Variable(start.b, 1)
    with each(start, stop, step) as n:
        total.set(total.now + n * count.now)
        count.set(count.now + 1)
    return total.now


@pytest.mark.parametrize("numbers", RANGES)
def test_a_loop_sees_every_number_in_order(numbers):
    summed = kernel(_summed).call
    assert summed(*numbers) == sum(n * count for count, n in enumerate(range(*numbers), 1))


def _first_divisor(x, limit):
    """Return the least divisor of x from 2 on; −1 from the limit on; 0 for what is below 2."""
    end, divisor = Ending(x.b), Variable(x.b, 2)
    end.leave_if(x < 2, 0)
    with repeat(x.b) as end_if:
        end_if(divisor.now >= limit)
        with when(x % divisor.now == 0):
            end.leave(divisor.now)
        divisor.set(divisor.now + 1)
    return end.reached(-1)


def test_a_function_ends_where_it_is_left():
    first_divisor = kernel(_first_divisor).call
    assert [first_divisor(x, 50) for x in (-4, 1, 2, 9, 35, 49, 53 * 59)] == [0, 0, 2, 3, 5, 7, -1]


def _pairs(rows, columns):
    """Count pairs of a row and a lesser column, and a thousand for each other pair."""
    count = Variable(rows.b, 0)
    with each(0, rows) as row, each(0, columns) as column, whether(column < row) as (less, not_less):
        with less:
            count.set(count.now + 1)
        with not_less:
            count.set(count.now + 1000)
    return count.now


def test_of_two_ways_one_is_gone():
    pairs = kernel(_pairs).call
    for rows, columns in ((0, 3), (3, 0), (4, 6), (7, 2)):
        less = sum(column < row for row in range(rows) for column in range(columns))
        assert pairs(rows, columns) == less + 1000 * (rows * columns - less)


def _stepped(times, start):
    """Go on by 3 and by a step that the body finds, so often; return the sums of what was seen."""
    seen, other = Variable(times.b, 0), Variable(times.b, 0)
    moves = [3]
    with plain_loop(times, [start, 100], moves) as (x, y):
        seen.set(seen.now + x)
        other.set(other.now + y)
        moves.append(times)
    return seen.now, other.now


@pytest.mark.parametrize("times", [-2, 0, 1, 5])
def test_a_plain_loop_goes_on_by_its_moves(times):
    stepped = kernel_of_several(_stepped)
    turns = range(max(times, 0))
    assert stepped(times, 7) == [sum(7 + 3 * n for n in turns), sum(100 + times * n for n in turns)]


def test_what_stands_separately_is_written_once():
    written = []

    def is_less(a, b):
        written.append("once")
        return a < b

    def ordered(a, b, c):
        return number(separately("is_less", is_less, a, b) & separately("is_less", is_less, b, c))

    function = kernel(ordered).call
    assert [function(*numbers) for numbers in ((1, 2, 3), (1, 3, 2), (2, 1, 3))] == [1, 0, 0]
    assert written == ["once"]


def _bits(x):
    """Return the bits of a float64, from the stack."""
    return spill(x.b, (0, x)).words(2)[1]


def test_a_float_comes_as_its_bits():
    bits = kernel(_bits, [float_bits]).call
    for x in (0.0, -0.0, 1.5, np.inf, -1e300):
        assert bits(x) == np.float64(x).view(np.int64)


def test_numbers_are_cut_and_widened_for_c():
    magnitude = foreign("abs", ir.IntType(32), ir.IntType(32))

    def absolute(x):
        return magnitude(x.b, x) + magnitude(x.b, -7)

    function = kernel(absolute).call
    assert [function(x) for x in (5, -5, 2**32 - 3)] == [12, 12, 10]
