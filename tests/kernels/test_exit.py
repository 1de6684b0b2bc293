"""Processes end after a fork, a thread or a pool, whatever their CPUs and the threading layer."""

import os
import textwrap

import pytest
from fewer_cases import sample
from threading_layers import HAS_TBB, LAYERS

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")

START = """
    import multiprocessing, os, sys, threading
    import numpy as np

    def pin():
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    if CPUS == "one":
        pin()
    import numba, rope_cpu
    if CPUS == "pinned later":
        pin()
    rope = rope_cpu.RotaryEmbedding(128)
    # Large enough for several threads.
    x = np.random.default_rng(0).standard_normal((1, 700, 8, 128)).astype(np.float32)

    def rotate(_=None):
        return rope.rotate(x).tobytes()

    @numba.njit(parallel=True)
    def total(count):
        found = 0
        for n in numba.prange(count):
            found += n
        return found

    def in_thread(task):
        worker = threading.Thread(target=task)
        worker.start()
        worker.join()

    def fork():
        pid = os.fork()
        if pid == 0:
            rotate()
            sys.exit()  # the whole end of a process, unlike os._exit
        assert os.waitpid(pid, 0)[1] == 0

    def pool():
        with multiprocessing.get_context("fork").Pool(2) as workers:
            assert set(workers.map(rotate, range(4))) == {rotate()}

    def layer():
        try:
            return numba.threading_layer()
        except ValueError:
            return "none"
"""
SCENARIOS = {
    "warmup and fork": "rope_cpu.warmup(['float32']); fork(); rotate()",
    "thread": "in_thread(rotate)",
    "thread, and a function of the user": "in_thread(rotate); in_thread(lambda: total(100))",
    "thread and fork": "in_thread(rotate); fork(); rotate()",
    "fork from a thread": "rotate(); in_thread(fork); rotate()",
    "pool": "rotate(); pool()",
}


@pytest.fixture
def run(run_program):
    """Run code after the preparations of START; return the last word that it prints."""

    def run(code, cpus, **variables):
        program = f"CPUS = {cpus!r}\n" + textwrap.dedent(START) + f"{code}\nprint(layer())"
        return run_program(program, env=variables, timeout=120)[0].split()[-1]

    return run


@pytest.mark.parametrize("cpus", sample(("two", "pinned later"), "two", others="nightly"))
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "scenario", sample(SCENARIOS, "warmup and fork", "thread and fork", "pool")
)
def test_a_process_of_two_threads_ends(scenario, layer, cpus, run):
    variables = {"NUMBA_NUM_THREADS": "2", "NUMBA_THREADING_LAYER": layer}
    assert run(SCENARIOS[scenario], cpus, **variables) == layer


@pytest.mark.processes
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_process_on_one_cpu_ends(scenario, run):
    """It loads no threading layer, unless functions of the user do so."""
    expected = "omp" if "user" in scenario else "none"
    variables = {"NUMBA_NUM_THREADS": None, "NUMBA_THREADING_LAYER": "omp"}
    assert run(SCENARIOS[scenario], "one", **variables) == expected


@pytest.mark.processes
@HAS_TBB
def test_tbb_that_a_user_loads_after_a_kernel_on_one_cpu(run):
    code = """
from rope_cpu.kernels import threads
in_thread(rotate)
threads.PARALLEL = True
threads.load_tbb.__wrapped__()
in_thread(lambda: total(100))
"""
    assert run(code, "one", NUMBA_NUM_THREADS=None, NUMBA_THREADING_LAYER="tbb") == "tbb"
