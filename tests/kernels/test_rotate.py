"""Kernels alone: equal bits for all threads, layouts and strides; conversions; other processors.

NUMBA_CPU_NAME=haswell or x86-64 gives the results of machines without AVX-512, F16C, BF16 or FMA.
"""

import os
import platform

import ml_dtypes
import numpy as np
import oracle
import pytest
from numba import njit
from oracle import ORDER, draw

from rope_cpu.array_types import INTEGER_VIEWS
from rope_cpu.kernels import rotate as kernels
from rope_cpu.kernels.compile import address_of
from rope_cpu.machine import last_level_cache

NARROW = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

CACHES = 2**62  # bytes, so that nothing goes past them

DTYPES = ("float32", "float64", "float16", "bfloat16")


def launch(
    q, k, q_out, k_out, cos, sin, pairing="half", blocks=None, threads=1, cache_bytes=CACHES
):
    """Call the kernel on arrays (batch, tokens, heads, head_dim); k None: rotate q alone."""
    kernel = kernels.rotation_kernel(q.dtype.name)
    part = address_of(kernels.rotation_part(q.dtype.name, pairing))
    element = INTEGER_VIEWS.get(q.dtype.name, q.dtype)
    pairs = blocks or [cos.shape[-1]]
    numbers = np.array([part, q.shape[3], 2 * sum(pairs), cache_bytes, *pairs])
    arrays = (q, q, q_out, q_out) if k is None else (q, k, q_out, k_out)
    views = [x.view(element) for x in arrays]
    count = 1 if k is None else 2
    table = np.stack([cos, sin]) if sin is not None else cos
    return kernel(numbers, *views, table, count, threads)


def rotated(x, cos, sin, pairing="half", **settings):
    out = np.zeros_like(x)
    assert launch(x, None, out, None, cos, sin, pairing, **settings)
    return out


def cos_and_sin(rng, shape, dtype):
    angle = rng.uniform(-9, 9, shape)
    real = np.float64 if dtype == np.float64 else np.float32
    return np.cos(angle).astype(real), np.sin(angle).astype(real)


def assert_exact(result, x, cos, sin, pairing):
    exact, reach = oracle.rotate(
        x, cos[:, :, 0].astype(float), sin[:, :, 0].astype(float), pairing == "interleaved"
    )
    assert (np.abs(result.astype(float) - exact) <= oracle.bound(exact, reach, x.dtype)).all()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("pairing", kernels.PAIRINGS)
@pytest.mark.parametrize("groups", [1, 2])
def test_the_same_bits_for_every_way_of_running(kind, pairing, groups, rng):
    dtype = NARROW.get(kind, np.dtype(kind))
    cos, sin = cos_and_sin(rng, (2, 450, groups, 37), dtype)
    q, k = draw(rng, (2, 450, 6, 74), dtype), draw(rng, (2, 450, 2, 74), dtype)
    assert q.size + k.size >= kernels.PARALLEL_FROM
    first = None
    for threads in (1, 2, 5):
        for order in ORDER.values():
            back = np.argsort(order)
            given = [np.ascontiguousarray(x.transpose(order)).transpose(back) for x in (q, k)]
            out, in_place = [np.zeros_like(x) for x in given], [x.copy("K") for x in given]
            for target, source in ((out, given), (in_place, in_place)):
                assert launch(*source, *target, cos, sin, pairing, threads=threads)
                results = [x.tobytes() for x in target]
                first = first or results
                assert results == first
    for x, result in zip((q, k), out, strict=True):
        share = x.shape[2] // groups
        for group in range(groups):
            heads, table = slice(group * share, (group + 1) * share), slice(group, group + 1)
            assert_exact(
                result[:, :, heads], x[:, :, heads], cos[:, :, table], sin[:, :, table], pairing
            )


@pytest.mark.parametrize("pairing", kernels.PAIRINGS)
def test_cos_and_sin_of_any_strides(pairing, rng):
    """Stride 0 over the tokens rotates any number of them; pairs must be contiguous."""
    x = draw(rng, (2, 5, 3, 20), np.float32)
    cos, sin = cos_and_sin(rng, (2, 5, 1, 10), np.float32)
    table = np.stack([cos, sin])
    wide = np.zeros((2, 2, 9, 2, 13), np.float32)[:, :, 1:6, ::2, 3:]
    wide[...] = table
    out = np.zeros_like(x)
    assert launch(x, None, out, None, wide, None, pairing)
    assert out.tobytes() == rotated(x, cos, sin, pairing).tobytes()
    assert not launch(x, None, out, None, np.asfortranarray(table), None, pairing)
    one = table[:, :, :1].copy()
    assert not launch(x, None, out, None, one, None, pairing)
    strides = (*one.strides[:2], 0, *one.strides[3:])
    for tokens in (1, 5):
        repeated = np.lib.stride_tricks.as_strided(one, (2, 2, tokens, 1, 10), strides)
        assert launch(x, None, out, None, repeated, None, pairing)
        pair = (x, x[:, :4], out, np.zeros_like(x[:, :4]))
        assert not launch(*pair, repeated, None, pairing)
        alike = [np.repeat(y[:, :1], 5, axis=1) for y in (cos, sin)]
        assert out.tobytes() == rotated(x, *alike, pairing).tobytes()


BLOCKS = [[n] for n in range(1, 71)] + [
    [8, 28, 28],
    [32, 32],
    [1, 2, 3, 5, 7, 11],
    [17, 64, 15],
    [128, 33],
    [200],
]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("pairing", kernels.PAIRINGS)
def test_blocks_of_every_width_in_place_and_out(kind, pairing, rng):
    """Every element is rotated once, and elements past the blocks stay as they are."""
    dtype = NARROW.get(kind, np.dtype(kind))
    for blocks in BLOCKS:
        pairs = sum(blocks)
        cos, sin = cos_and_sin(rng, (1, 9, 1, pairs), dtype)
        x = draw(rng, (1, 9, 2, 2 * pairs + 3), dtype)
        out, in_place = x.copy(), x.copy()
        out[..., : 2 * pairs] = 0
        for source, target in ((x, out), (in_place, in_place)):
            assert launch(source, None, target, None, cos, sin, pairing, blocks)
        assert out.tobytes() == in_place.tobytes(), blocks
        start = 0
        for n in blocks:
            part, at = slice(2 * start, 2 * (start + n)), slice(start, start + n)
            assert_exact(out[..., part], x[..., part], cos[..., at], sin[..., at], pairing)
            start += n
        assert (out[..., 2 * pairs :] == x[..., 2 * pairs :]).all()


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("pairing", kernels.PAIRINGS)
def test_results_past_the_caches_at_any_address(kind, pairing, rng):
    """Unaligned rows are stored as usual, because a store past the caches would end the process."""
    dtype = NARROW.get(kind, np.dtype(kind))
    for blocks in ([64], [32], [96], [80], [36], [8, 28, 28], [4, 6, 54]):
        pairs = sum(blocks)
        cos, sin = cos_and_sin(rng, (1, 9, 1, pairs), dtype)
        x = draw(rng, (1, 9, 2, 2 * pairs), dtype)
        expected = rotated(x, cos, sin, pairing, blocks=blocks)
        for odd in (0, 64, 16, dtype.itemsize):
            step = x.shape[3] * dtype.itemsize + odd
            for offset in (0, dtype.itemsize, 16, 32, 64):
                memory = np.full(18 * step + 256, 0xA5, np.uint8)
                start, strides = (
                    -memory.ctypes.data % 64 + offset,
                    (18 * step, 2 * step, step, dtype.itemsize),
                )
                before, out = memory.copy(), np.ndarray(x.shape, dtype, memory, start, strides)
                assert launch(x, None, out, None, cos, sin, pairing, blocks, cache_bytes=0)
                assert out.tobytes() == expected.tobytes(), (pairs, odd, offset)
                out[...] = np.ndarray(x.shape, dtype, before, start, strides)
                assert (memory == before).all(), (pairs, odd, offset)


def test_the_last_cache_has_a_size():
    assert 2**18 <= last_level_cache() <= 2**32


def test_which_results_go_past_the_caches():
    """They are large, in other arrays, and all their rows and half rows start at a cache line."""

    bypasses_caches = kernels._bypasses_caches
    view = kernels.view  # as an attribute, Numba takes it for the method of arrays

    @njit
    def past(x, out, pairs, cache_bytes):
        return bypasses_caches(view(x), view(out), pairs, cache_bytes)

    memory = np.zeros(2**16, np.uint8)
    aligned = memory[-memory.ctypes.data % 64 :]
    x = np.zeros((1, 9, 2, 128), np.float32)
    out, odd = (
        aligned[start : start + x.nbytes].view(np.float32).reshape(x.shape) for start in (0, 16)
    )
    assert past(x, out, 64, 2 * x.nbytes - 1)
    assert not past(x, out, 64, 2 * x.nbytes)
    assert not past(x, odd, 64, 0)
    assert not past(x, out, 40, 0)
    assert not past(out, out, 64, 0)


@pytest.mark.parametrize("in_place", ["neither", "q", "k", "both"])
def test_one_in_place_and_the_other_not(in_place, rng):
    cos, sin = cos_and_sin(rng, (1, 3, 1, 28), np.float32)
    q, k = (draw(rng, (1, 3, 2, 56), np.float32) for _ in range(2))
    expected = [rotated(x, cos, sin).tobytes() for x in (q, k)]
    given = [q.copy(), k.copy()]
    outs = [
        x if in_place in (name, "both") else np.zeros_like(x)
        for name, x in zip("qk", given, strict=True)
    ]
    assert launch(*given, *outs, cos, sin)
    assert [x.tobytes() for x in outs] == expected


@np.errstate(invalid="ignore")  # NumPy warns of signalling NaNs
@pytest.mark.parametrize("kind", DTYPES[2:])
def test_every_16_bit_number_passes_through(kind):
    """cos 1 and sin 0 keep all 65536 patterns, except NaN payloads and bfloat16 subnormals."""
    x = np.arange(65536, dtype=np.uint16).reshape(1, 512, 1, 128).view(NARROW[kind])
    one, zero = np.ones((1, 512, 1, 64), np.float32), np.zeros((1, 512, 1, 64), np.float32)
    # x·1 − y·0 is NaN for an infinite or NaN partner y, so one partner is set to 0, then the other.
    for side, other in ((slice(0, 64), slice(64, 128)), (slice(64, 128), slice(0, 64))):
        alone = x.copy()
        alone[..., other] = 0
        result, given = rotated(alone, one, zero)[..., side], alone[..., side]
        nan, expect = np.isnan(given), given.copy()
        assert np.isnan(result[nan]).all()
        if kind == "bfloat16":
            expect = np.where(
                np.abs(given.astype(float)) < 2.0**-126,
                np.copysign(np.zeros_like(given), given),
                given,
            )
        equal = result.view(np.uint16) == expect.view(np.uint16)
        # −0 + 0 is +0: the sign of a zero may go.
        zero_again = (expect == 0) & (result == 0)
        assert (equal | nan | zero_again).all()


@pytest.mark.parametrize("kind", DTYPES[2:])
def test_rounding_to_16_bits_is_to_nearest_even(kind, rng):
    """cos and sin carry float32 values, which must be rounded as NumPy and ml_dtypes round."""
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    halfway = (rng.integers(0, 2**16, 50_000, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    around = np.float32(2.0) ** rng.integers(-26, 17, 50_000).astype(np.float32) * (
        1 + rng.integers(0, 4096, 50_000) / 2048
    )
    values[:4] = (
        0x7FFFFFFF,
        0xFFFFFFFF,
        0x7F800000,
        0xFF800000,
    )  # NaN that rounding up would make zeros; infinity
    table = np.concatenate(
        [values.view(np.float32), halfway.view(np.float32), around.astype(np.float32)]
    )
    table = table[: len(table) // 64 * 64].reshape(1, -1, 1, 64)
    x = np.zeros((1, table.shape[1], 1, 128), NARROW[kind])
    x[..., :64] = 1
    with np.errstate(over="ignore", invalid="ignore"):
        expect = table.astype(NARROW[kind])
    if kind == "bfloat16":
        expect = np.where(np.abs(table) < 2.0**-126, np.zeros_like(expect), expect)
    result = rotated(x, table, np.zeros_like(table))[..., :64]
    nan = np.isnan(table)
    assert nan.any()
    assert np.isnan(result[nan]).all()
    assert np.array_equal(result[~nan], expect[~nan])


@pytest.mark.parametrize("order", ORDER.values(), ids=ORDER)
def test_nothing_is_written_where_another_array_is_read(order, rng):
    """Slide an output over an input: the kernel takes only disjoint or identical places."""
    cos, sin = np.ones((1, 3, 1, 2), np.float32), np.zeros((1, 3, 1, 2), np.float32)
    taken = 0
    for head_step, token_step in ((4, 12), (8, 24), (12, 4), (12, 36), (-4, 12), (4, -12)):
        steps = np.array([36, token_step, head_step, 1]) * 4
        buffer = np.zeros(500, np.float32)

        def view(start, buffer=buffer, steps=steps):
            x = np.lib.stride_tricks.as_strided(buffer[start:], (1, 3, 2, 4), steps)
            return x.transpose(order).transpose(np.argsort(order))

        x, apart = view(200), np.zeros((1, 3, 2, 4), np.float32)
        for start in range(120, 290):
            out = view(start)
            if launch(x, None, out, None, cos, sin):
                assert start == 200 or not np.shares_memory(x, out), (head_step, token_step, start)
                taken += 1
            # The output of k lies on q, then that of q on k, then both outputs in one place.
            for arrays in (
                (x, apart, apart.copy(), out),
                (apart, x, out, apart.copy()),
                (apart, apart, x, out),
            ):
                if launch(*arrays, cos, sin):
                    assert not np.shares_memory(x, out), (head_step, token_step, start)
                    taken += 1
    assert taken > 100


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("fused", ["q k v", "by head", "sequence first"])
def test_views_of_one_buffer_are_rotated_without_copies(fused, batch, tokens, rng):
    """Heads of q, of k and of v one after the other, or q, k and v of each head (GPT-NeoX)."""
    cos, sin = cos_and_sin(rng, (1, tokens, 1, 8), np.float32)
    if fused == "by head":
        buffer = draw(rng, (batch, tokens, 4, 3, 16), np.float32)
        q, k, v = (buffer[..., n, :] for n in range(3))
    else:
        shape = (batch, tokens, 8, 16) if fused == "q k v" else (tokens, batch, 8, 16)
        buffer = draw(rng, shape, np.float32)
        q, k, v = (
            x if fused == "q k v" else x.swapaxes(0, 1) for x in np.split(buffer, [4, 6], axis=2)
        )
    expected, kept = [rotated(x.copy(), cos, sin) for x in (q, k)], v.copy()
    other = np.zeros_like(buffer)
    assert launch(q, k, q, k, cos, sin)
    assert all(map(np.array_equal, (q, k, v), (*expected, kept)))

    def counterpart(x):
        """Return the part of `other` at the place of x in the buffer."""
        start = (x.ctypes.data - buffer.ctypes.data) // 4
        return np.lib.stride_tricks.as_strided(other.ravel()[start:], x.shape, x.strides)

    places = [counterpart(x) for x in (q, k)]
    assert launch(q, k, *places, cos, -sin)
    assert not np.array_equal(other, 0 * other)


@pytest.mark.parametrize(
    "wrong",
    ["heads", "tokens", "width", "batch", "table", "last axis", "overlap", "broadcast", "swapped"],
)
def test_what_does_not_fit_is_not_written(wrong, rng):
    q, k = draw(rng, (2, 3, 4, 16), np.float32), draw(rng, (2, 3, 2, 16), np.float32)
    cos, sin = cos_and_sin(rng, (2, 3, 1, 8), np.float32)
    q_out, k_out = np.zeros_like(q), np.zeros_like(k)
    if wrong == "heads":
        cos = sin = cos.repeat(3, axis=2)
    elif wrong == "tokens":
        k, k_out = k[:, :2], k_out[:, :2]
    elif wrong == "width":
        k, k_out = k[..., :12], k_out[..., :12]
    elif wrong == "batch":
        k, k_out, cos, sin = k[:1], k_out[:1], cos[:1], sin[:1]
    elif wrong == "table":
        cos, sin = cos.repeat(2, axis=0), sin.repeat(2, axis=0)
    elif wrong == "last axis":
        q = np.zeros((2, 3, 4, 32), np.float32)[..., ::2]
    elif wrong == "overlap":
        q_out = np.lib.stride_tricks.as_strided(q_out, q.shape, (384, 64, 32, 4))
    elif wrong == "broadcast":
        k_out = np.lib.stride_tricks.as_strided(k_out, k.shape, (0, 128, 64, 4))
    else:
        q = k = draw(rng, (2, 3, 4, 16), np.float32)
        q_out, k_out = q[::-1], np.zeros_like(q)
    before = q_out.copy(), k_out.copy()
    assert not launch(q, k, q_out, k_out, cos, sin)
    assert all(map(np.array_equal, (q_out, k_out), before))


# The draws are constant: several processes must rotate the same.
PROGRAM = """
import numpy as np, ml_dtypes, hashlib, rope_cpu
rope = rope_cpu.RotaryEmbedding.from_inv_freq(1e4 ** -(np.arange(48) / 48), head_dim=100)
x = np.random.default_rng(0).standard_normal((1, 40, 3, 100))
for d in (np.float16, ml_dtypes.bfloat16):
    y = x.astype(d)
    print(hashlib.sha256(rope.plan(np.arange(40)).rotate(y).tobytes()).hexdigest())
    assert rope.plan(np.arange(40)).rotate(y, out=y) is y
"""


@pytest.mark.processes
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 processors")
def test_other_processors(run_program):
    """Processors without 16-bit instructions give the bits of those with; haswell has FMA too."""
    usual = {name: None for name in os.environ if name.startswith("NUMBA_CPU_")}

    def digests(**variables):
        return run_program(PROGRAM, env=usual | variables)[0].split()

    assert digests() == digests(NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+fma")
    assert len(digests(NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES="")) == 2
