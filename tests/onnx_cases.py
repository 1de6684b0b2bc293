"""ONNX's backend cases: models, inputs and expected outputs.

The onnx package contains them and builds them on request.
"""

import importlib
import warnings
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import node


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    model: onnx.ModelProto
    inputs: list
    outputs: list
    rtol: float
    atol: float


def cases(operator):
    """Return the cases of an operator, with those of operators written out as functions.

    ONNX's loader returns these, too, but computes those of all operators, for ten seconds.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some cases overflow
        importlib.import_module(f"{node.__name__}.{operator.replace('_', '')}")
    found = [case for case in node._NodeTestCases if case.name.startswith(f"test_{operator}")]
    return [_case(case) for case in found]


def _case(case):
    inputs, outputs = ([_array(value) for value in values] for values in case.data_sets[0])
    return Case(case.name, case.model, inputs, outputs, case.rtol, case.atol)


def _array(value):
    return value if isinstance(value, np.ndarray) else numpy_helper.to_array(value)


def inputs_of(case):
    """Input name → array."""
    return {
        given.name: value for given, value in zip(case.model.graph.input, case.inputs, strict=True)
    }


def outputs_of(case):
    """Output name → array."""
    return {
        made.name: value for made, value in zip(case.model.graph.output, case.outputs, strict=True)
    }
