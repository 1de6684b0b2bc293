"""warmup: kernels compiled into the cache ahead of their first use."""

import importlib
import itertools
import json

import pytest

import rope_cpu
from rope_cpu.array_types import CACHE_KINDS

# `rope_cpu.warmup` is the function.
warmup = importlib.import_module("rope_cpu.warmup")


@pytest.mark.processes
def test_warmup_fills_an_empty_cache_once(tmp_path, run_program):
    cache = tmp_path / "cache"
    program = """
    import json, rope_cpu
    made = rope_cpu.warmup(dtypes="float32")
    print(json.dumps([[m.name, m.compiled, str(m.cache)] for m in made]))
    """
    first, second = (
        json.loads(run_program(program, env={"NUMBA_CACHE_DIR": str(cache)})[0]) for _ in range(2)
    )
    assert all(compiled for _, compiled, _ in first)
    assert not any(compiled for _, compiled, _ in second)
    assert all(folder.startswith(str(cache)) for _, _, folder in first)
    assert len(list(cache.rglob("*.nbc"))) == len(first)


@pytest.mark.parametrize(
    ("dtypes", "held"),
    [
        ("int8", "'int8'"),
        (["float32", "q"], "'q'"),
        ([None, "complex64"], "None"),
        (None, "None"),
        (["float32", None], "None"),
    ],
)
def test_warmup_refuses_other_dtypes(dtypes, held):
    with pytest.raises(TypeError, match=f"`dtypes` holds {held}; it must hold none but float32"):
        rope_cpu.warmup(dtypes)


def test_after_warmup_a_server_compiles_nothing(run_program):
    """The kernels of one input and one cache dtype are all that its calls need."""
    program = """
    import numpy as np, rope_cpu
    from ml_dtypes import bfloat16
    from rope_cpu.kernels import compile as compiling

    made = rope_cpu.warmup("float32", cache_dtypes=["bfloat16"])
    compiling._compile_or_load = None
    for interleaved in (False, True):
        rope = rope_cpu.RotaryEmbedding(16, interleaved=interleaved)
        cache = rope_cpu.KVCache(*np.zeros((2, 1, 8, 2, 16), bfloat16))
        plan = rope.plan([3, 4], layout="thd")
        q = np.ones((2, 4, 16), np.float32)
        k = np.ones((2, 2, 16), np.float32)
        norm = rope_cpu.RMSNorm(None)
        plan.append(q, k, k, cache, [5, 6], q_norm=norm, k_norm=norm)
        batch = rope_cpu.Batch(seq_lens=[7], query_lens=[2], page_table=[[0]], page_size=8)
        rope_cpu.attention(q, cache, batch)
        rope.shift_plan(-2, layout="thd").rotate_cached(cache, [5, 6])
        plan(q, k)
    print(*(kernel.name for kernel in made))
    """
    names, _ = run_program(program)
    assert "append_part_float32_bfloat16_interleaved" in names.split()


def operations(builds):
    """Return the dtypes of kernels by operation, each once, without the pairing."""
    numbers = {warmup.append_kernel: 2, warmup.append_part: 2}
    found = {}
    for build, arguments in builds:
        dtypes = arguments[: numbers.get(build, 1)]
        found.setdefault(build, [])
        if dtypes not in found[build]:
            found[build].append(dtypes)
    return found


@pytest.mark.parametrize("empty", [None, [], ()])
def test_caches_have_kernels_only_where_their_dtypes_are_given(empty):
    builds = warmup.kernel_builds("float32", empty)
    assert {build for build, _ in builds} == {
        warmup.cos_sin_kernel,
        warmup.cos_sin_part,
        warmup.rotation_kernel,
        warmup.rotation_part,
    }


def test_each_input_dtype_has_kernels_for_each_kind_of_cache():
    caches = ["int8", "float16", "int8-int4-hadamard", "int8-hadamard"]
    builds = warmup.kernel_builds(["float64", "float16", "bfloat16"], caches)
    found = operations(builds)
    kinds = [CACHE_KINDS[name] for name in caches]
    assert found[warmup.append_kernel] == [*itertools.product(["float16", "bfloat16"], kinds)]
    assert found[warmup.rotate_cached_kernel] == [("float16",)]
    attended = [CACHE_KINDS[name] for name in ("int8", "float16", "int8-int4")]
    assert found[warmup.attention_kernel] == [(kind,) for kind in attended]
    assert found[warmup.transform_kernel] == [()]
    assert found[warmup.append_part] == found[warmup.append_kernel]
    assert found[warmup.rotate_cached_part] == found[warmup.rotate_cached_kernel]
    assert found[warmup.attention_part] == found[warmup.attention_kernel]
    for part in (warmup.append_part, warmup.rotate_cached_part):
        pairings = {arguments[-1] for build, arguments in builds if build is part}
        assert pairings == {"half", "interleaved"}


@pytest.mark.parametrize(
    ("cache_dtypes", "held"),
    [
        ("float64", "'float64'"),
        (["int8", "uint8"], "'uint8'"),
        ([None], "None"),
        ("int8-int4-hadamrd", "'int8-int4-hadamrd'"),
    ],
)
def test_warmup_refuses_other_cache_dtypes(cache_dtypes, held):
    rule = "it must hold none but float32, float16, bfloat16, int8"
    with pytest.raises(TypeError, match=f"`cache_dtypes` holds {held}; {rule}"):
        rope_cpu.warmup("float32", cache_dtypes)


def test_warmup_refuses_caches_for_float64_alone():
    with pytest.raises(ValueError, match="`cache_dtypes` holds int8, but `dtypes` holds float64"):
        rope_cpu.warmup("float64", "int8")
