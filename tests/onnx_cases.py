"""ONNX's backend cases, built offline: models, inputs, expected outputs."""

import warnings
from functools import cache

import numpy as np
from onnx import numpy_helper


@cache
def _all():
    with warnings.catch_warnings():
        # The loader computes the expected values of every operator, overflows and divisions by zero among them.
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return load_model_tests(kind="node")


def cases(prefix):
    """The cases whose names start so, the expanded ones (operators written out as functions) included."""
    return [case for case in _all() if case.name.startswith(prefix)]


def _array(value):
    return value if isinstance(value, np.ndarray) else numpy_helper.to_array(value)


def inputs_of(case):
    """Input name → array."""
    return {
        given.name: _array(value) for given, value in zip(case.model.graph.input, case.data_sets[0][0], strict=True)
    }


def outputs_of(case):
    """Output name → array."""
    return {made.name: _array(value) for made, value in zip(case.model.graph.output, case.data_sets[0][1], strict=True)}
