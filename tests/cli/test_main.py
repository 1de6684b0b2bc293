import json
import os
import subprocess
import sys

import numpy as np
import pytest
from fewer_cases import sample
from safetensors_files import write_safetensors

import rope_cpu
from rope_cpu.cli import main as cli


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
    assert cli.COMMANDS[name].split()[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([], "rope-cpu"),
        (["shwo"], "rope-cpu"),
        (["--vers"], "rope-cpu"),
        (["warmup", "--cleared"], "rope-cpu warmup"),
        (["verify", "--jso", "x"], "rope-cpu verify"),
        (["show", "--interleaved", "--half"], "rope-cpu show"),
    ],
)
def test_argument_errors_point_to_the_help_of_their_command(argv, command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: {command} [-h]")
    assert err.endswith(f"; see `{command} --help`\n")


def test_usage_errors_point_to_the_help_of_their_command(capsys):
    assert cli.main(["show", "no/such/config.json"]) == 2
    assert capsys.readouterr().err.endswith("; see `rope-cpu show --help`\n")


def test_errors_of_output_files_do_not(tmp_path, capsys):
    assert cli.main(["verify", "--json", str(tmp_path)]) == 2
    assert "--help" not in capsys.readouterr().err


GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA |= {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}
DEFAULT = ", 'rope_type': 'default'}"
NO_TYPE = (
    "`--layer-type` selects layers whose rope parameters are "
    f"[{{'rope_theta': 10000.0{DEFAULT}, {{'rope_theta': 1000000.0{DEFAULT}]; it must select a "
    "layer that is rotated, or several alike (types: 'full_attention', 'sliding_attention')"
)
INT8 = "export -o a.onnx --layer-type full_attention --attention --cache-dtype int8 --target ort"


@pytest.mark.parametrize(
    ("words", "start"),
    [
        ("export -o a.onnx --layer-type x", "`--layer-type` is 'x'; it must select"),
        ("export -o a.onnx", f"{NO_TYPE}; or give --layer; see"),
        ("export -o a.onnx --attention", f"{NO_TYPE}; or give --layer; see"),
        ("bench --list --config", f"{NO_TYPE}; see"),
        ("export -o a.txt --layer-type full_attention", "`--output` is 'a.txt'"),
        ("export -o a.onnx --layer 34", "`--layer` is 34; it must be below 34"),
        ("export -o a.onnx --layer 0 --layer-type x", "`--layer` is 0; it must be left out"),
        ("export -o a.onnx --layer 0 --dtype float64", "`--dtype` is 'float64'; it must be one of"),
        (INT8, "`--cache-dtype` is 'int8'; it must be left out, as `cache` is 'growing'"),
        ("export -o a.onnx --layer 0 --inverse --attention", "`--inverse` is given; it must be"),
        ("export -o a.onnx --layer 0 --attention --weights no", "no: No such file or directory"),
        ("bench --threads 0 --config", "`--threads` is 0; it must be at least 1"),
    ],
)
def test_errors_of_the_library_name_options(words, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    assert cli.main([*words.split(), "config.json"]) == 2
    assert capsys.readouterr().err.startswith(f"rope-cpu: {start}")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_weights_that_do_not_fit_name_their_option(tmp_path, capsys):
    pytest.importorskip("onnx")
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    write_safetensors(tmp_path / "a.safetensors", {"a": np.zeros(3)})
    words = ["export", str(tmp_path), "-o", str(tmp_path / "a.onnx"), "--layer", "0", "--attention"]
    assert cli.main([*words, "--weights", str(tmp_path / "a.safetensors")]) == 2
    assert capsys.readouterr().err.startswith("rope-cpu: `--weights` holds 0 attention modules")


VARIABLES = {"ROPE_CPU_NUM_THREADS": "two", "NUMBA_THREADING_LAYER": "nope"}


@pytest.mark.parametrize(("name", "value"), VARIABLES.items())
def test_a_bad_variable_is_one_line(name, value, run_program, tmp_path):
    """Before the command runs: as `python -m`, and as pip's script."""
    script = tmp_path / "rope-cpu"
    script.write_text("import sys; from rope_cpu.cli.main import main; sys.exit(main())")
    for program in (["-m", "rope_cpu", "--version"], [str(script), "--version"]):
        done = subprocess.run(
            [sys.executable, *program],
            env=os.environ | {name: value},
            cwd=run_program.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"rope-cpu: {name} is {value!r}; it must be ")
        assert done.stderr.count("\n") == 1


def test_help_imports_no_extra(run_program):
    program = """
    import sys
    from rope_cpu.cli.main import main
    try: main(["--help"])
    except SystemExit: pass
    print({"onnx", "onnxruntime", "matplotlib", "torch"} & set(sys.modules))
    """
    assert run_program(program)[0].endswith("set()\n")


def complaints(err):
    """Return the lines of standard error that are about a failure.

    The others: an empty kernel cache is being filled, rows of verify, and onnxruntime's log, which
    warns users without a home directory.
    """
    notes = ("compiling kernels", "verified ", "[W:onnxruntime")
    return [line for line in err.splitlines() if not any(note in line for note in notes)]


WEIGHTS_OF_A_LAYER = "--attention --weights a.safetensors --layer 0 -o a.onnx"


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("onnx", "verify"),
        ("onnxruntime", "verify"),
        ("safetensors", f"export config.json {WEIGHTS_OF_A_LAYER}"),
    ],
)
def test_a_missing_extra_is_one_line(package, words, run_program, tmp_path):
    """It names the extra that holds all packages, not one extra after another."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    program = f"""
    import os
    import sys
    sys.modules[{package!r}] = None
    from rope_cpu.cli.main import main
    os.chdir({str(tmp_path)!r})
    sys.exit(main({words.split()!r}))
    """
    out, err = run_program(program, exits=2)
    install = 'pip install "rope-cpu[all]"'
    expected = f"rope-cpu: `{words.split()[0]}` needs the package {package}: {install}"
    assert (out, complaints(err)) == ("", [expected])


def test_a_defect_is_no_usage_error(monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "no_such_module", "x")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["no_such_module"])


WORDY = ["warmup float32", "show", "verify", "bench decode-8/float32 --no-peers"]
QUICKLY = (
    "import sys; from rope_cpu.cli import main as cli, verify\n"
    "verify.TOKENS = 16\n"
    "verify.DTYPES = {{'float32': verify.DTYPES['float32']}}\n"
    "verify.ATTENTION_DTYPES = ()\n"
    "sys.argv[1:] = {words!r}.split()\n"
    "sys.exit(cli.main())"
)


@pytest.mark.parametrize("words", sample((*WORDY, "verify --help"), "show"))
def test_reader_that_stops_reading(words, run_program):
    with run_program.start(QUICKLY.format(words=words), env={"PYTHONUNBUFFERED": ""}) as process:
        process.stdout.close()
        assert not complaints(process.stderr.read())
    assert process.returncode == 141


@pytest.mark.parametrize("words", sample((*WORDY, "verify --help"), "show"))
def test_output_that_cannot_be_written_is_one_line(words, run_program):
    with open("/dev/full", "w") as full:
        program = QUICKLY.format(words=words)
        _, err = run_program(program, stdout=full, env={"PYTHONUNBUFFERED": ""}, exits=2)
    assert complaints(err) == ["rope-cpu: standard output: No space left on device"]


@pytest.mark.parametrize(
    "words", sample(("show --plot full.png", "verify --json full.png"), "show --plot full.png")
)
def test_a_file_that_cannot_be_written_is_named_and_output_goes_on(words, run_program, tmp_path):
    (tmp_path / "full.png").symlink_to("/dev/full")
    program = QUICKLY.replace(
        "sys.exit(cli.main())", "code = cli.main(sys.argv[1:]); print('after'); sys.exit(code)"
    )
    settings = {
        "MPLCONFIGDIR": str(tmp_path)
    }  # without a home, matplotlib would complain on standard error
    out, err = run_program(program.format(words=words), cwd=tmp_path, env=settings, exits=2)
    assert complaints(err) == ["rope-cpu: cannot write full.png: No space left on device"]
    assert out.endswith("after\n")


@pytest.mark.parametrize("words", sample(("bench --help", "warmup --help"), "bench --help"))
def test_an_encoding_that_lacks_letters(words, run_program):
    out, err = run_program(QUICKLY.format(words=words), env={"PYTHONIOENCODING": "ascii"})
    assert not complaints(err)
    assert "?" in out
