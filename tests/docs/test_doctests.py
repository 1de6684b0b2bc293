"""The examples in the docstrings of public modules run, and every public callable has some."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import rope_cpu
from rope_cpu import export, positions

# Modules with examples besides those of the public callables.
INTERNAL = [
    "rope_cpu",
    "rope_cpu.models.model",
    "rope_cpu.models.reader",
    "rope_cpu.frequencies.axes",
    "rope_cpu.frequencies.spec",
]


def public_callables():
    """Return the public functions, and the public methods of public classes, by name."""
    found = {}
    for module in (rope_cpu, export, positions):
        names = getattr(module, "__all__", None) or dir(module)
        for name in names:
            value = getattr(module, name)
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("rope_cpu"):
                continue
            if inspect.isclass(value):
                found |= public_methods(value)
            elif inspect.isfunction(value):
                found[f"{module.__name__}.{name}"] = value
    return found


def public_methods(owner):
    """Return the public methods of a class and its call, by name."""
    methods = inspect.getmembers(owner, inspect.isroutine)
    return {
        f"{owner.__name__}.{name}": value
        for name, value in methods
        if name in vars(owner) and (name == "__call__" or not name.startswith("_"))
    }


MODULES = sorted({*INTERNAL, *(value.__module__ for value in public_callables().values())})


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", public_callables())
def test_every_public_callable_has_an_example(name):
    text = inspect.getdoc(public_callables()[name]) or ""
    assert doctest.DocTestParser().get_examples(text)
