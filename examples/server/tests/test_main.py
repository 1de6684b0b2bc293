"""The command line: the demo, and arguments that are refused."""

from __future__ import annotations

import sys

import pytest
from rope_server.__main__ import main
from servers import Running


def test_demo():
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
