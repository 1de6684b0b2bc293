"""warmup: kernels compiled into the cache ahead of their first use."""

import json

import pytest

import rope_cpu


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
    with pytest.raises(TypeError, match=f"`dtypes` holds {held}; each must be one of float32"):
        rope_cpu.warmup(dtypes)
