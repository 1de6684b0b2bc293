"""Python threads, fork, and the number of threads: each case that can kill a process runs in one of its own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import rope_cpu


def run(code, **variables):
    import os

    program = textwrap.dedent("""
        import os, sys, threading, types
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
    def shared():
        return np.array_equal(rope.rotate(x), expected) and _threads._pool_in_use.size == 2
    print(shared(), child(shared), child(lambda: child(shared) == 0))
    done = []
    thread = threading.Thread(target=lambda: done.append(child(shared)))
    thread.start(); thread.join()
    print(done[0])
    """
    )
    assert run(code, NUMBA_NUM_THREADS="2") == ["0", "True", "0", "0", "0"]


@pytest.mark.parametrize("way", ["rope.rotate(x)", "rope.plan(np.arange(64)).rotate(x)"])
def test_threads_start_with_the_first_job_that_is_worth_them(way):
    """Sixty-four tokens of 32 heads; one is not worth it on any processor."""
    code = f"""
    x = np.random.default_rng(0).standard_normal((1, 64, 32, 128)).astype(np.float32)
    small = rope.rotate(x[:, :1])
    print(_threads._pool_in_use)
    print(np.array_equal({way}[:, :1], small), _threads._pool_in_use.size)
    """
    assert run(code, NUMBA_NUM_THREADS="2") == ["None", "True", "2"]


def test_a_child_forked_while_numba_compiles():
    """LLVM's lock may be held for ever in the child: kernels that are compiled must not ask for it."""
    code = (
        FORK
        + """
    import numba, signal
    plan, few = rope.plan(np.arange(900)), x[:, :1]
    expected, short = plan.rotate(x), rope.rotate(few)
    def compile():
        while True:
            numba.njit(lambda x: x + 1)(1)
    threading.Thread(target=compile, daemon=True).start()
    def rotates():
        signal.alarm(10)
        other = rope_cpu.RotaryEmbedding.from_inv_freq(rope.inv_freq)
        return np.array_equal(plan.rotate(x), expected) and np.array_equal(other.rotate(few), short)
    print({child(rotates) for _ in range(10)}, flush=True)
    os._exit(0)
    """
    )
    assert run(code, NUMBA_NUM_THREADS="2") == ["{0}"]


@pytest.mark.parametrize("meanwhile", ["pass", "os.kill(os.getpid(), signal.SIGINT)"], ids=["quiet", "interrupted"])
def test_a_child_forked_while_a_thread_is_in_numba_compiles_kernels(meanwhile):
    code = (
        FORK
        + f"""
    import signal, time
    from numba.core.compiler_lock import global_compiler_lock
    held, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)
    def compile():
        with global_compiler_lock:
            held.set()
            forking.wait()
            time.sleep(0.1)
            {meanwhile}
            time.sleep(0.1)
    def rotates():
        signal.alarm(100)
        return rope.rotate(x).any()
    threading.Thread(target=compile).start()
    held.wait()
    print(child(rotates), not global_compiler_lock.is_locked(), rope.rotate(x).any())
    """
    )
    assert run(code) == ["0", "True", "True"]


def test_a_child_forked_while_another_thread_compiles_kernels(tmp_path):
    """Each waits for the other, in the order of their locks."""
    code = (
        FORK
        + """
    import signal
    def rotates():
        signal.alarm(100)
        return rope.rotate(x[:, :8].astype(float)).any()
    thread = threading.Thread(target=lambda: rope.rotate(x))
    thread.start()
    print({child(rotates) for _ in range(3)}, rope.rotate(x).any())
    thread.join()
    """
    )
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["{0}", "True"]


def test_a_first_rotation_within_numbas_compiler(tmp_path):
    """As where an overload of somebody's rotates, while another thread has its first rotation too."""
    code = """
    from numba.core.compiler_lock import global_compiler_lock
    held, meanwhile = threading.Event(), threading.Event()
    def within():
        with global_compiler_lock:
            held.set()
            meanwhile.wait(1)
            print(rope.rotate(x[:, :1]).any())
    def other():
        held.wait()
        print(rope.rotate(x[:, :1].astype(float)).any())
        meanwhile.set()
    threads = [threading.Thread(target=task, daemon=True) for task in (within, other)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(100)
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["True", "True"]


def test_an_interrupt_while_numba_is_imported(tmp_path):
    """The next rotation imports it as if nothing had been."""
    code = """
    import signal
    class Interrupt:
        def find_spec(self, name, *_):
            if name == "numba.core.dispatcher":
                sys.meta_path.remove(self)
                signal.raise_signal(signal.SIGINT)
    sys.meta_path.insert(0, Interrupt())
    for _ in range(2):
        try:
            print(rope.rotate(x).any())
        except KeyboardInterrupt:
            print("interrupted")
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["interrupted", "True"]


def test_an_interrupt_while_kernels_are_compiled(tmp_path):
    """It is raised, wherever it comes, and what is compiled next is."""
    code = """
    import signal
    from rope_cpu._kernels import codegen
    rope.rotate(x[:, :1])
    def interrupted(dtype, seconds):
        before = codegen._generator().create_library
        def library(name):
            signal.setitimer(signal.ITIMER_REAL, seconds)  # from when the module is written
            return before(name)
        codegen._generator().create_library = library
        try:
            rope.rotate(x[:, :1].astype(dtype))
        except TimeoutError:
            return True
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            codegen._generator().create_library = before
    def expire(*_):
        raise TimeoutError
    signal.signal(signal.SIGALRM, expire)
    print([interrupted(float, seconds) for seconds in (0.02, 0.1, 0.2, 0.3)].count(True) > 0)
    print(rope.rotate(x[:, :1].astype(float)).any())
    """
    assert run(code, NUMBA_CACHE_DIR=str(tmp_path)) == ["True", "True"]


def test_modules_loaded_anew():
    """Threads work on, by the addresses of what was there before."""
    code = """
    import importlib
    from rope_cpu._kernels import loading
    expected = rope.rotate(x)
    for module in (loading, _threads):
        importlib.reload(module)
        print(np.array_equal(rope.rotate(x), expected))
    print(np.array_equal(rope_cpu.RotaryEmbedding.from_inv_freq(rope.inv_freq).rotate(x), expected))
    """
    assert run(code, NUMBA_NUM_THREADS="2") == ["True"] * 3


def test_children_forked_by_several_threads_at_once():
    code = (
        FORK
        + """
    import numba, signal
    expected, codes = rope.rotate(x), []
    def rotates():
        signal.alarm(100)
        return np.array_equal(rope.rotate(x), expected)
    def fork():
        codes.extend(child(rotates) for _ in range(20))
    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    from rope_cpu._kernels import compiler
    from numba.core.compiler_lock import global_compiler_lock
    free = [lock.acquire(blocking=False) for lock in (compiler._at_work, global_compiler_lock._lock)]
    print(len(codes), set(codes), *free)
    """
    )
    assert run(code, NUMBA_NUM_THREADS="2") == ["80", "{0}", "True", "True"]


def test_a_child_forked_while_others_rotate():
    code = (
        FORK
        + """
    expected, stop = rope.rotate(x), []
    def work():
        while not stop:
            rope.rotate(x)
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads: thread.start()
    print({child(lambda: np.array_equal(rope.rotate(x), expected)) for _ in range(20)})
    stop.append(1)
    """
    )
    assert run(code, NUMBA_NUM_THREADS="2") == ["{0}"]


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


@pytest.mark.parametrize("threads", [2, 7])
def test_python_threads_rotate_at_a_time(threads):
    """More threads than processors as well: some are then interrupted in the middle of their work."""
    code = """
    expected = rope.rotate(x)
    wrong = []
    def work():
        for _ in range(200):
            if not np.array_equal(rope.rotate(x), expected):
                wrong.append(1)
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(len(wrong), _threads._pool_in_use.size)
    """
    assert run(code, NUMBA_NUM_THREADS=str(threads)) == ["0", str(threads)]


def test_work_is_done_by_the_caller_where_workers_never_come():
    code = """
    _threads.sharing.serving = lambda: types.SimpleNamespace(call=lambda *arguments: None)
    print(np.array_equal(rope.rotate(x), rope.rotate(x, out=x.copy())))
    rope_cpu.set_num_threads(1)
    alone = rope.rotate(x)
    rope_cpu.set_num_threads(2)
    print(np.array_equal(rope.rotate(x), alone), _threads._pool_in_use.size)
    """
    assert run(code, NUMBA_NUM_THREADS="2") == ["True", "True", "2"]


@pytest.mark.skipif(not hasattr(__import__("os"), "sched_setaffinity"), reason="Linux only")
def test_a_process_of_one_processor():
    code = """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    expected = rope.rotate(x[:, :1])
    for _ in range(50):
        assert np.array_equal(rope.rotate(x)[:, :1], expected)
    print("done")
    """
    assert run(code, NUMBA_NUM_THREADS="2") == ["done"]


def test_small_jobs_wake_workers_the_more_rarely_the_more_often_it_was_in_vain():
    """One core is enough: what is looked at is what a job decides, not what the worker makes of it."""
    code = """
    import time
    from rope_cpu import _rotate
    from rope_cpu._kernels import sharing
    _rotate.worth_a_thread = lambda *kind: 2**14
    small, pool = x[:, :16].repeat(4, axis=2), _threads.start(2)
    _threads._use(pool, 2)
    worker = pool.words[sharing.HEAD_WORDS + sharing.THREAD_WORDS:]
    plan = rope.plan(np.arange(16))
    for expected in (8, 16, 32, 64):
        while not worker[sharing.ASLEEP // 8]:
            time.sleep(0.001)
        jobs = 0
        while not jobs or not pool.words[sharing.WOKEN // 8]:
            plan.rotate(small, out=small)
            jobs += 1
        print(jobs == expected)
    """
    assert run(code, NUMBA_NUM_THREADS="2") == ["True"] * 4


@pytest.mark.parametrize("counted", ["words._COUNTED", ()], ids=["processor's clock", "system's clock"])
def test_small_jobs_are_shared_the_more_rarely_the_more_often_workers_came_late(counted, tmp_path):
    """Workers that never come are late: the 8th job is tried, and seven more, then the next 16th, 32nd and 64th."""
    code = f"""
    from rope_cpu import _rotate
    from rope_cpu._kernels import sharing, words
    words._COUNTED = {counted}
    _rotate.worth_a_thread = lambda *kind: 2**14
    small, plan = x[:, :16].repeat(4, axis=2), rope.plan(np.arange(16))
    def shared(pool, jobs):
        _threads._use(pool, 2)
        numbers = [0]
        for _ in range(jobs):
            plan.rotate(small, out=small)
            numbers.append(int(pool.words[sharing.NUMBER // 8]))
        return np.flatnonzero(np.diff(numbers))
    sharing.serving = lambda: types.SimpleNamespace(call=lambda *arguments: None)
    print(*shared(_threads.start(2), 250))
    """
    cache = {} if counted else {"NUMBA_CACHE_DIR": str(tmp_path)}  # kernels by another clock have no other name
    assert run(code, NUMBA_NUM_THREADS="2", **cache) == [str(first + i) for first in (7, 30, 69, 140) for i in range(8)]


def test_small_jobs_stay_shared_while_workers_are_in_time_but_for_one_in_64():
    code = """
    from rope_cpu import _rotate
    from rope_cpu._kernels import sharing
    _rotate.worth_a_thread = lambda *kind: 2**14
    sharing.serving = lambda: types.SimpleNamespace(call=lambda *arguments: None)
    small, plan, pool, alone = x[:, :16].repeat(4, axis=2), rope.plan(np.arange(16)), _threads.start(2), []
    _threads._use(pool, 2)
    for job in range(200):
        pool.words[sharing.TAKEN // 8], before = 2**60, pool.words[sharing.NUMBER // 8]
        plan.rotate(small, out=small)
        if pool.words[sharing.NUMBER // 8] == before:
            alone.append(job)
        if job == 20:
            pool.words[sharing.IN_VAIN // 8] = 5
    print(*alone, pool.words[sharing.CHANCES // 8], pool.words[sharing.IN_VAIN // 8])
    """
    # The eighth is tried; each 64th of those after it is done alone.
    assert run(code, NUMBA_NUM_THREADS="2") == [str(n) for n in (*range(7), 71, 135, 199, 16, 0)]


@pytest.mark.parametrize(("seconds", "looks"), [(0, 100_000), (2**-13, 819), (0.25, 100)])
def test_how_often_workers_look_before_they_sleep_is_measured(seconds, looks):
    """By this clock 2000 looks take so many seconds: as many as 50 µs hold, within bounds."""
    code = f"""
    import itertools
    _threads._machine.perf_counter = itertools.count(0, {seconds}).__next__
    print(_threads.start(2).words[_threads.sharing.LOOKS // 8])
    """
    assert run(code) == [str(looks)]


@pytest.mark.parametrize(("seconds", "elements"), [(0, 2**18), (2**-20, 82463), (2**-16, 5153), (0.25, 4096)])
def test_how_many_elements_are_worth_a_thread_is_measured(seconds, elements):
    """By this clock 65536 elements take so many seconds: as many as 1.2 µs are enough for, within bounds."""
    code = f"""
    import itertools
    from rope_cpu._kernels import units
    units._machine.perf_counter = itertools.count(0, {seconds}).__next__
    elements = units.worth_a_thread("bfloat16", "half")
    units._machine.perf_counter = None  # measured once
    assert units.worth_a_thread("bfloat16", "half") == elements
    print(elements)
    """
    assert run(code) == [str(elements)]


@pytest.mark.parametrize(("machine", "instruction"), [("x86_64", "rdtsc"), ("aarch64", "CNTVCT_EL0")])
def test_the_clock_is_an_instruction_on_other_processors_too(machine, instruction):
    """In a process of its own: what LLVM cannot assemble ends it."""
    code = f"""
    import llvmlite.binding as llvm
    from rope_cpu._kernels.words import _COUNTED
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    counter = "@llvm.readcyclecounter()"
    text = f"declare i64 {{counter}}\\ndefine i64 @f() {{{{ %r = call i64 {{counter}}\\n ret i64 %r }}}}"
    target = llvm.Target.from_triple("{machine}-unknown-linux-gnu").create_target_machine()
    module = llvm.parse_assembly(text)
    module.triple = "{machine}-unknown-linux-gnu"
    counted = "{instruction}" in target.emit_assembly(module) and len(target.emit_object(module)) > 0
    print(counted or "{machine}" not in _COUNTED)
    """
    assert run(code) == ["True"]


def test_jobs_of_every_size_on_more_threads_than_there_are():
    """Each unit of work is done once: the kernels here count units in place of rotating."""
    code = f"""
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from rope_cpu._kernels import sharing
    from rope_cpu._kernels.flow import each
    from small_kernels import kernel
    def add_to_each(job, start, stop):
        with each(start, stop) as unit:
            (job + unit * 8).add(1)
        return 0
    work, share = kernel(add_to_each).address, sharing.sharing().call
    for threads in (2, 3, 16):
        pool = _threads.start(threads)
        for units in [*range(2, 40), 1000]:
            for most in (2, 5, 100):
                for _ in range(5):
                    units_done = np.zeros(units, np.int64)
                    share(pool.address, work, units_done.ctypes.data, units, most)
                    assert (units_done == 1).all(), (threads, units, most, units_done)
    print("done")
    """
    assert run(code) == ["done"]


def test_a_system_that_allows_no_more_threads():
    code = """
    def refuse(self):
        raise RuntimeError("can't start new thread")
    start, threading.Thread.start = threading.Thread.start, refuse
    expected = rope.rotate(x[:, :1])
    print(np.array_equal(rope.rotate(x)[:, :1], expected), _threads._pool_in_use.size)
    """
    assert run(code, NUMBA_NUM_THREADS="3") == ["True", "1"]


def test_a_process_ends_while_its_threads_look_for_work():
    for _ in range(5):
        assert run("rope.rotate(x); print('end')", NUMBA_NUM_THREADS="2") == ["end"]


def test_the_environment_variable():
    assert run("print(rope_cpu.get_num_threads(), _threads.pool())", ROPE_CPU_NUM_THREADS="1") == ["1", "0"]


@pytest.mark.parametrize(("value", "threads"), [("1", "1"), ("2", "2"), ("100000", "2"), ("", "2")])
def test_the_environment_variable_says_how_many_at_most(value, threads):
    """An image that was built for a larger machine starts on a smaller one."""
    found = run("print(rope_cpu.get_num_threads())", ROPE_CPU_NUM_THREADS=value, NUMBA_NUM_THREADS="2")
    assert found == [threads]


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_wrong_environment_variable_is_named(value):
    with pytest.raises(AssertionError, match=f"ROPE_CPU_NUM_THREADS is '{value}'"):
        run("", ROPE_CPU_NUM_THREADS=value)


def test_set_num_threads():
    before = rope_cpu.get_num_threads()
    try:
        rope_cpu.set_num_threads(1)
        assert rope_cpu.get_num_threads() == 1
        assert rope_cpu._threads.pool() == 0
    finally:
        rope_cpu.set_num_threads(before)
    assert rope_cpu.get_num_threads() == before


def test_more_threads_after_fewer():
    code = """
    sizes = []
    for n in (2, 1, 3, 2, 3):
        rope_cpu.set_num_threads(n)
        rope.rotate(x)
        pool = _threads._pool_in_use
        sizes += [pool.size, int(pool.words[_threads.sharing.THREADS // 8])]
    print(*sizes)
    """
    assert run(code, NUMBA_NUM_THREADS="3") == ["2", "2", "2", "1", "3", "3", "3", "2", "3", "3"]


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
