"""The parts of kernels, which run inside a prange, neither raise nor allocate."""

import importlib
import pkgutil

import pytest
from numba import njit

from rope_cpu import kernels
from rope_cpu.array_types import CACHE_KINDS
from rope_cpu.kernels import compile as compiling

# For each function that compiles a part, the arguments of one whose code has all branches.
PARTS = {
    "angles.cos_sin_part": [("float32",)],
    "rotate.rotation_part": [("float32", "half")],
    "append.append_part": [("float32", CACHE_KINDS["int8-int4-hadamard"], "interleaved")],
    "attention.attention_part": [
        (CACHE_KINDS[name], part)
        for name, part in (("int8", "attend"), ("int8-int4", "attend"), ("int8", "finish"))
    ],
    "rotate_cached.rotate_cached_part": [("float32", "half")],
}


def functions_that_compile_parts():
    for module in pkgutil.iter_modules(kernels.__path__):
        for name, value in vars(importlib.import_module(f"rope_cpu.kernels.{module.name}")).items():
            if name.endswith("_part") and hasattr(value, "cache_clear"):
                yield f"{module.name}.{name}"


def test_all_parts_are_known():
    assert set(functions_that_compile_parts()) == set(PARTS)


@pytest.mark.parametrize(
    ("function", "arguments"), [(name, each) for name, all_ in PARTS.items() for each in all_]
)
def test_a_part_neither_raises_nor_allocates(function, arguments, monkeypatch):
    """Numba keeps the errors that a function may raise as pickled data, and allocates by its NRT.

    LLVM has removed what is never reached. Loaded from the cache, a function has no LLVM code.
    """

    def compiled(part, signature, options, level):
        dispatcher = njit(**options)(part)
        compiling._compile(dispatcher, signature, level)
        return dispatcher

    monkeypatch.setattr(compiling, "_compile_or_load", compiled)
    module, name = function.split(".")
    uncached = getattr(importlib.import_module(f"rope_cpu.kernels.{module}"), name).__wrapped__
    (code,) = uncached(*arguments).inspect_llvm().values()
    assert "pickledata" not in code
    assert "NRT_MemInfo_alloc" not in code
    assert "NRT_Allocate" not in code
