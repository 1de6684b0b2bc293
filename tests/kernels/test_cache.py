"""Compiled kernels on disk, in Numba's cache: found by those that come after, and never taken for others."""

import hashlib
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

import rope_cpu
from rope_cpu.kernels import compile as compiling

ONE_KERNEL = """
    from rope_cpu.kernels.angles import cos_sin
    print("loaded" if cos_sin("float32").stats.cache_hits else "compiled")
"""


def test_a_kernel_is_compiled_once_for_each_processor_and_source(tmp_path, run_program):
    source = tmp_path / "installed"
    ignored = shutil.ignore_patterns("__pycache__", "export", "bench")
    shutil.copytree(Path(rope_cpu.__file__).parent, source / "rope_cpu", ignore=ignored)

    def found(**settings):
        environment = {"PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(tmp_path), **settings}
        return run_program(ONE_KERNEL, env=environment)[0].strip()

    other = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
    assert [found(), found()] == ["compiled", "loaded"]
    assert [found(**other), found(**other)] == ["compiled", "loaded"]
    with (source / "rope_cpu/kernels/vectors.py").open("a") as file:
        file.write("# of another version\n")
    assert found() == "compiled"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_warming_up_one_dtype_is_enough_for_it(dtype, run_program):
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
    run_program(use)


ROTATE = """
    import hashlib, numpy as np, ml_dtypes, rope_cpu
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 66))
    order = [(dtype, kind) for dtype in ("float32", "bfloat16") for kind in (False, True)]
    for dtype, kind in ORDER:
        rope = rope_cpu.RotaryEmbedding(66, interleaved=kind)
        rotated = rope.rotate(x.astype(dtype))
        apply = rope_cpu.apply_rotary(x.astype(dtype), *rope.cos_sin(np.arange(5)), interleaved=kind)
        assert apply.tobytes() == rotated.tobytes(), (dtype, kind)
        print(dtype, kind, hashlib.sha256(rotated.tobytes()).hexdigest())
"""


@pytest.fixture(scope="module")
def expected():
    """The lines of ROTATE by the kernels of this process, whose cache is another."""
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 66))
    lines = set()
    for dtype, kind in itertools.product(("float32", "bfloat16"), (False, True)):
        rotated = rope_cpu.RotaryEmbedding(66, interleaved=kind).rotate(x.astype(dtype))
        lines.add(f"{dtype} {kind} {hashlib.sha256(rotated.tobytes()).hexdigest()}")
    return lines


def test_kernels_of_several_processes_are_not_taken_for_each_other(tmp_path, run_program, expected):
    """Each process counts its functions from the start, so those of different kernels may have one number."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    for one in range(len(expected)):
        run_program(ROTATE.replace("ORDER", f"order[{one}:{one + 1}]"), env=cache)
    assert set(run_program(ROTATE.replace("ORDER", "order"), env=cache)[0].splitlines()) == expected


def test_processes_that_fill_a_cache_at_once(tmp_path, run_program, expected):
    cache, orders = {"NUMBA_CACHE_DIR": str(tmp_path)}, ("order[:2]", "order[:2]", "order[1::-1]")
    running = [run_program.start(ROTATE.replace("ORDER", order), env=cache) for order in orders]
    found = [process.communicate(timeout=300) for process in running]
    found.append(run_program(ROTATE.replace("ORDER", "order[:2]"), env=cache))
    for out, err in found:
        assert set(out.splitlines()) == {line for line in expected if line.startswith("float32")}, err


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


def test_a_compiler_that_is_switched_off_is_named(run_program):
    program = "import numpy as np, rope_cpu; rope_cpu.RotaryEmbedding(8).rotate(np.ones((1, 1, 1, 8)))"
    _, err = run_program(program, env={"NUMBA_DISABLE_JIT": "1"}, exits=1, timeout=60)
    assert "RuntimeError: NUMBA_DISABLE_JIT is set" in err
