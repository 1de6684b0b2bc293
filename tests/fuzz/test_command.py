"""`rope-cpu` with any arguments: exit status 0, 1 or 2, an error text, and no exception."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import time
from importlib import import_module
from pathlib import Path

import pytest
from control_characters import check_printed
from fuzz.mutations import LARGEST_NUMBER
from fuzz.test_configs import mutated
from hypothesis import strategies as st

from rope_cpu import set_num_threads
from rope_cpu.cli import main as cli
from rope_cpu.kernels import threads

LONGEST = 120.0  # seconds, of a machine that is shared
LONGEST_TEXT = 3000  # one error text, and usage before it

# Words of arguments, from which one is drawn.
NUMBER = ("0", "1", "-1", "2", "40", "1.5", "nan", "inf", "-inf", "1e400", "x", "", "1" * 5000)
WORD = ("", "x", "-", "--", "é", "\0", "*", "[", "full_attention", "float32", "-h", "--version")
FILE = ("{config}", "{config}", "{folder}", "{folder}/none.json", "{junk}", "", "/dev/null", "\0")
MODEL = "{folder}/out.onnx"
OUTPUT = (MODEL, MODEL, "{folder}/no/out.onnx", "{folder}", "{folder}/a.json", "")
PICTURE = ("{folder}/a.png", "{folder}/a.svg", "{folder}/a.txt", "{folder}", "", "a.PNG/x.png")
SETTING = ("window=none", "scale=2", "softcap=1e400", "sinks=none", "x", "=")
THREADS = ("1", "1,1", "0", "", "1,", "-1", "999", "x", "1" * 5000)
WORDS = st.sampled_from((*WORD, "q\n"))
FILES = st.sampled_from((*FILE, "x" * 5000))
# The values of some options; others follow from their type.
VALUES = {
    "json": st.sampled_from(OUTPUT),
    "output": st.sampled_from(OUTPUT),
    "plot": st.sampled_from(PICTURE),
    "set": st.sampled_from(SETTING),
    "threads": st.sampled_from(THREADS),
}
ARGUMENTS = {
    "show": FILES,
    "verify": FILES,
    "warmup": st.sampled_from(("float32", "float64", "x", "", "bfloat16")),
    "export": FILES,
    "check": FILES,
    # Without a case to time, as that takes seconds.
    "bench": st.sampled_from(("no such case", "[", "\0")),
}


def options(command):
    """Return the options of a command, each with the strategy of its value, None without one."""
    parser = argparse.ArgumentParser(add_help=False)
    import_module(f"rope_cpu.cli.{command}").add_arguments(parser)
    return {name: value(action) for action in parser._actions for name in action.option_strings}


def value(action):
    """Return the strategy of the value of an option."""
    if action.nargs == 0:
        return None
    if action.choices:
        return st.sampled_from((*action.choices, "x"))
    if action.type is int:
        return st.sampled_from((*NUMBER, str(LARGEST_NUMBER)))
    return VALUES.get(action.dest, FILES if action.type is Path else WORDS)


OPTIONS = {command: options(command) for command in ARGUMENTS}
OPTIONS["warmup"] = {}  # they empty the cache of kernels, and compile for minutes


@st.composite
def command_lines(draw):
    """Draw the arguments of a command."""
    commands = ("show", "show", "export", "export", "check", "bench", "warmup", "verify")
    command = draw(st.sampled_from(commands))
    words = [command]
    for _ in range(draw(st.integers(0, 4)) if OPTIONS[command] else 0):
        option = draw(st.sampled_from(tuple(OPTIONS[command])))
        strategy = OPTIONS[command][option]
        words += [option] if strategy is None else [option, draw(strategy)]
    if command == "export" and draw(st.booleans()):
        words += ["-o", "{folder}/out.onnx"]
    if command in ("bench", "verify") or draw(st.integers(0, 3)):
        words.append(draw(ARGUMENTS[command]))
    if draw(st.integers(0, 9)) == 0:
        words.insert(draw(st.integers(0, len(words))), draw(WORDS))
    return words


@pytest.fixture
def _same_threads(monkeypatch):
    monkeypatch.setattr(threads, "limit", threads.limit)


JUNK = st.sampled_from((b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'"x"'))


@pytest.mark.usefixtures("brief_verify", "_same_threads")
def test_command_lines(search, tmp_path):
    most = threads.limit

    def check(words, config, junk):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "junk").write_bytes(junk)
        names = {"config": tmp_path / "config.json", "folder": tmp_path, "junk": tmp_path / "junk"}
        argv = [word.format(**names) if word.startswith("{") else word for word in words]
        out = io.StringIO()
        err = io.StringIO()
        start = time.monotonic()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = cli.main(argv)
            except SystemExit as stop:
                status = stop.code
            finally:
                set_num_threads(most)
        seconds = time.monotonic() - start
        assert status in (0, 1, 2), status
        assert (status != 2) or err.getvalue().strip()
        assert "Traceback" not in err.getvalue()
        check_printed(out.getvalue() + err.getvalue())
        characters = len(err.getvalue())
        assert characters < LONGEST_TEXT + sum(map(len, argv)), f"{characters} in errors"
        assert seconds < LONGEST, f"took {seconds:.0f} s"

    llama = {"head_dim": 64, "num_attention_heads": 4, "model_type": "llama", "rope_theta": 1e4}
    junk = JUNK | st.binary(max_size=20)
    search(check, 40, words=command_lines(), config=mutated() | st.just(llama), junk=junk)
