"""The examples in the docstrings of public modules run, and every public function has some."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

MODULES = [
    "rope_cpu.convert",
    "rope_cpu.mrope_positions",
    "rope_cpu.positions",
    "rope_cpu.sinusoidal",
]


def public_functions(module):
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", MODULES)
def test_every_public_function_has_an_example(name):
    module = importlib.import_module(name)
    finder = doctest.DocTestFinder(exclude_empty=True, recurse=False)
    without = [
        function
        for function in public_functions(module)
        if not any(test.examples for test in finder.find(getattr(module, function)))
    ]
    assert without == []
