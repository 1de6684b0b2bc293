"""Memory of large results: reused when nobody uses it, and never before."""

import gc
import os
import threading

import numpy as np
import pytest

import rope_cpu
from rope_cpu import launch
from rope_cpu.array_types import BSHD_VIEWS, DTYPES
from rope_cpu.launch import results
from rope_cpu.rotation import plan as plans

SMALL = 2**14  # bytes of the smallest large result in tests
ROPE = rope_cpu.RotaryEmbedding(64)
PLAN = ROPE.plan(np.arange(64))


@pytest.fixture
def few_bytes(monkeypatch):
    """Results are large from 16 KB on, at most 128 KB are kept, and nothing is kept at first."""
    for module in (results, plans, launch.append):
        monkeypatch.setattr(module, "LARGE", SMALL)
    monkeypatch.setattr(results, "_MOST_BYTES", 8 * SMALL)
    monkeypatch.setattr(results, "_kept", {})


def appended(q):
    batch = rope_cpu.Batch(seq_lens=[64], query_lens=[64], page_table=[[0]], page_size=64)
    cache = rope_cpu.KVCache.zeros(1, 64, 2, 64, dtype=q.dtype)
    plan = ROPE.plan(batch.cache_position, layout="thd")
    return plan.append(q[0], q[0, :, :2], q[0, :, :2], cache, batch)[None]


NORM = rope_cpu.RMSNorm(None)
CALLS = {
    "rope(q, k)": lambda x: ROPE(x, x)[0],
    "rope.rotate": ROPE.rotate,
    "plan(q, k)": lambda x: PLAN(x, x)[1],
    "plan.rotate": PLAN.rotate,
    "plan(q, k) with norms": lambda x: PLAN(x, x, q_norm=NORM, k_norm=NORM)[1],
    "plan.append": appended,
    "apply_rotary": lambda x: rope_cpu.apply_rotary(x, *ROPE.cos_sin(np.arange(64))),
    "shift": lambda x: ROPE.shift(x, 3),
    "copies": lambda x: PLAN.rotate(np.asfortranarray(x)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("few_bytes")
def test_memory_that_came_back_serves_the_next_result(call, dtype, rng):
    x = rng.standard_normal((1, 64, 4, 64)).astype(DTYPES[dtype])
    first = CALLS[call](x)
    expected = first.copy()
    places = {first.ctypes.data}
    del first
    for _ in range(3):
        result = CALLS[call](x)
        places.add(result.ctypes.data)
        assert result.tobytes() == expected.tobytes()
        assert result.flags.writeable
        assert result.ctypes.data % 64 == 0
        del result
    assert len(places) <= 2


PARTS = {
    "slice": lambda x: x[5:7],
    "view of a view": lambda x: x[5:7].reshape(2, -1)[1:, ::2].T,
    "other dtype": lambda x: x[5:7].view(np.int32),
    "memoryview": lambda x: memoryview(x)[5:7],
    "array of a memoryview": lambda x: np.asarray(memoryview(x)[5:7]),
    "buffer of a memoryview": lambda x: np.frombuffer(memoryview(x).cast("B")[512:1024]),
    "DLPack": lambda x: np.from_dlpack(x)[5:7],
    "subclass": lambda x: x[5:7].view(np.ma.MaskedArray),
    "base": lambda x: x[5:7].base,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.usefixtures("few_bytes")
def test_a_part_of_a_result_keeps_its_numbers(part):
    x = np.empty((64, 64), np.float32)
    results.new_like(x)
    result = results.new_like(x)
    result[...] = 1
    kept = PARTS[part](result)
    before = np.array(kept).tobytes()
    del result
    for value in range(2, 6):
        results.new_like(x)[...] = value
    assert np.array(kept).tobytes() == before


@pytest.mark.usefixtures("few_bytes")
def test_slices_keep_their_numbers_over_1000_calls_of_several_threads(rng):
    x = rng.standard_normal((1, 64, 8, 64)).astype(np.float32)
    right = []

    def rotate(factor):
        y = x * np.float32(factor)
        expected = PLAN.rotate(y, out=np.empty_like(y))
        kept = PLAN.rotate(y)[:, 7:9]
        cycle = []
        for _ in range(1000):
            result = PLAN.rotate(y)
            cycle = [cycle[-1:], result]
            cycle.append(cycle)  # a garbage collection gives it back
            right.append(np.array_equal(result[:, -1], expected[:, -1]))
        right.append(np.array_equal(kept, expected[:, 7:9]))

    workers = [threading.Thread(target=rotate, args=(factor,)) for factor in (1, 2, 4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    gc.collect()
    assert right == [True] * 3003
    assert 1 <= len(results._kept) <= 2


@pytest.mark.usefixtures("few_bytes")
def test_two_buffers_of_a_size_and_so_many_bytes_in_all_are_kept():
    def use(*sizes):
        arrays = [np.empty(int(size * SMALL) // 4, np.float32) for size in sizes]
        in_use = [results.new_like(x) for x in arrays]
        in_use.clear()
        return sorted(kept.nbytes // SMALL for kept in results._kept.values())

    assert use(1, 1, 1) == [1, 1]
    assert use(1.5) == [1, 1, 2]  # whole multiples, so that prompts of other lengths fit
    assert use(3) == [1, 1, 2, 3]
    assert use(8) == [8]
    assert use(5) == [5]  # the newest stays
    assert use(9) == [5]  # larger than all that is kept


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [*BSHD_VIEWS, "Fortran", "backwards"])
@pytest.mark.usefixtures("few_bytes")
def test_a_large_result_has_the_order_of_axes_of_numpy(layout, dtype):
    x = np.zeros((2, 8, 8, 64), DTYPES[dtype])
    views = {"Fortran": np.asfortranarray, "backwards": lambda x: x[::-1]}
    view = (BSHD_VIEWS | views)[layout](x)
    result = results.new_like(view)
    expected = np.empty_like(view)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert result.strides == expected.strides
    assert not result.flags.owndata


OTHERS = {
    "smaller": np.empty(SMALL - 1, np.uint8),
    "objects": np.empty(SMALL, object),
    "other byte order": np.empty(SMALL, ">f4"),
    "subclass": np.empty(SMALL, np.float32).view(np.recarray),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.usefixtures("few_bytes")
def test_other_arrays_are_those_of_numpy(name):
    x = OTHERS[name]
    result = results.new_like(x)
    assert (type(result), result.dtype, result.shape) == (type(x), x.dtype, x.shape)
    assert result.flags.owndata


@pytest.mark.usefixtures("few_bytes")
def test_without_memory_for_a_new_buffer_all_kept_ones_go(monkeypatch):
    def no_memory(size):
        raise MemoryError

    x = np.empty(SMALL, np.float32)
    results.new_like(x)
    assert results._kept
    monkeypatch.setattr(results, "_buffer", no_memory)
    assert results.new_like(x).flags.owndata
    assert not results._kept


PROGRAM = """
    import atexit, os
    # Before the imports, so that it runs after the handlers that they register.
    atexit.register(lambda: at_exit())
    import numpy as np
    from rope_cpu.launch.results import new_like
    x = np.empty((1024, 8192), np.float32)

    def filled(value):
        result = new_like(x)
        result[::64] = value
        return result
"""


def test_results_are_in_use_until_the_process_ends(run_program):
    """`weakref.finalize` would give back what lives when the interpreter ends."""
    after = """
    def at_exit():
        filled(2)
        print(kept[0, 0], np.unique(kept[::64]))

    kept = filled(1)
    """
    assert run_program(PROGRAM + after)[0].split() == ["1.0", "[1.]"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_parent_and_child_each_have_their_own_memory(run_program):
    after = """
    kept = filled(1)
    filled(2)
    pid = os.fork()
    for value in range(3, 6):
        filled(value if pid else -value)
    right = np.array_equal(np.unique(kept[::64]), [1])
    if not pid:
        os._exit(0 if right else 3)
    at_exit = list
    print(right, os.waitpid(pid, 0)[1])
    """
    assert run_program(PROGRAM + after)[0].split() == ["True", "0"]
