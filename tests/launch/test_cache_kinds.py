"""Caches whose values have another dtype than their keys, 4 bits, or whose keys are transformed.

Stored bytes are those of NumPy, and attention is that of the decoded arrays in float64.
"""

import numpy as np
import pytest
from launch import attending, steps

import rope_cpu
from rope_cpu.array_types import CACHE_KINDS, VALUE_FORMATS

WIDTHS = (64, 80, 96, 128, 256)
KINDS = ("int8-hadamard", "int8-int4-hadamard", "bfloat16-int4", "float16-int8-hadamard")
OTHERS = [
    pytest.param(name, marks=pytest.mark.nightly) for name in CACHE_KINDS if name not in KINDS
]
UNIT = 2.0**-24


def test_kernels_tell_formats_by_their_dtypes():
    """Integers of another format would be read as those of the first, in silence."""
    dtypes = [row.kernel_dtype for row in VALUE_FORMATS.values()]
    assert len(set(dtypes)) == len(dtypes)


def transformed(x):
    """Return float32 vectors times the Hadamard matrix, in the kernel's order of operations."""
    width = x.shape[-1]
    block = width & -width
    y = x * (np.float32(1) / np.sqrt(np.float32(block)))
    step = 1
    while step < block:
        z = y.reshape(*x.shape[:-1], -1, 2, step)
        first, second = z[..., 0, :], z[..., 1, :]
        y = np.stack([first + second, first - second], axis=-2).reshape(x.shape)
        step *= 2
    return y


def hadamard_matrix(width):
    """Return the matrix in float64, by its definition: H2n = [[Hn, Hn], [Hn, −Hn]]."""
    block = width & -width
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(width // block), matrix) / np.sqrt(block)


def in_4_bits(x):
    """Return float32 vectors as ggml's q4_0 stores them, and the scales of their groups."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    first = np.abs(groups).argmax(axis=-1, keepdims=True)  # NaN if there is one
    with np.errstate(all="ignore"):
        scale = np.take_along_axis(groups, first, axis=-1) / np.float32(-8)
        scale = np.where(np.abs(scale) < 65520, scale, np.float32(np.nan))
        inverse = np.where(np.abs(scale) > 2.0**-25, 1 / scale, np.float32(0))
        moved = np.where(np.isnan(scale), np.float32(8), groups * inverse + np.float32(8.5))
        numbers = np.minimum(moved, 15).astype(np.uint8)
    stored = numbers[..., :16] | numbers[..., 16:] << 4
    return stored.reshape(*x.shape[:-1], -1), scale[..., 0].astype(np.float16)


def stored(x, name):
    """Return float32 vectors in a format of caches, and their scales."""
    if name == "int4":
        return in_4_bits(x)
    return steps.quantised(x) if name == "int8" else (steps.stored(x, steps.DTYPES[name]), None)


def decoded(x, scale, name):
    """Return stored vectors in float64."""
    if name != "int4":
        return x.astype(np.float64) * (1 if scale is None else scale[..., None].astype(np.float64))
    groups = x.reshape(*x.shape[:-1], -1, 16)
    numbers = np.concatenate([groups & 15, groups >> 4], axis=-1).astype(np.float64) - 8
    values = numbers * scale[..., None].astype(np.float64)
    return values.reshape(*x.shape[:-1], -1)


def with_gaps(x):
    """Return an array of the shape of another, without its order of memory; None for None."""
    if x is None:
        return None
    pages, page_size, heads, *width = x.shape
    return np.empty((heads + 1, pages, page_size, *width), x.dtype)[1:].transpose(
        1, 2, 0, *range(3, x.ndim)
    )


def fill_with_nan(cache):
    for x in (cache.key, cache.value, cache.key_scale, cache.value_scale):
        if x is not None:
            x[...] = 99 if x.dtype.kind in "iu" else np.nan


class Step:
    """Sequences of random lengths in a cache of a kind; each attends with its last tokens."""

    def __init__(self, rng, name):
        self.kind = CACHE_KINDS[name]
        width = int(rng.choice(WIDTHS))
        value_dim = int(rng.choice([32, 96, 128, 160])) if rng.random() < 0.5 else width
        if self.kind.value == "int4":
            value_dim = -(-value_dim // 32) * 32
        self.kv_heads = int(rng.integers(1, 4))
        self.lengths = rng.integers(1, 700, int(rng.integers(1, 4)))
        self.page_size = int(rng.choice([5, 16, 32]))
        pages = -(-self.lengths.max() // self.page_size)
        self.table = rng.permutation(len(self.lengths) * pages).reshape(-1, pages)
        self.cache = rope_cpu.KVCache.zeros(
            self.table.size,
            self.page_size,
            self.kv_heads,
            width,
            dtype=VALUE_FORMATS[self.kind.key].dtype,
            value_dtype=self.kind.value,
            value_dim=value_dim,
            hadamard=self.kind.hadamard,
        )
        if rng.random() < 0.5:
            names = ("key", "value", "key_scale", "value_scale")
            arrays = {name: with_gaps(getattr(self.cache, name)) for name in names}
            self.cache = rope_cpu.KVCache(**arrays, hadamard=self.kind.hadamard)
        fill_with_nan(self.cache)
        tokens = int(self.lengths.sum())
        heads = self.kv_heads * int(rng.integers(1, 6))
        self.q = rng.standard_normal((tokens, heads, width)).astype(np.float32)
        self.k = rng.standard_normal((tokens, self.kv_heads, width)).astype(np.float32)
        self.k[..., rng.integers(width)] *= rng.choice([1, 20])
        self.v = rng.standard_normal((tokens, self.kv_heads, value_dim)).astype(np.float32)
        self.rope = rope_cpu.RotaryEmbedding(width)

    def batch(self, new):
        return rope_cpu.Batch(
            seq_lens=self.lengths, query_lens=new, page_table=self.table, page_size=self.page_size
        )

    def append(self):
        """Append all tokens, check what is stored, and return the rotated queries."""
        batch = self.batch(self.lengths)
        plan = self.rope.plan(batch.cache_position, layout="thd")
        q_rot = plan.append(self.q, self.k, self.v, self.cache, batch)
        k_rot = plan.rotate(self.k)
        self.places = np.divmod(batch.slot_mapping, self.page_size)
        keys = transformed(k_rot) if self.kind.hadamard else k_rot
        self.check_stored("key", keys, self.kind.key)
        self.check_stored("value", self.v, self.kind.value)
        return q_rot

    def check_stored(self, name, x, form):
        expected, scales = stored(x, form)
        steps.assert_same_bits(getattr(self.cache, name)[self.places], expected, name)
        if scales is not None:
            steps.assert_same_bits(getattr(self.cache, f"{name}_scale")[self.places], scales)

    def read(self, name, form):
        scale = getattr(self.cache, f"{name}_scale")
        scales = None if scale is None else scale[self.places]
        return decoded(getattr(self.cache, name)[self.places], scales, form)

    def check_attention(self, rng, q_rot):
        """Compare with the exact attention to the decoded arrays."""
        options = attending.Options(
            window=None if rng.random() < 0.5 else int(rng.integers(1, 400)),
            softcap=None if rng.random() < 0.5 else 30.0,
            sinks=None if rng.random() < 0.5 else rng.standard_normal(q_rot.shape[1]),
        )
        new = np.minimum(rng.integers(1, 13, len(self.lengths)), self.lengths)
        ends = np.cumsum(self.lengths)
        chosen = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, new, strict=True)])
        q = q_rot[chosen]
        y = rope_cpu.attention(q, self.cache, self.batch(new), **options._asdict())
        keys = self.read("key", self.kind.key)
        if self.kind.hadamard:
            keys = keys @ hadamard_matrix(keys.shape[-1])  # its own inverse
        values = self.read("value", self.kind.value)
        parts = zip(np.split(keys, ends[:-1]), np.split(values, ends[:-1]), new, strict=True)
        sequences = [attending.Sequence(*part) for part in parts]
        error = np.abs(y - attending.exactly(q, sequences, options)).max()
        allowed = attending.bound(q, sequences, options)
        if self.kind.hadamard:
            allowed += self.transform_bound(q, keys)
        assert error <= allowed * np.abs(values).max(), (error, self.kind, options)

    def transform_bound(self, q, keys):
        """Return a bound on the errors of scores that the transform of queries makes.

        Each stage, and the factor, rounds once, and the stages after it keep the norm of the error.
        A product is then off by that times the norm of the key. The products of transformed vectors
        are rounded, too: the sum of their magnitudes is at most the product of the norms.
        """
        width = q.shape[-1]
        roundings = np.log2(width & -width) + 2 + 32 + width / 8  # those of `attending.bound`
        norms = [np.linalg.norm(x, axis=-1).max() for x in (q, keys)]
        return UNIT * roundings * width**-0.5 * norms[0] * norms[1]


@pytest.mark.parametrize("name", [*KINDS, *OTHERS])
def test_append_and_attention(name, rng):
    for _ in range(6):
        step = Step(rng, name)
        step.check_attention(rng, step.append())


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 6e5])
def test_a_group_of_4_bits_that_no_scale_fits_reads_as_nan(bad):
    cache = rope_cpu.KVCache.zeros(1, 4, 1, 64, dtype="float32", value_dtype="int4")
    plan = rope_cpu.RotaryEmbedding(64).plan([0, 1], layout="thd")
    x = np.ones((2, 1, 64), np.float32)
    v = x.copy()
    v[0, 0, 40] = bad
    v[1] = 0
    plan.append(x, x, v, cache, [0, 1])
    assert np.isnan(cache.value_scale[0, 0]).tolist() == [[False, True]]
    assert not decoded(cache.value, cache.value_scale, "int4")[0, 1].any()
    batch = rope_cpu.Batch(seq_lens=[1], query_lens=[1], page_table=[[0]], page_size=4)
    y = rope_cpu.attention(x[:1], cache, batch)
    assert np.isnan(y[0, 0, 32:]).all()
    np.testing.assert_allclose(y[0, 0, :32], 1)


def test_a_cache_with_transformed_keys_is_not_rotated():
    cache = rope_cpu.KVCache.zeros(2, 4, 1, 64, dtype="float32", value_dtype="int4", hadamard=True)
    plan = rope_cpu.RotaryEmbedding(64).shift_plan(3, layout="thd")
    with pytest.raises(TypeError, match=r"`cache` is of the kind float32-int4-hadamard; .*append"):
        plan.rotate_cached(cache, [0])
