"""Under a limit of memory a call is right in full, or raises MemoryError with nothing written."""

import sys

import pytest
from fewer_cases import sample

from rope_cpu.kernels import compile as compiling
from rope_cpu.kernels.angles import cos_sin_kernel

PROGRAM = """
    import resource
    import numpy as np, rope_cpu

    HEADS, WIDTH = 1024, 128
    rng = np.random.default_rng({seed})
    rope = rope_cpu.RotaryEmbedding(WIDTH)

    def used_memory():
        return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

    class Append:
        # Two tokens, whose scratch memory is that of 1024 heads.
        def __init__(self, dtype):
            q, k, v = rng.standard_normal((3, 2, HEADS, WIDTH), np.float32)
            self.cache = rope_cpu.KVCache.zeros(1, 2, HEADS, WIDTH, dtype=dtype)
            batch = rope_cpu.Batch(seq_lens=[2], query_lens=[2], page_table=[[0]], page_size=2)
            plan = rope.plan(batch.cache_position, layout="thd")
            norm = rope_cpu.RMSNorm(None)
            self.call = lambda out: plan.append(q, k, v, self.cache, batch, q_norm=norm, out=out)

        def written(self):
            return [x for x in (self.cache.key, self.cache.value) if x is not None]

    class Attention:
        # Two tokens, which need scratch memory for the keys of 512 heads each.
        def __init__(self, dtype):
            q = rng.standard_normal((2, HEADS, WIDTH), np.float32)
            cache = rope_cpu.KVCache.zeros(1, 32, 2, WIDTH, dtype=dtype)
            cache.key[...] = rng.integers(-3, 4, cache.key.shape)
            cache.value[...] = rng.integers(-3, 4, cache.value.shape)
            if dtype == np.int8:
                cache.key_scale[...] = cache.value_scale[...] = 0.1
            batch = rope_cpu.Batch(seq_lens=[32], query_lens=[2], page_table=[[0]], page_size=32)
            self.call = lambda out: rope_cpu.attention(q, cache, batch, out=out)

        def written(self):
            return []

    def outcome(case, out, memory):
        try:
            resource.setrlimit(resource.RLIMIT_AS, (used_memory() + memory, -1))
            return case.call(out)
        except MemoryError:
            return None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))

    counts = dict.fromkeys(["right", "raised"], 0)
    for dtype in (np.float32, np.int8):
        case = {kind}(dtype)
        before = [x.copy() for x in case.written()]
        expected = case.call(None)
        after = [x.copy() for x in case.written()]
        for _ in range(250):
            for x, old in zip(case.written(), before):
                x[...] = old
            out = np.zeros_like(expected) if rng.integers(2) else None
            result = outcome(case, out, int(rng.integers(2**17, 2**23)))
            counts["raised" if result is None else "right"] += 1
            if result is None:
                assert out is None or not out.any()
            else:
                np.testing.assert_array_equal(result, expected)
            for x, y in zip(case.written(), before if result is None else after):
                np.testing.assert_array_equal(x, y)
    print(*counts.values())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
@pytest.mark.parametrize("kind", sample(("Append", "Attention"), "Attention"))
@pytest.mark.parametrize("threads", sample(("1", "2"), "2", others="nightly"))
def test_a_call_is_right_or_writes_nothing(kind, threads, run_program, request):
    """500 calls, some of which lack the memory for their results or for that of the kernel.

    With MALLOC_MMAP_THRESHOLD_, malloc takes no large array from the memory that it has kept.
    NUMBA_NUM_THREADS allows two threads where this process may use one core.
    """
    program = PROGRAM.format(kind=kind, seed=request.config.option.seed)
    environment = {"NUMBA_NUM_THREADS": threads, "MALLOC_MMAP_THRESHOLD_": "65536"}
    right, raised = run_program(program, env=environment)[0].split()
    assert int(right) > 0
    assert int(raised) > 0


def test_a_compilation_without_memory_blames_no_cache(monkeypatch):
    def lack(dispatcher):
        raise MemoryError

    monkeypatch.setattr(compiling, "_enable_cache", lack)
    with pytest.raises(MemoryError):
        cos_sin_kernel.__wrapped__("float32")
