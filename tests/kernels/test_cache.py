"""Compiled kernels on disk, in Numba's cache: found by those that come after, and never taken for others."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rope_cpu
from rope_cpu.kernels import compile as compiling

WARM_UP = """
    import json, rope_cpu
    print(json.dumps([[m.name, m.compiled] for m in rope_cpu.warmup({dtypes!r})]))
"""


def start(program, cache, **variables):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(cache)} | variables
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/"
    )


def run(program, cache, **variables):
    process = start(program, cache, **variables)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def warmed_up(cache, dtypes="float32", **variables):
    """Whether each kernel was compiled, by name."""
    return dict(json.loads(run(WARM_UP.format(dtypes=dtypes), cache, **variables)))


def test_a_kernel_is_compiled_once_for_each_processor_and_source(tmp_path):
    source = tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "export", "bench")
    shutil.copytree(Path(rope_cpu.__file__).parent, source / "rope_cpu", ignore=ignored)
    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    compiled = [
        set(warmed_up(tmp_path, PYTHONPATH=str(source), **settings).values()) for settings in ({}, {}, other, other)
    ]
    assert compiled == [{True}, {False}, {True}, {False}]
    with (source / "rope_cpu/kernels/vectors.py").open("a") as file:
        file.write("# of another version\n")
    assert set(warmed_up(tmp_path, PYTHONPATH=str(source)).values()) == {True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_warming_up_one_dtype_is_enough_for_it(tmp_path, dtype):
    use = f"""
    import ml_dtypes, numpy as np, rope_cpu
    rope_cpu.warmup({dtype!r})
    def compiled(*_, **__):
        raise AssertionError("compiled")
    rope_cpu.kernels.compile.compiled = compiled
    x = np.ones((2, 900, 4, 128), {dtype!r})
    for settings in ({{}}, {{"angle_dtype": "float32"}}, {{"interleaved": True}}):
        rope = rope_cpu.RotaryEmbedding(128, **settings)
        plan = rope.plan(np.arange(900))
        plan(x, x), plan.rotate(x), rope(x, x), rope.rotate(x[:, :1], offset=5)
        rope.shift(x, 3), rope.cos_sin(np.arange(3), x.dtype)
    """
    run(use, tmp_path)


ROTATE = """
    import numpy as np, ml_dtypes, rope_cpu
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 66))
    order = [(dtype, kind) for dtype in ("float32", "float64", "bfloat16") for kind in (False, True)]
    bits = {}
    for dtype, kind in ORDER:
        rope = rope_cpu.RotaryEmbedding(66, interleaved=kind)
        bits[dtype, kind] = rope.rotate(x.astype(dtype)).tobytes()
        apply = rope_cpu.apply_rotary(x.astype(dtype), *rope.cos_sin(np.arange(5), "float64"), interleaved=kind)
        assert np.allclose(apply.astype(float), rope.rotate(x), atol=0.05), (dtype, kind)
    print(sorted(bits.items()))
"""


def test_kernels_of_several_processes_are_not_taken_for_each_other(tmp_path):
    """Each process counts its functions from the start, so those of different kernels may have one number."""
    for one in range(6):
        run(ROTATE.replace("ORDER", f"order[{one}:{one + 1}]"), tmp_path)
    together, fresh = (run(ROTATE.replace("ORDER", "order"), folder) for folder in (tmp_path, tmp_path / "other"))
    assert together == fresh


def test_processes_that_fill_a_cache_at_once(tmp_path):
    running = [start(ROTATE.replace("ORDER", f"order[{n}:] + order[:{n}]"), tmp_path) for n in (0, 1, 3)]
    found = {process.communicate(timeout=300)[0] for process in running}
    assert len(found) == 1
    assert found == {run(ROTATE.replace("ORDER", "order"), tmp_path)}


def test_without_a_folder_every_process_compiles_and_says_so(monkeypatch):
    class Dispatcher:
        def __init__(self, function):
            self.function = function

        def enable_caching(self):
            raise RuntimeError("cannot cache")

        def compile(self, signature):
            self.compiled = signature

        def disable_compile(self):
            pass

    monkeypatch.setattr(compiling, "njit", lambda **_: Dispatcher)
    with pytest.warns(UserWarning, match="every process compiles them; NUMBA_CACHE_DIR may name one"):
        made = compiling.compiled(lambda: 0, "name", ("signature",))
    assert made.compiled == ("signature",)


def test_a_compiler_that_is_switched_off_is_named(tmp_path):
    program = "import numpy as np, rope_cpu; rope_cpu.RotaryEmbedding(8).rotate(np.ones((1, 1, 1, 8)))"
    process = start(program, tmp_path, NUMBA_DISABLE_JIT="1")
    assert "RuntimeError: NUMBA_DISABLE_JIT is set" in process.communicate(timeout=60)[1]
