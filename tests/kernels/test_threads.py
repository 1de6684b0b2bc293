"""Python threads, forks, the end of processes, and the number of threads.

Cases that can end a process run in processes of their own.
"""

import os
import textwrap
from importlib import metadata

import pytest
from fewer_cases import sample
from numba import config

import rope_cpu
from rope_cpu.kernels import threads

# Numba's threading layers.
HAS_TBB = pytest.mark.skipif(
    not any(package.name == "tbb" for package in metadata.distributions()),
    reason="there is no wheel of tbb here",
)
LAYERS = [
    pytest.param("tbb", marks=HAS_TBB),
    *sample(("omp",)),
    *sample(("workqueue",), others="nightly"),  # where neither of the others is found
]

LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")

START = """
    import multiprocessing, os, signal, sys, threading
    import numpy as np
    import numba, rope_cpu
    from rope_cpu.kernels import threads
    rope = rope_cpu.RotaryEmbedding(128)
    # Large enough for several threads.
    x = np.random.default_rng(0).standard_normal((1, 700, 8, 128)).astype(np.float32)

    def child(task):
        pid = os.fork()
        if pid == 0:
            signal.alarm(250)
            os._exit(0 if task() else 3)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def serial():
        parts = [rope.rotate(x[:, n : n + 100], offset=n) for n in range(0, 700, 100)]
        return np.concatenate(parts, axis=1)

    def right():
        return np.array_equal(rope.rotate(x), expected)

    def in_threads(count, task):
        found = []
        workers = [threading.Thread(target=lambda: found.append(task())) for _ in range(count)]
        for worker in workers: worker.start()
        for worker in workers: worker.join()
        return found
"""
WITHOUT_TBB = """
    import importlib.metadata
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)
    importlib.metadata.files = files
"""


@pytest.fixture
def run(run_program):
    """Run code after the preparations of START, on two threads; return the words it prints."""

    def run(code, layer=None, before="", **variables):
        program = textwrap.dedent(before) + textwrap.dedent(START) + textwrap.dedent(code)
        settings = {"NUMBA_NUM_THREADS": "2"} | ({"NUMBA_THREADING_LAYER": layer} if layer else {})
        return run_program(program, env=settings | variables)[0].split()

    return run


@pytest.fixture(params=LAYERS)
def layer(request):
    return request.param


SCENARIOS = {
    "python threads": (
        "all(all(results) for results in in_threads(6, lambda: [right() for _ in range(60)]))"
    ),
    "fork after a serial rotation": "child(right) == 0",
    "fork after a parallel rotation": "right() and child(right) == 0",
    "a child of a child": "right() and child(lambda: right() and child(right) == 0) == 0",
    "fork from a thread": "right() and in_threads(1, lambda: child(right)) == [0]",
    "forks from several threads": (
        "right() and in_threads(4, lambda: {child(right) for _ in range(5)}) == [{0}] * 4"
    ),
    "threads in a child": "right() and child(lambda: all(in_threads(4, right))) == 0",
    "a child that computes cos and sin": (
        "right() and child(lambda: rope.cos_sin(np.arange(9999))[0].any()) == 0"
    ),
    "a pool of forked processes": (
        "right() and all(multiprocessing.get_context('fork').Pool(2).map(job, range(8)))"
    ),
}


FEW = ("python threads", "fork after a parallel rotation", "a pool of forked processes")


@pytest.mark.parametrize("scenario", sample(SCENARIOS, *FEW))
def test_threads_and_forks_rotate_right(scenario, layer, run):
    code = f"""
    def job(_):
        return right()
    expected = serial()
    print(bool({SCENARIOS[scenario]}), numba.threading_layer(), flush=True)
    os._exit(0)  # pools of processes are left as they are
    """
    assert run(code, layer) == ["True", layer]


FIRST_KERNELS = {
    "cos and sin": """
    as_models_do = rope_cpu.RotaryEmbedding(128, angle_dtype="float32")
    def first():
        return as_models_do.cos_sin(np.arange(99_999))[0].any()
    """,
    "attention": """
    cache = rope_cpu.KVCache(*np.ones((2, 256, 16, 2, 64), np.float32))
    pages = [range(256)]
    batch = rope_cpu.Batch(seq_lens=[4096], query_lens=[256], page_table=pages, page_size=16)
    queries = np.ones((256, 8, 64), np.float32)
    def first():
        return rope_cpu.attention(queries, cache, batch).all()
    """,
}


@pytest.mark.processes
@pytest.mark.parametrize("kernel", FIRST_KERNELS)
def test_a_first_kernel_that_several_threads_start(kernel, layer, run):
    """Whether it may run in parallel is known only when it is there."""
    code = f"""
    {FIRST_KERNELS[kernel]}
    print(*in_threads(4, first))
    """
    assert run(code, layer) == ["True"] * 4


@pytest.mark.processes
def test_fork_before_the_first_rotation(layer, run):
    code = """
    expected = None
    rotates = lambda: rope.rotate(x).any()
    print(child(rotates), rotates(), child(rotates))
    """
    assert run(code, layer) == ["0", "True", "0"]


@pytest.mark.processes
def test_forks_while_others_rotate(layer, run):
    code = """
    expected, stop = serial(), []
    def work():
        while not stop:
            rope.rotate(x)
    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers: worker.start()
    print("", {child(right) for _ in range(10)})
    stop.append(1)
    """
    # Numba's TBB prints sentences about such forks, at any time and without an end of line.
    assert "{0}" in " ".join(run(code, layer))


@pytest.mark.processes
def test_a_child_compiles_after_openmp_was_started(tmp_path, run):
    code = f"""
    expected = serial()
    print(right())
    numba.config.CACHE_DIR = {str(tmp_path)!r}  # where nothing is compiled yet
    print(child(lambda: rope.rotate(x.astype(float)).any()))
    """
    assert run(code, "omp") == ["True", "0"]
    assert any(tmp_path.iterdir())


@pytest.mark.processes
def test_forks_amid_compilation(tmp_path, layer, run):
    """Children use the present kernels; only new compilation could wait for an orphaned lock."""
    code = f"""
    expected, done = serial(), threading.Event()
    print(right())
    numba.config.CACHE_DIR = {str(tmp_path)!r}  # where nothing is compiled yet
    def compile_another():
        rope.rotate(x.astype(float))
        done.set()
    compiling = threading.Thread(target=compile_another)
    compiling.start()
    statuses = set()
    while not done.wait(0.2):
        statuses.add(child(right))
    compiling.join()
    print("", statuses)
    """
    printed = " ".join(run(code, layer))  # with sentences of Numba's TBB, as above
    assert "True" in printed
    assert "{0}" in printed


@pytest.mark.processes
def test_a_pool_of_spawned_processes(tmp_path, layer, run_program):
    script = tmp_path / "spawned.py"
    script.write_text(
        "import multiprocessing, numpy as np, rope_cpu\n"
        "x = np.ones((1, 700, 8, 128), np.float32)\n"
        "def job(_):\n    return rope_cpu.RotaryEmbedding(128).rotate(x).tobytes()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(len({job(0), *pool.map(job, range(4))}))\n"
    )
    assert run_program(script, env={"NUMBA_THREADING_LAYER": layer})[0].split() == ["1"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        pytest.param("tbb", ["2", "2", "1"], marks=HAS_TBB),
        ("omp", ["2", "1", "1"]),
        ("workqueue", ["1", "1", "1"]),
    ],
)
def test_where_rotations_are_serial(layer, expected, run):
    """On workqueue, in children after OpenMP started, with TBB in children of threaded parents."""
    code = """
    usable = lambda: 1 if threads.serial else threads.limit
    print(usable(), rope.rotate(x).any(), usable(), flush=True)
    in_child = lambda: child(lambda: print(usable(), flush=True) or True)
    in_child(), in_threads(1, in_child)
    """
    found = [
        word for word in run(code, layer) if word in ("1", "2", "True")
    ]  # Numba's TBB prints a line after a fork
    assert found == ["2", "True", *expected]


@pytest.mark.processes
def test_the_number_of_threads_is_not_numbas(layer, run):
    """It holds in all Python threads, and neither changes Numba's nor suffers from it."""
    code = """
    expected, before = serial(), numba.get_num_threads()
    rope_cpu.set_num_threads(1)
    print(in_threads(2, rope_cpu.get_num_threads), numba.get_num_threads() == before, right())
    rope_cpu.set_num_threads(2)
    kept = in_threads(1, numba.get_num_threads) == [before]
    print(kept, right(), numba.get_num_threads() == before)
    numba.set_num_threads(1)
    print(right(), rope_cpu.get_num_threads(), numba.get_num_threads())
    """
    assert run(code, layer) == [
        "[1,",
        "1]",
        "True",
        "True",
        "True",
        "True",
        "True",
        "True",
        "2",
        "1",
    ]


@pytest.mark.processes
def test_without_tbb_openmp_is_used(run):
    code = "expected = serial()\nprint(right(), numba.threading_layer())"
    assert run(code, before=WITHOUT_TBB) == ["True", "omp"]


@HAS_TBB
def test_tbb_is_found(run):
    assert run("expected = serial()\nprint(right(), numba.threading_layer())") == ["True", "tbb"]


@pytest.mark.processes
@pytest.mark.parametrize("count", ["1", "3", "7", "64"])
def test_more_threads_than_cores_and_fewer(count, run):
    """Kernels of one cache serve any number."""
    code = (
        "expected = serial()\nprint(right(), rope_cpu.get_num_threads(), all(in_threads(3, right)))"
    )
    assert run(code, NUMBA_NUM_THREADS=count) == ["True", count, "True"]


@pytest.mark.processes
@LINUX
def test_a_process_of_one_processor(layer, run):
    code = """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    expected = serial()
    print(all(right() for _ in range(50)))
    """
    assert run(code, layer) == ["True"]


# Processes that end after a fork, a thread or a pool, whatever their CPUs.
PIN = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
END = """
    def rotate(_=None):
        return rope.rotate(x).tobytes()

    @numba.njit(parallel=True)
    def total(count):
        found = 0
        for n in numba.prange(count):
            found += n
        return found

    def in_thread(task):
        in_threads(1, task)

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
ENDING = {
    "warmup and fork": "rope_cpu.warmup(['float32']); fork(); rotate()",
    "thread": "in_thread(rotate)",
    "thread, and a function of the user": "in_thread(rotate); in_thread(lambda: total(100))",
    "thread and fork": "in_thread(rotate); fork(); rotate()",
    "fork from a thread": "rotate(); in_thread(fork); rotate()",
    "pool": "rotate(); pool()",
}


@pytest.fixture
def run_to_its_end(run):
    """Run code after the preparations of END; return the threading layer at the end."""

    def run_to_its_end(code, cpus, layer, **variables):
        before = f"import os\n{PIN}" if cpus == "one" else ""
        pinned = PIN if cpus == "pinned later" else ""
        program = f"{pinned}\n{textwrap.dedent(END)}\n{code}\nprint(layer())"
        return run(program, layer, before, **variables)[-1]

    return run_to_its_end


@LINUX
@pytest.mark.parametrize("cpus", sample(("two", "pinned later"), "two", others="nightly"))
@pytest.mark.parametrize("scenario", sample(ENDING, "warmup and fork", "thread and fork", "pool"))
def test_a_process_of_two_threads_ends(scenario, layer, cpus, run_to_its_end):
    assert run_to_its_end(ENDING[scenario], cpus, layer) == layer


@LINUX
@pytest.mark.processes
@pytest.mark.parametrize("scenario", ENDING)
def test_a_process_on_one_cpu_ends(scenario, run_to_its_end):
    """It loads no threading layer, unless functions of the user do so."""
    expected = "omp" if "user" in scenario else "none"
    assert run_to_its_end(ENDING[scenario], "one", "omp", NUMBA_NUM_THREADS=None) == expected


@LINUX
@pytest.mark.processes
@HAS_TBB
def test_tbb_that_a_user_loads_after_a_kernel_on_one_cpu(run_to_its_end):
    code = """
in_thread(rotate)
threads.PARALLEL = True
threads.load_tbb.__wrapped__()
in_thread(lambda: total(100))
"""
    assert run_to_its_end(code, "one", "tbb", NUMBA_NUM_THREADS=None) == "tbb"


NUMBERS = [("1", 1), ("2", 2), ("64", 2), ("", 2)]
# As OpenBLAS reads it: the first number counts, and a text without one is ignored.
OPENMP = [*NUMBERS, (" 1,2", 1), ("01", 1), ("9" * 5000, 2), ("0", 2), ("-1", 2), ("two", 2)]


@pytest.fixture
def limit_of(monkeypatch):
    """A function from variables of the environment to the number of threads, of two at most."""
    monkeypatch.setattr(threads, "MAX_THREADS", 2)

    def limit_of(**variables):
        for name in (threads.VARIABLE, "NUMBA_NUM_THREADS", "OMP_NUM_THREADS"):
            monkeypatch.setenv(name, variables.get(name, ""))
        return threads._limit_of_variables()

    return limit_of


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(threads.VARIABLE, *row) for row in NUMBERS] + [("OMP_NUM_THREADS", *row) for row in OPENMP],
)
def test_the_environment_sets_how_many_threads(name, value, expected, limit_of):
    assert limit_of(**{name: value}) == expected


def test_a_thread_that_reads_the_variables_late_undoes_nothing(run_program):
    program = """
        import threading
        import rope_cpu
        from rope_cpu.kernels import threads

        def read_slowly():
            threads._digits_of_variables = read
            is_reading.set()
            may_end.wait(0.3)
            return read()

        read = threads._digits_of_variables
        threads._digits_of_variables = read_slowly
        is_reading = threading.Event()
        may_end = threading.Event()
        reader = threading.Thread(target=rope_cpu.get_num_threads)
        reader.start()
        is_reading.wait()
        rope_cpu.set_num_threads(1)
        may_end.set()
        reader.join()
        print(rope_cpu.get_num_threads())
    """
    variables = {"NUMBA_NUM_THREADS": "2", "ROPE_CPU_NUM_THREADS": "2"}
    output, _ = run_program(textwrap.dedent(program), env=variables)
    assert output.split() == ["1"]


@pytest.mark.parametrize("first", [threads.VARIABLE, "NUMBA_NUM_THREADS"])
def test_other_variables_come_before_openmps(first, limit_of):
    assert limit_of(OMP_NUM_THREADS="1", **{first: "2"}) == 2


@pytest.mark.parametrize("value", ["0", "two", "-1", "1.5"])
def test_an_invalid_number_of_threads_is_named(value, limit_of):
    with pytest.raises(ValueError, match=f"ROPE_CPU_NUM_THREADS is {value!r}"):
        limit_of(ROPE_CPU_NUM_THREADS=value)


def test_an_unknown_threading_layer_is_named(run_program):
    program = "import rope_cpu; rope_cpu.RotaryEmbedding(8).cos_sin([1])"
    _, err = run_program(program, env={"NUMBA_THREADING_LAYER": "nope"}, exits=1)
    assert "ValueError: NUMBA_THREADING_LAYER is 'nope'; it must be one of default, safe" in err


@pytest.mark.parametrize("layer", ["omp", "OMP", "default", "safe", "threadsafe", "forksafe"])
def test_every_threading_layer_of_numba_is_accepted(layer, limit_of, monkeypatch):
    monkeypatch.setattr(config, "THREADING_LAYER", layer)
    assert limit_of() == 2


@pytest.mark.parametrize(("n", "rule"), [(0, "at least 1"), (10**6, "at most [0-9]+")])
def test_set_num_threads_refuses(n, rule):
    with pytest.raises(ValueError, match=f"`n` is {n}; it must be {rule}"):
        rope_cpu.set_num_threads(n)


def test_set_num_threads():
    before = rope_cpu.get_num_threads()
    try:
        rope_cpu.set_num_threads(1)
        assert rope_cpu.get_num_threads() == 1
    finally:
        rope_cpu.set_num_threads(before)
    assert rope_cpu.get_num_threads() == before


@pytest.mark.peers
def test_a_child_of_a_process_that_used_openmp_elsewhere(run):
    pytest.importorskip("torch")
    code = """
    import torch
    torch.set_num_threads(2)
    (torch.randn(1000, 1000) @ torch.randn(1000, 1000)).sum()
    print(child(lambda: rope.rotate(x).shape[1] == 700))
    """
    assert run(code) == ["0"]
