"""The output of `rope-cpu warmup`."""

import pytest

from rope_cpu.cli import main as cli


def test_warmup_lists_what_it_compiled(capsys):
    assert cli.main(["warmup", "float32", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "cos_sin_float32",
        "cos_sin_float64",
        "cos_sin_part_float32",
        "cos_sin_part_float64",
        "rotate_float32",
        "rotate_part_float32_half",
        "rotate_part_float32_interleaved",
    ]
    assert "cached in" in lines[-1]


def test_warmup_compiles_for_the_caches_of_a_server(capsys):
    assert cli.main(["warmup", "float32", "--cache-dtypes", "float32,int8"]) == 0
    names = {line.split()[0] for line in capsys.readouterr().out.splitlines()[:-1]}
    kernels = ("append_float32_{}", "rotate_cached_float32", "attention_{}")
    assert {name.format(dtype) for name in kernels for dtype in ("float32", "int8")} <= names
    assert not any("float16" in name for name in names)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("float32 --cache-dtypes int8,float64", "`--cache-dtypes` holds 'float64'"),
        ("fp16", "`dtypes` holds 'fp16'; it must hold none but float32"),
        ("float64 --cache-dtypes int8", "`dtypes` holds float64 alone"),
        ("--clear float32", "`--clear` deletes the kernels of all dtypes"),
        ("--clear --cache-dtypes int8", "`--clear` deletes the kernels of all dtypes"),
    ],
)
def test_usage_errors(words, text, capsys):
    assert cli.main(["warmup", *words.split()]) == 2
    assert text in capsys.readouterr().err
