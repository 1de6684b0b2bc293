import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rope_cpu
from rope_cpu.cli import main as cli


@pytest.fixture
def child(tmp_path):
    """Start Python on a program, away from the source tree but with the package under test."""
    package = str(Path(rope_cpu.__file__).parents[1])

    def start(program, stdout=subprocess.PIPE, **variables):
        return subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": package, **variables},
        )

    return start


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in cli.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"rope-cpu {rope_cpu.__version__}\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert cli.COMMANDS[name][1].split()[0] in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["nope"], ["warmup", "int8"], ["verify", "a", "b"], ["verify", "--jso", "x"]])
def test_bad_arguments_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "rope-cpu" in capsys.readouterr().err


def test_help_imports_no_extra(child):
    program = (
        "import sys; from rope_cpu.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'onnx', 'onnxruntime', 'rich', 'matplotlib', 'torch'} & set(sys.modules))"
    )
    out, err = child(program).communicate()
    assert out.endswith("set()\n"), err


@pytest.mark.parametrize(("package", "extra"), [("rich", "cli"), ("onnx", "onnx"), ("onnxruntime", "onnx")])
def test_a_missing_extra_is_one_line(package, extra, child):
    program = (
        f"import sys; sys.modules[{package!r}] = None; from rope_cpu.cli.main import main; sys.exit(main(['verify']))"
    )
    process = child(program)
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err == f'rope-cpu: `verify` needs the package {package}: pip install "rope-cpu[{extra}]"\n'


def test_a_defect_is_no_usage_error(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "verify", ("rope_cpu.no_such_module", "x"))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["verify"])


WORDY = ["warmup float32", "show", "verify", "bench plan-64"]
QUICKLY = (
    "import sys; from rope_cpu.cli import main as cli, verify, verify_cases\n"
    "verify.TOKENS, verify_cases.TIMED_CALLS = 16, 1\n"
    "sys.argv[1:] = {words!r}.split()\n"
    "sys.exit(cli.main())"
)


def complaints(err):
    """What stands on standard error, but for the word that an empty cache is being filled."""
    return [line for line in err.splitlines() if not line.startswith("compiling kernels")]


@pytest.mark.parametrize("words", [*WORDY, "verify --help"])
def test_reader_that_stops_reading(words, child):
    with child(QUICKLY.format(words=words), PYTHONUNBUFFERED="") as process:
        process.stdout.close()
        assert not complaints(process.stderr.read())
    assert process.returncode == 141


@pytest.mark.parametrize("words", [*WORDY, "verify --help"])
def test_output_that_cannot_be_written_is_one_line(words, child):
    with open("/dev/full", "w") as full:
        process = child(QUICKLY.format(words=words), stdout=full, PYTHONUNBUFFERED="")
    _, err = process.communicate()
    assert (process.returncode, complaints(err)) == (2, ["rope-cpu: standard output: No space left on device"])


@pytest.mark.parametrize("words", ["show --plot full.png", "verify --json full.png"])
def test_a_file_that_cannot_be_written_is_named_and_output_goes_on(words, child, tmp_path):
    (tmp_path / "full.png").symlink_to("/dev/full")
    program = QUICKLY.replace("sys.exit(cli.main())", "code = cli.main(sys.argv[1:]); print('after'); sys.exit(code)")
    out, err = child(f"import os; os.chdir({str(tmp_path)!r})\n" + program.format(words=words)).communicate()
    assert complaints(err) == ["rope-cpu: cannot write full.png: No space left on device"]
    assert out.endswith("after\n")


@pytest.mark.parametrize("words", ["bench --help", "export --help", "verify"])
def test_an_encoding_that_lacks_letters(words, child):
    process = child(QUICKLY.format(words=words), PYTHONIOENCODING="ascii")
    out, err = process.communicate()
    assert (process.returncode, complaints(err)) == (0, [])
    assert "?" in out


def test_python_runs_the_package(child):
    program = "import runpy, sys; sys.argv[1:] = ['--version']; runpy.run_module('rope_cpu', run_name='__main__')"
    assert child(program).communicate() == (f"rope-cpu {rope_cpu.__version__}\n", "")


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


@pytest.mark.parametrize("dtypes", ["int8", ["float32", "q"], [None, "complex64"]])
def test_warmup_refuses_other_dtypes(dtypes):
    with pytest.raises(TypeError, match="`dtypes` holds"):
        rope_cpu.warmup(dtypes)


def test_warmup_fills_an_empty_cache_once(tmp_path, child):
    cache = tmp_path / "cache"
    program = (
        "import json, rope_cpu\n"
        "made = rope_cpu.warmup(dtypes='float32')\n"
        "print(json.dumps([[m.name, m.compiled, str(m.cache)] for m in made]))"
    )

    def run():
        out, err = child(program, NUMBA_CACHE_DIR=str(cache)).communicate()
        assert out, err
        return json.loads(out)

    first, second = run(), run()
    assert all(compiled for _, compiled, _ in first)
    assert not any(compiled for _, compiled, _ in second)
    assert all(folder.startswith(str(cache)) for _, _, folder in first)
    assert len(list(cache.rglob("*.nbc"))) == len(first)
