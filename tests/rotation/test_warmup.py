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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_after_warmup_nothing_is_compiled(dtype, run_program):
    """The kernels of one input and one cache dtype are all that calls need; float64 has none."""
    program = f"""
    import ml_dtypes, numpy as np, rope_cpu
    from rope_cpu.kernels import compile as compiling

    dtype, cache_dtypes = {dtype!r}, {None if dtype == "float64" else "bfloat16"!r}
    made = rope_cpu.warmup(dtype, cache_dtypes)
    compiling._compile_or_load = None
    x = np.ones((2, 900, 4, 16), dtype)
    q = x[0, :2]
    norm = rope_cpu.RMSNorm(None)
    for settings in ({{}}, {{"angle_dtype": "float32"}}, {{"interleaved": True}}):
        rope = rope_cpu.RotaryEmbedding(16, **settings)
        plan = rope.plan(np.arange(900))
        plan(x, x), plan.rotate(x), rope(x, x), rope.rotate(x[:, :1], offset=5)
        rope.shift(x, 3), rope.cos_sin(np.arange(3), x.dtype)
        if not cache_dtypes:
            continue
        cache = rope_cpu.KVCache.zeros(1, 8, 4, 16, dtype=cache_dtypes)
        rope.plan([3, 4], layout="thd").append(q, q, q, cache, [5, 6], q_norm=norm, k_norm=norm)
        batch = rope_cpu.Batch(seq_lens=[7], query_lens=[2], page_table=[[0]], page_size=8)
        rope_cpu.attention(q, cache, batch)
        rope.shift_plan(-2, layout="thd").rotate_cached(cache, [5, 6])
    print(*(kernel.name for kernel in made))
    """
    names, _ = run_program(program)
    assert (f"append_part_{dtype}_bfloat16_interleaved" in names.split()) == (dtype != "float64")


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


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("empty", [None, [], ()])
def test_caches_have_kernels_only_where_their_dtypes_are_given(empty, dtype):
    builds = warmup.kernel_builds(dtype, empty)
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
    with pytest.raises(ValueError, match=r"`cache_dtypes` is .*, as `dtypes` holds float64 alone"):
        rope_cpu.warmup("float64", "int8")
