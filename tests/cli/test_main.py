import pytest

import rope_cpu
from rope_cpu.cli import main as cli


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
    assert cli.COMMANDS[name][1].split()[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv", [[], ["nope"], ["warmup", "int8"], ["verify", "a", "b"], ["verify", "--jso", "x"]]
)
def test_bad_arguments_exit_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "rope-cpu" in capsys.readouterr().err


def test_help_imports_no_extra(run_program):
    program = """
    import sys
    from rope_cpu.cli.main import main
    try: main(["--help"])
    except SystemExit: pass
    print({"onnx", "onnxruntime", "rich", "matplotlib", "torch"} & set(sys.modules))
    """
    assert run_program(program)[0].endswith("set()\n")


def complaints(err):
    """Return the lines of standard error that are about a failure.

    The others: an empty kernel cache is being filled, and onnxruntime's log, which warns users
    without a home directory.
    """
    notes = ("compiling kernels", "[W:onnxruntime")
    return [line for line in err.splitlines() if not any(note in line for note in notes)]


@pytest.mark.parametrize(
    ("package", "extra"), [("rich", "cli"), ("onnx", "onnx"), ("onnxruntime", "onnx")]
)
def test_a_missing_extra_is_one_line(package, extra, run_program):
    program = f"""
    import sys
    sys.modules[{package!r}] = None
    from rope_cpu.cli.main import main
    sys.exit(main(["verify"]))
    """
    out, err = run_program(program, exits=2)
    expected = f'rope-cpu: `verify` needs the package {package}: pip install "rope-cpu[{extra}]"'
    assert (out, complaints(err)) == ("", [expected])


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


@pytest.mark.parametrize("words", [*WORDY, "verify --help"])
def test_reader_that_stops_reading(words, run_program):
    with run_program.start(QUICKLY.format(words=words), env={"PYTHONUNBUFFERED": ""}) as process:
        process.stdout.close()
        assert not complaints(process.stderr.read())
    assert process.returncode == 141


@pytest.mark.parametrize("words", [*WORDY, "verify --help"])
def test_output_that_cannot_be_written_is_one_line(words, run_program):
    with open("/dev/full", "w") as full:
        program = QUICKLY.format(words=words)
        _, err = run_program(program, stdout=full, env={"PYTHONUNBUFFERED": ""}, exits=2)
    assert complaints(err) == ["rope-cpu: standard output: No space left on device"]


@pytest.mark.parametrize("words", ["show --plot full.png", "verify --json full.png"])
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


@pytest.mark.parametrize("words", ["bench --help", "export --help", "verify"])
def test_an_encoding_that_lacks_letters(words, run_program):
    out, err = run_program(QUICKLY.format(words=words), env={"PYTHONIOENCODING": "ascii"})
    assert not complaints(err)
    assert "?" in out


def test_python_runs_the_package(run_program):
    program = """
    import runpy, sys
    sys.argv[1:] = ["--version"]
    runpy.run_module("rope_cpu", run_name="__main__")
    """
    assert run_program(program) == (f"rope-cpu {rope_cpu.__version__}\n", "")
