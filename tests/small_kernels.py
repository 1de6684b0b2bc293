"""Kernels of a few lines, to test what kernels are written with; they are cached nowhere."""

import inspect

import numpy as np

from rope_cpu._kernels.compiler import built, loaded
from rope_cpu._kernels.entry import whole
from rope_cpu._kernels.integers import Integer, number


def kernel(write, parameters=None):
    """Compile a function of Integers that returns one; parameters: whole numbers unless they are given."""
    parameters = parameters or [whole] * len(inspect.signature(write).parameters)
    return loaded(built(write, write.__name__, parameters), write.__name__)


def kernel_of_several(write):
    """Compile a function of int64 that returns several numbers or truth values; return what calls it for a list."""
    count = []

    def stored(at, *numbers):
        answers = write(*numbers)
        for n, answer in enumerate(answers):
            is_truth = isinstance(answer, Integer) and answer.value.type.width == 1
            (at + 8 * n).exchange(number(answer) if is_truth else answer)
        count.append(len(answers))
        return 0

    call = kernel(stored, [whole] * (1 + len(inspect.signature(write).parameters))).call

    def answers(*numbers):
        memory = np.zeros(count[0], np.int64)
        call(memory.ctypes.data, *numbers)
        return memory.tolist()

    return answers
