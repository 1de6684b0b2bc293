"""ONNX's backend cases: models, inputs and expected outputs.

The onnx package contains them and builds them on request.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    model: onnx.ModelProto
    inputs: list
    outputs: list
    rtol: float
    atol: float


@cache
def _all():
    with warnings.catch_warnings():
        # The loader computes the expected values of every operator, with overflows and
        # divisions by zero among them.
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return load_model_tests(kind="node")


def cases(prefix):
    """Return the cases with this prefix, with those of operators written out as functions."""
    return [_case(case) for case in _all() if case.name.startswith(prefix)]


def _case(case):
    if case.model is not None:
        model, (inputs, outputs) = case.model, case.data_sets[0]
    else:  # onnx before 1.20 keeps them in files
        folder = Path(case.model_dir)
        model = onnx.load(folder / "model.onnx")
        inputs, outputs = (
            [
                onnx.load_tensor(folder / "test_data_set_0" / f"{kind}_{index}.pb")
                for index in range(len(values))
            ]
            for kind, values in (("input", model.graph.input), ("output", model.graph.output))
        )
    inputs, outputs = ([_array(value) for value in values] for values in (inputs, outputs))
    return Case(case.name, model, inputs, outputs, case.rtol, case.atol)


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
