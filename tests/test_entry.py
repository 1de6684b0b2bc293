"""What Python calls: compiled code takes objects as what they are, or fails."""

import threading
import time

import numpy as np
import pytest
from small_kernels import kernel

from rope_cpu._kernels.entry import float_bits, object_at, whole
from rope_cpu._kernels.flow import repeat
from rope_cpu._kernels.integers import Integer


def _weighted(x, y, z):
    return x + y * 10 + z * 100


@pytest.fixture(scope="module")
def weighted():
    return kernel(_weighted).call


def test_numbers_come_in_order(weighted):
    assert weighted(1, 2, 3) == 321
    assert weighted(-(2**63), 0, 0) == -(2**63)
    assert weighted(2**63 - 1, 0, 0) == 2**63 - 1
    assert weighted(np.int64(4), True, 0) == 14
    assert weighted.__name__ == "_weighted"


@pytest.mark.parametrize("given", [(), (1, 2), (1, 2, 3, 4)])
def test_another_number_of_arguments_is_none_it_takes(weighted, given):
    with pytest.raises(SystemError):
        weighted(*given)


@pytest.mark.parametrize(
    ("given", "error"), [((1, "2", 3), TypeError), ((1, 2, 1.5), TypeError), ((2**63, 0, 0), OverflowError)]
)
def test_what_is_no_such_number_is_refused(weighted, given, error):
    with pytest.raises(error):
        weighted(*given)


def test_objects_and_floats():
    at = kernel(lambda x, number: x + number, [object_at, whole]).call
    thing = object()
    assert at(thing, 3) == id(thing) + 3
    bits = kernel(lambda x: x, [float_bits]).call
    assert bits(-0.5) == np.float64(-0.5).view(np.int64)
    with pytest.raises(TypeError):
        bits("1")


def test_other_threads_go_on_meanwhile():
    def wait(at: Integer):
        with repeat(at.b) as end_if:
            end_if(at.load() != 0)
        return 7

    memory, answers, call = np.zeros(1, np.int64), [], kernel(wait).call
    thread = threading.Thread(target=lambda: answers.append(call(memory.ctypes.data)))
    thread.start()
    time.sleep(0.05)
    assert answers == []
    memory[0] = 1
    thread.join()
    assert answers == [7]
