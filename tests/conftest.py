import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

DTYPES = {name: np.dtype(name) for name in ("float32", "float64", "float16")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}


@pytest.fixture
def rng():
    return np.random.default_rng(20240229)


@pytest.fixture(params=DTYPES)
def dtype(request):
    return DTYPES[request.param]


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request):
    return request.param


class ProgramRunner:
    """Python programs in processes of their own, away from the source tree, with the package that is under test."""

    def __init__(self, folder):
        self.folder = folder

    def start(self, program, *options, env=None, cwd=None, stdout=subprocess.PIPE):
        """Return the running process of a program: its text, or the path of a script.

        options: of the interpreter. env: changes to the environment, None unsets a variable. cwd: by default a folder
        that holds nothing.
        """
        variables = {name: value for name, value in (os.environ | (env or {})).items() if value is not None}
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
        """Run a program to its end, which must be the exit status `exits`; return its stdout and stderr."""
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
