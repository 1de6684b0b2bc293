"""Kernels by themselves: the same bits whatever the threads, layout and strides; every conversion; other processors.

Run with NUMBA_CPU_NAME=haswell or x86-64 to see what machines without AVX-512, F16C, BF16 or FMA compute.
"""

import dataclasses
import os
import platform
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import llvmlite.binding
import ml_dtypes
import numpy as np
import oracle
import pytest

from rope_cpu import RotaryEmbedding, _machine, _threads, angles
from rope_cpu._kernels import angles as kernels
from rope_cpu._kernels import compiler, formats, rotation, units
from rope_cpu._kernels.form import form_words

NO_POOL = np.zeros(1, np.int64)
NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@pytest.fixture(scope="module")
def pools():
    """Pools of threads that share large jobs: by their number, 1 for none."""
    return {1: 0} | {threads: _threads.start(threads).address for threads in (2, 5)}


def rotate(kind, pairing, pool, q, k, cos, sin, layout="bshd", stream_above=2**62):
    """Call the kernel on arrays in bshd order, laid out in memory as `layout` says; return copies in bshd order."""
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    arrays = [np.ascontiguousarray(x.transpose(order)) for x in (q, k)]
    outs = [np.zeros_like(x) for x in arrays]
    in_use = np.array([pool])
    work, pools = units.rows(kind, pairing).address, in_use.ctypes.data
    form = form_words(work, q.dtype, layout, q.shape[3], stream_above, pools, [cos.shape[-1]], worth=1)
    prepared = None, cos, sin, form
    status = rotation.rotation(q.dtype.itemsize, False).call(*arrays, tuple(outs), prepared, 0)
    assert status == compiler.DONE
    return [np.ascontiguousarray(x.transpose(np.argsort(order))) for x in outs]


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_the_same_bits_for_every_way_of_running(kind, pairing, rng, pools):
    dtype = NARROW.get(kind, np.dtype(kind))
    real = np.float64 if kind == "float64" else np.float32
    angle = rng.uniform(-9, 9, (2, 420, 1, 37))  # 400,000 elements: work for five
    cos, sin = np.cos(angle).astype(real), np.sin(angle).astype(real)
    q = rng.standard_normal((2, 420, 5, 77)).astype(dtype)
    k = rng.standard_normal((2, 420, 2, 77)).astype(dtype)
    first = rotate(kind, pairing, 0, q, k, cos, sin)
    exact, reach = oracle.rotate(q, cos[:, :, 0].astype(float), sin[:, :, 0].astype(float), pairing == "interleaved")
    assert (np.abs(first[0].astype(float) - exact) <= oracle.bound(exact, reach, dtype)).all()
    for pool in pools.values():
        for layout in ("bshd", "bhsd", "sbhd"):
            for stream_above in (0, 2**62):
                again = rotate(kind, pairing, pool, q, k, cos, sin, layout, stream_above)
                assert [x.tobytes() for x in again] == [x.tobytes() for x in first]


BLOCKS = [[n] for n in range(1, 71)] + [[8, 28, 28], [32, 32], [1, 2, 3, 5, 7, 11], [17, 64, 15], [128, 33], [66]]
# Equal blocks of two overlapping vectors, which go by twos: an odd one is left, others stand in between.
BLOCKS += [[96], [128], [28] * 3, [28, 28, 31, 31, 8], [12] * 4, [9, 9, 12, 12, 12], [17, 18, 18, 17]]


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_blocks_of_every_width_in_place_and_out(kind, pairing, rng):
    """Vectors overlap where widths are no powers of two: nothing may be rotated twice, and nothing left out.

    Eight elements that are not rotated leave rows at multiples of 16 bytes, where results may go past the caches; one
    does not. With more than eight tokens each row has a cos and sin of its own in bhsd.
    """
    dtype = NARROW.get(kind, np.dtype(kind))
    real = np.float64 if kind == "float64" else np.float32
    for blocks, rest in product(BLOCKS, (1, 8)):
        pairs = sum(blocks)
        angle = rng.uniform(-9, 9, (1, 9, 1, pairs))
        cos, sin = np.cos(angle).astype(real), np.sin(angle).astype(real)
        x = rng.standard_normal((1, 9, 2, 2 * pairs + rest)).astype(dtype)
        results = []
        for layout, above in product(("bshd", "bhsd"), (0, 2**62)):
            given = x if layout == "bshd" else np.ascontiguousarray(x.transpose(0, 2, 1, 3))
            work = units.rows(kind, pairing).address
            form = form_words(work, dtype, layout, x.shape[3], above, NO_POOL.ctypes.data, blocks)
            out = np.zeros_like(given)
            for source, target in ((given, out), (given.copy(),) * 2):
                kernel = rotation.rotation(dtype.itemsize, False).call
                status = kernel(source, source, target, (None, cos, sin, form), rotation.ALONE)
                assert status == compiler.DONE
                results.append(target if layout == "bshd" else target.transpose(0, 2, 1, 3))
        for other in results[1:]:
            assert other.tobytes() == results[0].tobytes(), blocks
        start = 0
        for n in blocks:
            part, at = slice(2 * start, 2 * (start + n)), slice(start, start + n)
            c, s = (table[:, :, 0, at].astype(float) for table in (cos, sin))
            exact, reach = oracle.rotate(x[..., part], c, s, pairing == "interleaved")
            assert (np.abs(results[0][..., part].astype(float) - exact) <= oracle.bound(exact, reach, dtype)).all()
            start += n
        assert (results[0][..., -rest:] == x[..., -rest:]).all()


@pytest.mark.parametrize("kind", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_results_past_the_caches_at_any_address(kind, pairing, rng):
    """How many bytes are stored at a time depends on the address, for each row: an odd step changes that within."""
    dtype = NARROW.get(kind, np.dtype(kind))
    real = np.float64 if kind == "float64" else np.float32
    work = units.rows(kind, pairing).address
    for pairs, odd in product((64, 80), (0, 16, dtype.itemsize)):
        angle = rng.uniform(-9, 9, (1, 9, 1, pairs))
        cos, sin = np.cos(angle).astype(real), np.sin(angle).astype(real)
        x = rng.standard_normal((1, 9, 2, 2 * pairs)).astype(dtype)
        step = x.shape[3] * dtype.itemsize + odd
        expected = rotate(kind, pairing, 0, x, x, cos, sin)[0]
        for offset in (0, dtype.itemsize, 8, 16, 32, 64):
            memory = np.full(18 * step + 256, 0xA5, np.uint8)
            start = -memory.ctypes.data % 64 + offset
            strides = (18 * step, 2 * step, step, dtype.itemsize)
            out = np.ndarray(x.shape, dtype, memory, start, strides)
            before = memory.copy()
            form = form_words(work, dtype, "bshd", 2 * pairs, 0, NO_POOL.ctypes.data, [pairs])
            kernel = rotation.rotation(dtype.itemsize, False).call
            assert kernel(x, x, out, (None, cos, sin, form), rotation.ALONE) == compiler.DONE
            assert out.tobytes() == expected.tobytes(), (pairs, odd, offset)
            out[...] = np.ndarray(x.shape, dtype, before, start, strides)
            assert (memory == before).all(), (pairs, odd, offset)


@pytest.mark.parametrize("in_place", ["neither", "q", "k", "both"])
def test_one_in_place_and_the_other_not(in_place, rng):
    """What is stored past the caches, row after row, may overlap itself; what is rotated in place may not."""
    angle = rng.uniform(-9, 9, (1, 3, 1, 28))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    q, k = (rng.standard_normal((1, 3, 2, 56)).astype(np.float32) for _ in range(2))
    expected = rotate("float32", "half", 0, q, k, cos, sin)
    work = units.rows("float32", "half").address
    for above in (0, 2**62):
        form = form_words(work, q.dtype, "bshd", 56, above, NO_POOL.ctypes.data, [28])
        outs = [x if in_place in (name, "both") else np.zeros_like(x) for name, x in (("q", q.copy()), ("k", k.copy()))]
        given = [out if in_place in (name, "both") else x for name, x, out in zip("qk", (q, k), outs, strict=True)]
        assert rotation.rotation(4, False).call(*given, tuple(outs), (None, cos, sin, form), 0) == compiler.DONE
        assert [x.tobytes() for x in outs] == [x.tobytes() for x in expected]


@np.errstate(invalid="ignore")  # NumPy warns of signalling NaNs
@pytest.mark.parametrize("kind", NARROW)
def test_every_16_bit_number_passes_through(kind):
    """cos 1, sin 0: what is read is written, for all 65536 patterns; a NaN stays one, bfloat16 subnormals go."""
    bits = np.arange(65536, dtype=np.uint16).reshape(1, 512, 1, 128)
    x = bits.view(NARROW[kind])
    one, zero = np.ones((1, 512, 1, 64), np.float32), np.zeros((1, 512, 1, 64), np.float32)
    # x·1 − y·0 is NaN where the partner y is infinite or NaN, so partners are set to 0 in turn.
    for side in (slice(0, 64), slice(64, 128)):
        alone = x.copy()
        alone[..., slice(64, 128) if side.start == 0 else slice(0, 64)] = 0
        result = rotate(kind, "half", 0, alone, alone, one, zero)[0][..., side]
        given = alone[..., side]
        nan = np.isnan(given)
        assert np.isnan(result[nan]).all()
        expect = given.copy()
        if kind == "bfloat16":
            expect = np.where(np.abs(given.astype(float)) < 2.0**-126, np.copysign(np.zeros_like(given), given), given)
        equal = result.view(np.uint16) == expect.view(np.uint16)
        # −0 + 0 is +0: the sign of a zero may go.
        assert (equal | nan | (expect.astype(float) == 0)).all()


@pytest.mark.parametrize("kind", NARROW)
def test_rounding_to_16_bits_is_to_nearest_even(kind, rng):
    """cos and sin carry float32 values that are rounded on the way out; NumPy and ml_dtypes say what to."""
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    halfway = (rng.integers(0, 2**16, 50_000, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    around = np.float32(2.0) ** rng.integers(-26, 17, 50_000).astype(np.float32) * (
        1 + rng.integers(0, 4096, 50_000) / 2048
    )
    values[:4] = 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800000, 0xFF800000  # NaN that rounding up would make zeros; infinity
    table = np.concatenate([values.view(np.float32), halfway.view(np.float32), around.astype(np.float32)])
    table = table[: len(table) // 64 * 64].reshape(1, -1, 1, 64)
    x = np.zeros((1, table.shape[1], 1, 128), NARROW[kind])
    x[..., :64] = 1
    zero = np.zeros_like(table)
    with np.errstate(over="ignore", invalid="ignore"):
        expect = table.astype(NARROW[kind])
    if kind == "bfloat16":
        expect = np.where(np.abs(table) < 2.0**-126, np.zeros_like(expect), expect)
    result = rotate(kind, "half", 0, x, x, table, zero)[0][..., :64]
    nan = np.isnan(table)
    assert nan.any()
    assert np.isnan(result[nan]).all()
    assert np.array_equal(result[~nan], expect[~nan])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_keys_are_rotated_where_there_are_no_queries(layout, rng, pools):
    """Of a slice of no heads the strides are those of the whole array, and threads would share its heads."""
    tokens, real = 512, np.float32
    order = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}[layout]
    buffer = rng.standard_normal((1, tokens, 12, 16)).astype(real)
    if layout == "bhsd":
        buffer = np.ascontiguousarray(buffer.swapaxes(1, 2)).swapaxes(1, 2)
    cos, sin = rng.standard_normal((2, 1, tokens, 1, 8)).astype(real)
    work, k = units.rows("float32", "half").address, buffer[:, :, 4:]
    exact, reach = oracle.rotate(k, cos[:, :, 0].astype(float), sin[:, :, 0].astype(float), False)
    for pool in pools.values():
        in_use, written = np.array([pool]), buffer.copy("K")
        arrays = (x.transpose(order) for x in (buffer[:, :, :0], k, buffer[:, :, :0], written[:, :, 4:]))
        form = form_words(work, k.dtype, layout, 16, 2**62, in_use.ctypes.data, [8], worth=1)
        q, keys, *outs = arrays
        status = rotation.rotation(4, False).call(q, keys, tuple(outs), (None, cos, sin, form), rotation.TRUSTED)
        assert status == compiler.DONE
        assert (np.abs(written[:, :, 4:].astype(float) - exact) <= oracle.bound(exact, reach, k.dtype)).all()
        assert np.array_equal(written[:, :, :4], buffer[:, :, :4])


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_the_kernel_never_writes_where_an_input_is_read(layout, rng):
    """Slide an output over an input in one buffer: the kernel takes exactly the placements that share nothing."""
    heads, tokens, dim = 2, 3, 4
    cos = np.ones((1, tokens, 1, 2), np.float32)
    work = units.rows("float32", "half").address
    form = form_words(work, cos.dtype, layout, dim, 2**62, NO_POOL.ctypes.data, [2])
    kernel = rotation.rotation(4, False).call
    taken = 0
    for head_stride, token_stride in ((4, 12), (8, 24), (12, 4), (12, 36), (-4, 12)):
        steps = {"bshd": (0, token_stride, head_stride), "bhsd": (0, head_stride, token_stride)}
        strides = steps.get(layout, (token_stride, 0, head_stride))
        shape = {"bshd": (1, tokens, heads), "bhsd": (1, heads, tokens)}.get(layout, (tokens, 1, heads))
        buffer = np.zeros(400, np.float32)

        def view(start, buffer=buffer, shape=(*shape, dim), strides=tuple(4 * s for s in (*strides, 1))):
            return np.lib.stride_tricks.as_strided(buffer[start:], shape, strides)

        x = view(150)
        for start in range(80, 230):
            out = view(start)
            status = kernel(x, x, out, (None, cos, 0 * cos, form), rotation.ALONE)
            shared = np.shares_memory(x, out)
            if status == compiler.DONE:
                assert start == 150 or not shared, (head_stride, token_stride, start)
                taken += 1
    assert taken > 100


def test_conversions_are_probed_for_the_processor_at_hand():
    program = (
        "import numpy as np, ml_dtypes, hashlib, rope_cpu\n"
        "rope = rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** -(np.arange(48) / 48), head_dim=100)\n"
        "x = np.random.default_rng(0).standard_normal((1, 40, 3, 100))\n"
        "for d in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):\n"
        "    y = rope.rotate(x.astype(d), offset=10**6)\n"
        "    tables = rope.cos_sin(np.arange(300), d)\n"
        "    print(hashlib.sha256(y.tobytes() + tables[0].tobytes() + tables[1].tobytes()).hexdigest())\n"
    )

    def digests(cpu):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_CPU_")}
        variables |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ""} if cpu else {}
        result = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True)
        assert result.returncode == 0, (cpu, result.stderr)
        return result.stdout.split()

    assert len(digests("")) == 4
    if llvmlite.binding.get_host_cpu_features().get("avx2"):
        assert digests("haswell") == digests("")
    if platform.machine() == "x86_64":
        assert len(digests("x86-64")) == 4


@pytest.mark.skipif(not formats.LLVM_20, reason="LLVM 15 has no instructions for bfloat16")
def test_conversions_of_other_processors():
    """By integers where there is no instruction, and with what is below 2^-126 set to zero where that keeps it."""
    program = (
        "import llvmlite.binding as llvm\n"
        "from rope_cpu._kernels.conversions import conversions\n"
        "llvm.initialize_all_targets()\n"
        "llvm.initialize_all_asmprinters()\n"
        "for triple, cpu in (\n"
        "    ('x86_64-unknown-linux-gnu', 'x86-64'),\n"
        "    ('x86_64-unknown-linux-gnu', 'haswell'),\n"
        "    ('x86_64-unknown-linux-gnu', 'skylake-avx512'),\n"
        "    ('x86_64-unknown-linux-gnu', 'sapphirerapids'),\n"
        "    ('aarch64-unknown-linux-gnu', 'neoverse-n1'),\n"
        "    ('aarch64-unknown-linux-gnu', 'neoverse-v1'),\n"
        "    ('arm64-apple-darwin', 'apple-m1'),\n"
        "):\n"
        "    found = [conversions(dtype, (triple, cpu, ''))[1] for dtype in ('float16', 'bfloat16')]\n"
        "    print(cpu, *(how and how.__name__ for how in found))\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.splitlines() == [
        "x86-64 _narrow_half _narrow_bfloat_together",
        "haswell None _narrow_bfloat_together",
        "skylake-avx512 None _narrow_bfloat",
        "sapphirerapids None None",
        "neoverse-n1 None _narrow_bfloat_together",
        "neoverse-v1 None _narrow_bfloat_by_hardware",
        "apple-m1 None _narrow_bfloat_together",
    ], result.stderr


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("angle_dtype", ["float64", "float32"])
def test_tables_of_16_bits_are_those_of_float64_rounded_once(dtype, angle_dtype, rng):
    frequencies = np.concatenate([rng.uniform(-3, 3, 40), 10.0 ** rng.uniform(-12, 0, 40), [0, np.pi / 2, np.pi / 3]])
    spec = RotaryEmbedding.from_inv_freq(frequencies, attention_factor=1.3).spec
    rope = RotaryEmbedding.from_spec(dataclasses.replace(spec, angle_dtype=angle_dtype))
    ids = np.concatenate([np.arange(500), rng.integers(0, 2**31, 500)])
    for narrow, wide in zip(rope.cos_sin(ids, dtype), rope.cos_sin(ids, np.float64), strict=True):
        assert narrow.tobytes() == oracle.rounded(wide, dtype).tobytes()


def test_the_angle_kernel_in_parallel_gives_the_same_bits(rng, pools):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, (2, 9)))
    parts, factor = angles.parts_of(rope.spec), np.array([1.5])
    positions = rng.uniform(-1e6, 1e6, (3, 1000, 2))
    results = []
    for pool in pools.values():
        cos, sin = np.empty((2, 3, 1000, 1, 9), np.float32)
        kind = angles.kind_of(rope.spec, parts)
        kernel, work = kernels.angles().call, kernels.cos_sin("float32", kind).address
        status = kernel(positions, 2.0**53, parts, factor, 1, cos, sin, work, pool)
        assert status == compiler.DONE
        results.append(cos.tobytes() + sin.tobytes())
    assert len(set(results)) == 1


def test_the_last_level_cache_is_told():
    assert 2**18 <= _machine.last_level_cache() <= 2**32


def test_kernels_are_made_from_files_that_their_cache_key_holds():
    """The key holds their folder and nothing else; `_machine` is asked before they run."""
    for path in Path(compiler.__file__).parent.glob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) (rope_cpu\S*)(?: import (.*))?", path.read_text(), re.MULTILINE)
        for module, names in imported:
            assert module.startswith("rope_cpu._kernels.") or (module, names) == ("rope_cpu", "_machine"), path
