"""The output of `rope-cpu warmup`."""

from rope_cpu.cli import main as cli


def test_warmup_lists_what_it_compiled(capsys):
    assert cli.main(["warmup", "float32", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [
        "cos_sin_float32",
        "cos_sin_float64",
        "rotate_float32_half",
        "rotate_float32_interleaved",
    ]
    assert "cached in" in lines[-1]
