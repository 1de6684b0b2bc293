"""Python threads, fork, and the number of threads: each case that can kill a process runs in one of its own."""

import subprocess
import sys
import textwrap

import numba
import pytest

import rope_cpu


def run(code, **variables):
    import os

    program = textwrap.dedent("""
        import os, sys, threading
        import numba
        import numpy as np
        import rope_cpu
        from rope_cpu import _threads
        rope = rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** -(np.arange(64) / 64))
        x = np.random.default_rng(0).standard_normal((1, 900, 8, 128)).astype(np.float32)
    """) + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=os.environ | variables
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


FORK = """
    def child(task):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if task() else 3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_a_forked_child_rotates_before_and_after_the_parent_did():
    code = (
        FORK
        + """
    print(child(lambda: rope.rotate(x).any()))
    expected = rope.rotate(x)
    print(_threads._usable > 1 or numba.config.NUMBA_NUM_THREADS == 1)
    print(child(lambda: np.array_equal(rope.rotate(x), expected)))
    print(child(lambda: child(lambda: np.array_equal(rope.rotate(x), expected)) == 0))
    done = []
    thread = threading.Thread(target=lambda: done.append(child(lambda: np.array_equal(rope.rotate(x), expected))))
    thread.start(); thread.join()
    print(done[0])
    """
    )
    assert run(code) == ["0", "True", "0", "0", "0"]


def test_a_pool_of_forked_processes():
    code = """
    import multiprocessing
    expected = rope.rotate(x)
    def job(i):
        return np.array_equal(rope.rotate(x), expected)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        print(all(pool.map(job, range(12))))
    """
    assert run(code) == ["True"]


@pytest.mark.parametrize("layer", ["omp", "workqueue"])
def test_python_threads_rotate_in_parallel_kernels_at_a_time(layer):
    code = """
    expected = rope.rotate(x)
    wrong = []
    def work():
        for _ in range(50):
            if not np.array_equal(rope.rotate(x), expected):
                wrong.append(1)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(len(wrong), _threads._usable)
    """
    wrong, usable = run(code, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="2")
    assert wrong == "0"
    assert usable == ("1" if layer == "workqueue" else "2")


def test_a_threading_layer_that_is_missing_means_serial():
    assert run("print(_threads.usable(), rope.rotate(x).shape[1])", NUMBA_THREADING_LAYER="tbb") in (
        ["1", "900"],
        [str(numba.config.NUMBA_NUM_THREADS), "900"],  # where tbb is installed
    )


def test_the_environment_variable():
    assert run("print(rope_cpu.get_num_threads(), _threads.usable())", ROPE_CPU_NUM_THREADS="1") == ["1", "1"]


@pytest.mark.parametrize("value", ["0", "many", "100000"])
def test_a_wrong_environment_variable_is_named(value):
    with pytest.raises(AssertionError, match=f"ROPE_CPU_NUM_THREADS is '{value}'"):
        run("", ROPE_CPU_NUM_THREADS=value)


def test_set_num_threads():
    before = rope_cpu.get_num_threads()
    try:
        rope_cpu.set_num_threads(1)
        assert rope_cpu.get_num_threads() == 1
        assert rope_cpu._threads.usable() == 1
    finally:
        rope_cpu.set_num_threads(before)
    assert rope_cpu.get_num_threads() == before


def test_a_launch_that_was_kept_waiting_means_serial_for_a_while(monkeypatch):
    from rope_cpu import _threads

    clock = iter([0.0, 0.010])  # 10 ms on the wall
    monkeypatch.setattr(_threads, "_usable", 2)
    monkeypatch.setattr(_threads, "_paused_until", 0.0)
    monkeypatch.setattr(_threads.time, "thread_time", iter([0.0, 0.0098, 0.0, 0.001]).__next__)
    monkeypatch.setattr(_threads.time, "perf_counter", clock.__next__)
    monkeypatch.setattr(_threads.time, "monotonic", lambda: 100.0)
    assert _threads.run(lambda x: x, 7) == 7  # it worked for 9.8 of them
    assert _threads.usable() == 2
    monkeypatch.setattr(_threads.time, "perf_counter", iter([0.0, 0.010]).__next__)
    _threads.run(lambda: 0)  # it worked for 1 of them
    assert _threads.usable() == 1
    monkeypatch.setattr(_threads.time, "monotonic", lambda: 100.2)
    assert _threads.usable() == 2


def test_kernels_are_cached_where_numba_is_told(tmp_path):
    assert run("print(rope.rotate(x).shape[1])", NUMBA_CACHE_DIR=str(tmp_path)) == ["900"]
    assert list(tmp_path.rglob("*.nbi"))


def test_a_broken_cache_is_named_and_done_without(tmp_path):
    run("rope.rotate(x)", NUMBA_CACHE_DIR=str(tmp_path))
    for file in tmp_path.rglob("*.nbi"):
        file.write_bytes(b"")
    code = """
    import warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shape = rope.rotate(x).shape
    texts = [str(warning.message) for warning in caught]
    print(shape[1], all("empty it, or name another in NUMBA_CACHE_DIR" in text for text in texts), len(texts) > 0)
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["900", "True", "True"]


def test_without_a_compiler_it_says_so():
    code = """
    try:
        rope.rotate(x)
    except RuntimeError as error:
        print("NUMBA_DISABLE_JIT" in str(error))
    """
    assert run(code, NUMBA_DISABLE_JIT="1") == ["True"]


@pytest.mark.peers
def test_a_child_of_a_process_that_used_openmp_elsewhere():
    pytest.importorskip("torch")
    code = (
        FORK
        + """
    import torch
    torch.set_num_threads(2)
    (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sum()
    print(child(lambda: rope.rotate(x).shape[1] == 900))
    """
    )
    assert run(code) == ["0"]
