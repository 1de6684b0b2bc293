"""The errors of arguments: their text, their argument, and their copies in other processes."""

import pickle

import numpy as np
import pytest

from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding

X = np.zeros((2, 3), np.float32)
ERRORS = [
    (ArgumentError("x", 0, "be at least 1"), "`x` is 0; it must be at least 1"),
    (ArgumentError("x", "0", "be 1", "pass 1"), "`x` is '0'; it must be 1; pass 1"),
    (ArgumentError("x", Finding.shape_of(X), "be (s,)"), "`x` has shape (2, 3); it must be (s,)"),
    (ArgumentTypeError("x", Finding.dtype_of(X), "be i4"), "`x` has dtype float32; it must be i4"),
    (ArgumentError("x", Finding.holds(np.nan), "be finite"), "`x` holds nan; it must be finite"),
]


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_the_text_names_argument_value_rule_and_remedy(error, text):
    assert str(error) == text
    assert error.argument == "x"


@pytest.mark.parametrize(("error", "text"), ERRORS)
def test_an_error_can_be_pickled(error, text):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.argument, copy.rule) == (text, "x", error.rule)


def test_a_value_that_cannot_be_pickled_is_kept_as_text():
    error = ArgumentTypeError("x", lambda: 0, "be a number")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_the_classes_are_those_of_python():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentTypeError, TypeError)
