"""Calls beside untouchable memory: a byte read or written past an array ends the process.

The calls run in their own process (`guarded.py`), so a crash is a failure with the call and seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.guarded import EXAMPLES, KINDS
from fuzz.placed import can_guard

import rope_cpu

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not can_guard(), reason="there is no mprotect"),
]

# As many threads as arrays are shared out among, whatever the machine has.
THREADS = "4"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sizes", "examples"), [("small", 30), ("large", 4)])
def test_nothing_is_touched_past_an_array(search, kind, sizes, examples):
    def run_round(number):
        # The search goes on within one process, as most of a short one's time is its start.
        wanted = examples * (10 if search.seconds else 1)
        *called, last = run_module("fuzz.guarded", number, wanted, kind, sizes)
        assert last.startswith(EXAMPLES)
        return len(called)

    search.rounds(run_round)


def run_module(name, *arguments):
    """Run a module as a program, which must not fail, and return the lines that it prints."""
    program = [sys.executable, "-m", name, *map(str, arguments)]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=1800)
    lines = done.stdout.splitlines() or [""]
    status = f"exit status {done.returncode} in {lines[-1]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, status
    return lines


def environment():
    """Return the environment of a process that finds this folder and the tested library."""
    here, library = Path(__file__).parents[1], Path(rope_cpu.__file__).parents[1]
    paths = [str(here), str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NUMBA_NUM_THREADS": THREADS}


def test_memory_past_an_array_cannot_be_touched():
    """Reads and writes a byte before and behind: so this suite can fail."""
    program = (
        "import sys; import numpy as np; from fuzz.placed import *\n"
        "x = GuardedMemory(0).array((1, 1, 1, 16), np.dtype(np.float32), Place(at_end={at_end}))\n"
        "far = np.lib.stride_tricks.as_strided(x, (2,), ({step},))\n"
        "print(far[0], flush=True)\n"
        "{action}"
    )
    for at_end, step in ((True, 64), (False, -4)):
        for action in ("far[1] = 0", "print(far[1])"):
            text = program.format(at_end=at_end, step=step, action=action)
            done = subprocess.run(
                [sys.executable, "-c", text], env=environment(), capture_output=True, text=True
            )
            assert done.returncode < 0, done.stderr
            assert len(done.stdout.split()) == 1
