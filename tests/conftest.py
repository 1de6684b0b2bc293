import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings


def can_be_written(folder):
    """Whether a folder, or the nearest one that it would be made in, may be written to."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)


def kernel_cache():
    """Return a new folder for the kernel cache where the usual one cannot be written, else None.

    There the package warns that every process compiles its kernels, and warnings are errors here.
    """
    # Unlike Path.expanduser, this leaves "~" where the user has no home in any record.
    user = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if os.environ.get("NUMBA_CACHE_DIR") or can_be_written(user / "rope_cpu"):
        return None
    return tempfile.mkdtemp(prefix="rope_cpu-kernels-")


# Numba reads the variable when it is imported. Programs that tests run and workers of pytest-xdist
# inherit it; the process that made the folder removes it.
KERNEL_CACHE = kernel_cache()
if KERNEL_CACHE:
    os.environ["NUMBA_CACHE_DIR"] = KERNEL_CACHE

from rope_cpu.array_types import CACHE_FORMATS, DTYPES  # noqa: E402
from rope_cpu.warmup import compile_kernels, kernel_builds  # noqa: E402

# Examples of earlier runs are not drawn again, and no test fails because a machine is slow.
settings.register_profile(
    "tests", database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def seed_number(text):
    """Return the number given as --seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def pytest_addoption(parser):
    parser.addoption(
        "--seed", type=seed_number, default=0, help="Seed of every random draw of the tests (0)."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.option.seed)


def pytest_ignore_collect(collection_path, config):
    """Import the tests beside other libraries only if -m asks for them, or for all tests.

    To import transformers and diffusers takes a minute where they are installed.
    """
    name, chosen = collection_path.name, config.option.markexpr
    left_out = chosen and (name not in chosen or f"not {name}" in chosen)
    return True if name in ("peers", "runtimes") and left_out else None


def pytest_collection_finish(session):
    """Let each worker of pytest-xdist compile its share of the kernels that all rotations need.

    Tests of launch need those of caches, too. Otherwise workers whose tests need the same kernel at
    the same time would both compile it.
    """
    worker = getattr(session.config, "workerinput", None)
    folders = {item.path.parent.name for item in session.items}
    if worker and "rotation" in folders:
        builds = kernel_builds(tuple(DTYPES), tuple(CACHE_FORMATS) if "launch" in folders else ())
        first = int(worker["workerid"].removeprefix("gw"))
        list(compile_kernels(builds[first :: worker["workercount"]]))


def pytest_unconfigure():
    if KERNEL_CACHE:
        shutil.rmtree(KERNEL_CACHE, ignore_errors=True)


def pytest_report_header(config):
    return f"draws: --seed={config.option.seed}"


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    if exitstatus == pytest.ExitCode.TESTS_FAILED:  # -q hides the header
        terminalreporter.write_line(pytest_report_header(config))


@pytest.fixture
def rng(request):
    """Draws of this test alone, from --seed and its own name: the same in any order and company."""
    name = zlib.crc32(request.node.nodeid.encode())
    return np.random.default_rng([request.config.option.seed, name])


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture
def brief_verify(monkeypatch):
    """Let `rope-cpu verify` verify float32 alone, with a short prefill."""
    from rope_cpu.cli import verify

    monkeypatch.setattr(verify, "TOKENS", 16)
    monkeypatch.setattr(verify, "DTYPES", {"float32": verify.DTYPES["float32"]})
    monkeypatch.setattr(verify, "ATTENTION_DTYPES", ("float32",))


class ProgramRunner:
    """Programs in their own processes, away from the source tree, with the tested package."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, program, *options, env=None, cwd=None, stdout=subprocess.PIPE):
        """Return the running process of a program: its text, or the path of a script.

        options: of the interpreter. env: changes to the environment; None unsets a variable.
        cwd: by default an empty folder.
        """
        variables = {
            name: value for name, value in (os.environ | (env or {})).items() if value is not None
        }
        given = [program] if isinstance(program, Path) else ["-c", textwrap.dedent(program)]
        return subprocess.Popen(
            [sys.executable, *options, *given],
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            cwd=cwd or self.folder,
        )

    def __call__(self, program, *options, exits=0, timeout=300, **where):
        """Run a program, which must end with status `exits`; return its stdout and stderr."""
        with self.start(program, *options, **where) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == exits, err
        return out, err


@pytest.fixture(scope="session")
def run_program(tmp_path_factory):
    return ProgramRunner(tmp_path_factory.mktemp("empty"))
