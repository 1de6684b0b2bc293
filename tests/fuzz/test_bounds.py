"""The memory that no caller sees, for every kind of shape once.

`kernels/angles.py` indexes arrays, and Numba's bounds checks see its indices. They do not see
pointers: the slots and norms of `kernels/append.py`, and the pages, items, sinks, states and
scratch memory of `kernels/attention.py`, end at an untouchable page here, as arguments do in
`test_guarded.py`.
"""

from __future__ import annotations

import signal
import sys

import pytest
from fuzz.placed import can_guard
from fuzz.test_guarded import environment

pytestmark = pytest.mark.processes

guards = pytest.mark.skipif(not can_guard(), reason="there is no mprotect")

# The exit status of a process that touches an untouchable page.
DIES = -(signal.SIGBUS if sys.platform == "darwin" else signal.SIGSEGV)

EVERY_SHAPE = """
from itertools import product
import numpy as np
from rope_cpu.kernels.angles import cos_sin_kernel, cos_sin_part
from rope_cpu.kernels.compile import address_of

SIZES = [*product((1, 2, 3), (0, 1, 5), (1, 2, 3), (1, 2), (1, 3, 4, 8, 33)), (2, 301, 2, 2, 33)]
for name in ("float32", "float64"):
    kernel = cos_sin_kernel(name)
    part = address_of(cos_sin_part(name))
    for batch, tokens, axes, heads, pairs in SIZES:
        for given, coordinates, rows in product({1, batch}, {1, axes}, {1, batch}):
            positions = np.zeros((given, tokens, coordinates))
            frequencies, factors = np.ones((rows, 2, axes, heads, pairs)), np.ones((rows, 2))
            cos, sin = np.full((2, batch, tokens, heads, pairs), np.nan, name)
            kernel(part, positions, frequencies, factors, cos, sin, 2)
            assert (cos == 1).all() and (sin == 0).all()
"""
GUARDED = """
import numpy as np
from fuzz.placed import GuardedMemory

memory = GuardedMemory(0)


def guarded(x):
    copy = memory.array(x.shape, x.dtype)
    copy[...] = x
    return copy
"""
EVERY_APPEND = (
    GUARDED
    + """
from itertools import product
from rope_cpu.array_types import CACHE_KINDS
from rope_cpu.kernels.append import append_kernel, append_part
from rope_cpu.kernels.compile import address_of

kernel = append_kernel("float32", CACHE_KINDS["int8"])
part = address_of(append_part("float32", CACHE_KINDS["int8"], "half"))
SIZES = [
    *product((1, 2), (1, 3), ((2, 1, 1), (4, 2, 2)), ((2, 1), (9, 8), (66, 64), (80, 70)), (1, 4)),
    (1, 1500, (4, 2, 2), (33, 33), 16),
    (2, 3, (1, 1, 400), (64, 64), 4),
]
for batch, tokens, heads, (width, value_width), page_size in SIZES:
    count = batch * tokens
    q, k, v = (
        np.ones((batch, tokens, number, size), np.float32)
        for number, size in zip(heads, (width, width, value_width))
    )
    pages = -(-count // page_size)
    slots = guarded(np.arange(count)[::-1].reshape(batch, tokens))
    pairs = width // 2
    cos_sin = np.zeros((2, 1, tokens, 1, pairs), np.float32)
    cos_sin[0] = 1
    every_norm = guarded(np.ones({norms}, np.float32))
    for norms, threads in product((np.zeros((0, 0), np.float32), every_norm), (1, 2)):
        key, value = (np.zeros((pages, page_size, *x.shape[2:]), np.int8) for x in (k, v))
        scales = [np.zeros((*x.shape[:3], 1), np.float32) for x in (key, value)]
        out = np.zeros_like(q)
        numbers = guarded(np.array([part, width, 2 * pairs, 2**25, pairs]))
        done = kernel(
            numbers, q, k, v, out, key, value, *scales, slots, cos_sin, norms, threads
        )
        assert done
        for array, number in ((key, 127), (value, 127), (scales[0], 0.001), (scales[1], 0.001)):
            assert (array.reshape(-1, *array.shape[2:])[:count] >= number).all()
            assert (array.reshape(-1, *array.shape[2:])[count:] == 0).all()
"""
)
EVERY_ATTENTION = (
    GUARDED
    + """
from itertools import product
from rope_cpu.kernels import threads
from rope_cpu.launch import attention as module
from launch import test_cache_kinds
from launch.attending import Call, Options

module._PARALLEL_FROM = 0
Step = module.Step


def guarded_step(states, **fields):
    names = ("pages", "items", "first_states", "sinks", "scratch")
    fields |= {{name: guarded(fields[name]) for name in names}}
    return Step(states=guarded(states[{fewer}:]), **fields)


module.Step = guarded_step
EVERY_OPTION = Options(window=255, softcap=5.0, sinks=np.zeros(10))
random = np.random.default_rng(0)
for new, widths, options, threads.limit in product(
    ((1, 8), (9, 17)), ((1, 33), (80, 14), (66, 64)), (Options(), EVERY_OPTION), (1, 2)
):
    call = Call(
        random, "float32", (258, 520), new, 16, heads=(2, 5), widths=widths, options=options
    )
    call.check(call.run())
for seed in range(10):
    random = np.random.default_rng(seed)
    step = test_cache_kinds.Step(random, "int8-int4-hadamard")
    step.check_attention(random, step.append())
"""
)
WRONG_SHAPE = """
import numpy as np
from rope_cpu.kernels.angles import cos_sin_kernel, cos_sin_part
from rope_cpu.kernels.compile import address_of

positions = np.zeros((1, 1, 1))
frequencies = np.ones((1, 2, 1, 1, 64))
cos, sin = np.zeros((2, 1, {tokens}, 1, 64))
part = address_of(cos_sin_part("float64"))
cos_sin_kernel("float64")(part, positions, frequencies, np.ones((1, 2)), cos, sin, 2)
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """The variables of a process whose kernels check bounds, compiled for this module alone."""
    folder = tmp_path_factory.mktemp("kernels")
    return environment() | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder)}


def test_kernels_stay_within_their_arrays(run_program, checked):
    _, err = run_program(EVERY_SHAPE, env=checked)
    assert "IndexError" not in err


@guards
def test_append_stays_within_its_arrays(run_program):
    norms = "(3, max(width, value_width) + 1)"
    run_program(EVERY_APPEND.format(norms=norms), env=environment())


@guards
def test_norms_are_guarded(run_program):
    """Norms without eps are noticed: so the test above can fail."""
    norms = "(3, max(width, value_width))"
    run_program(EVERY_APPEND.format(norms=norms), env=environment(), exits=DIES)


@guards
def test_attention_stays_within_its_arrays(run_program):
    run_program(EVERY_ATTENTION.format(fewer=0), env=environment())


@guards
def test_states_are_guarded(run_program):
    """A state too few is noticed: so the test above can fail."""
    run_program(EVERY_ATTENTION.format(fewer=1), env=environment(), exits=DIES)


@pytest.mark.parametrize("tokens", [5, 512], ids=["serially", "in parallel"])
def test_bounds_are_checked(run_program, checked, tokens):
    """Too few positions are noticed: so the first test can fail.

    In every part, as what is raised in another thread than Python's is lost.
    """
    _, err = run_program(WRONG_SHAPE.format(tokens=tokens), env=checked, exits=1)
    assert "IndexError" in err
