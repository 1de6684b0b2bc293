"""The command line: the demo, and arguments that are refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from rope_server.__main__ import main
from servers import Running


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the package as it is installed, built in a copy of the sources."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(Path(__file__).parents[1], source, ignore=ignored)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True)
    with zipfile.ZipFile(*folder.glob("*.whl")) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_demo(installed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.chdir(installed.parent)
    code = "import rope_server; print(rope_server.__file__)"
    place = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert place.stdout.startswith(str(installed))
    running = Running("--demo", "--pages", "32")
    try:
        assert running.complete("In the beginning", max_tokens=3).usage.completion_tokens == 3
    finally:
        running.end()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "folder --demo is required"),
        (["--demo", "--chunk", "0"], "chunk is 0"),
        (["--demo", "--cache-dtype", "float64"], "'float64'"),
        (["no-such-folder"], "no-such-folder/config.json"),
    ],
)
def test_refused_arguments(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rope_server", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert words in capsys.readouterr().err
