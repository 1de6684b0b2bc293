"""Random calls of append: rotary embeddings, places of arrays in memory, caches, slots, norms."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import oracle
from launch import steps
from launch.steps import DTYPES, Norm

import rope_cpu
from rope_cpu import RotaryEmbedding

LAYOUTS = ("bshd", "bhsd", "sbhd", "thd")
WIDTHS = (2, 6, 16, 64, 72, 80, 96, 128, 130, 200, 256)


def to_norm(norm):
    """Return the library's norm."""
    if norm is None:
        return None
    return rope_cpu.RMSNorm(norm.weight, norm.eps, offset=norm.offset)


def draw_norm(rng, width):
    """Return one of: no norm, no weight, weights of several dtypes, Gemma's offset."""
    kind = rng.choice(["none", "no weight", "float32", "bfloat16", "float64", "offset"])
    if kind == "none":
        return None
    eps = float(rng.choice([1e-6, 1e-5, 0.1]))
    if kind == "no weight":
        return Norm(None, eps)
    if kind == "offset":
        return Norm(rng.standard_normal(width).astype(np.float32), eps, 1.0)
    dtype = DTYPES.get(kind, np.float64)
    return Norm(rng.standard_normal(width).astype(dtype), eps)


# Rotary embeddings. Each takes draws, the width of a head vector and the pairing.


def _full(rng, width, interleaved):
    return RotaryEmbedding.from_inv_freq(oracle.inv_freq(width), interleaved=interleaved)


def _partial(rng, width, interleaved):
    rotated = 2 * int(rng.integers(1, width // 2 + 1))
    return RotaryEmbedding.from_inv_freq(
        oracle.inv_freq(rotated),
        head_dim=width,
        attention_factor=1.25,
        interleaved=interleaved,
    )


def _blocks(rng, width, interleaved):
    pairs = int(rng.integers(1, width // 2 + 1))
    first = int(rng.integers(0, pairs))
    widths = [2 * count for count in (first, pairs - first) if count]
    return RotaryEmbedding.from_inv_freq(
        rng.uniform(-1, 1, pairs), head_dim=width, blocks=widths, interleaved=interleaved
    )


def _axes(rng, width, interleaved):
    inv_freq = rng.uniform(-1, 1, (int(rng.integers(2, 4)), width // 2))
    return RotaryEmbedding.from_inv_freq(inv_freq, interleaved=interleaved)


def _mrope(rng, width, interleaved):
    first = int(rng.integers(0, width // 2))
    section = [count for count in (first, width // 2 - first) if count]
    return RotaryEmbedding.mrope(width, section, rope_theta=1e4, interleaved=interleaved)


def _by_head(rng, width, interleaved):
    inv_freq = rng.uniform(-1, 1, (2, 2, width // 2))
    return RotaryEmbedding.from_inv_freq(inv_freq, interleaved=interleaved)


ROTARIES = (_full, _full, _partial, _partial, _blocks, _axes, _mrope, _by_head)


# Caches: the shapes of the server's arrays, and the key and the value as views of them.


class Paging(NamedTuple):
    """shapes: from (pages, page_size, heads, key width, value width). views: (key, value)."""

    shapes: Any
    views: Any
    same_width: bool = False


PAGINGS = {
    "pages": Paging(lambda p, s, h, k, v: [(p, s, h, k), (p, s, h, v)], lambda a, b, *_: (a, b)),
    "heads first": Paging(
        lambda p, s, h, k, v: [(p, h, s, k), (p, h, s, v)],
        lambda a, b, *_: (a.transpose(0, 2, 1, 3), b.transpose(0, 2, 1, 3)),
    ),
    "halves": Paging(
        lambda p, s, h, k, v: [(2, p, s, h, k)], lambda a, *_: (a[0], a[1]), same_width=True
    ),
    "halves of a page": Paging(
        lambda p, s, h, k, v: [(p, 2, s, h, k)], lambda a, *_: (a[:, 0], a[:, 1]), same_width=True
    ),
    "halves of a page, heads first": Paging(
        lambda p, s, h, k, v: [(p, 2, h, s, k)],
        lambda a, *_: (a[:, 0].transpose(0, 2, 1, 3), a[:, 1].transpose(0, 2, 1, 3)),
        same_width=True,
    ),
    "side by side": Paging(
        lambda p, s, h, k, v: [(p, s, h, k + v)], lambda a, _, k: (a[..., :k], a[..., k:])
    ),
    "heads side by side": Paging(
        lambda p, s, h, k, v: [(p, s, 2 * h, k)],
        lambda a, *_: (a[:, :, 0::2], a[:, :, 1::2]),
        same_width=True,
    ),
    "odd strides": Paging(
        lambda p, s, h, k, v: [(s + 3, 2 * p, h + 1, k + 5), (p, s, h, v + 1)],
        lambda a, b, k: (
            a[1:-2, ::-2, 1:, 3 : 3 + k].transpose(1, 0, 2, 3),
            b[::-1, ::-1, ::-1, 1:],
        ),
    ),
}
SCALE_PAGINGS = {
    "pages": Paging(lambda p, s, h: [(p, s, h), (p, s, h)], lambda a, b: (a, b)),
    "heads first": Paging(
        lambda p, s, h: [(p, h, s), (p, h, s)],
        lambda a, b: (a.transpose(0, 2, 1), b.transpose(0, 2, 1)),
    ),
    "halves": Paging(lambda p, s, h: [(p, s, h, 2)], lambda a, _: (a[..., 0], a[..., 1])),
    "odd strides": Paging(
        lambda p, s, h: [(h, s, 3 * p), (p, s + 1, h)],
        lambda a, b: (a[:, ::-1, 1::3].transpose(2, 1, 0), b[::-1, 1:]),
    ),
}


class Caches:
    """The server's arrays, the cache of them, and copies that take the expected contents.

    sizes: pages, page_size, heads, key_width, value_width, as in `KVCache`. hold: from arrays to
    those that take their place.
    """

    def __init__(self, rng, dtype, paging, scale_paging, sizes, hold=list):
        pages, page_size, heads, key_width, _ = sizes
        self.page_size = page_size
        self.count = pages * page_size
        self.dtype = DTYPES[dtype]
        row = PAGINGS[paging]
        self.arrays = [noise(rng, shape, self.dtype) for shape in row.shapes(*sizes)]
        self.number = len(self.arrays)
        self._views = lambda arrays: row.views(*(*arrays, None)[:2], key_width)
        scale_row = SCALE_PAGINGS[scale_paging]
        if dtype == "int8":
            shapes = scale_row.shapes(pages, page_size, heads)
            self.arrays += [noise(rng, shape, DTYPES["float32"]) for shape in shapes]
        self.arrays = hold(self.arrays)
        self._scale_views = lambda arrays: scale_row.views(*(*arrays, None)[:2])
        self.expected = [array.copy() for array in self.arrays]
        key, value, key_scale, value_scale = self.of(self.arrays)
        self.cache = rope_cpu.KVCache(key, value, key_scale=key_scale, value_scale=value_scale)

    def of(self, arrays):
        """Return key, value and their scales, or None, as views of the server's arrays."""
        views = self._views(arrays[: self.number])
        scales = (None, None)
        if len(arrays) > self.number:
            scales = self._scale_views(arrays[self.number :])
        return *views, *scales

    def expect(self, slots, keys, values):
        """Expect float32 keys and values (tokens, heads, width) in their slots."""
        key, value, key_scale, value_scale = self.of(self.expected)
        kept = slots >= 0
        places = (slots[kept] // self.page_size, slots[kept] % self.page_size)
        for array, scale, x in ((key, key_scale, keys), (value, value_scale, values)):
            if scale is None:
                array[places] = steps.stored(x[kept], self.dtype)
            else:
                array[places], scale[places] = steps.quantised(x[kept])

    def check(self, text=""):
        """Raise unless all arrays of the server have the expected bits, slot by slot and beside."""
        for array, expected in zip(self.arrays, self.expected, strict=True):
            steps.assert_same_bits(array, expected, text)


def noise(rng, shape, dtype):
    if dtype == np.int8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    return rng.standard_normal(shape).astype(dtype)


def draw_slots(rng, count, shape):
    """Return different slots for some tokens, and -1 for the others."""
    tokens = int(np.prod(shape))
    slots = rng.permutation(count)[:tokens].reshape(shape)
    slots[rng.random(shape) < 0.2] = -1
    return slots


# Inputs: arrays (batch, tokens, heads, width) of given values, in some place.


def _apart(values):
    return [x.copy() for x in values]


def _projection(values):
    """One row of memory for each token, as a matrix product writes it."""
    rows = [x.reshape(*x.shape[:2], -1) for x in values]
    packed = np.concatenate(rows, axis=-1)
    ends = np.cumsum([row.shape[-1] for row in rows])
    starts = ends - [row.shape[-1] for row in rows]
    return [
        packed[..., start:end].reshape(x.shape)
        for x, start, end in zip(values, starts, ends, strict=True)
    ]


def _gaps(values):
    views = []
    for x in values:
        batch, tokens, heads, width = x.shape
        wide = np.zeros((heads, 2 * tokens, batch, width + 3), x.dtype)
        view = wide[::-1, ::2, :, 2:-1].transpose(2, 1, 0, 3)
        view[...] = x
        views.append(view)
    return views


def _last_axis_apart(values):
    views = []
    for x in values:
        view = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]
        view[...] = x
        views.append(view)
    return views


def _unaligned(values):
    views = []
    for x in values:
        view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        view[...] = x
        views.append(view)
    return views


INPUT_PLACES = (_apart, _projection, _projection, _gaps, _last_axis_apart, _unaligned)


def in_layout(x, layout):
    """Return a view of (batch, tokens, heads, width) in a layout."""
    return x[0] if layout == "thd" else x.transpose(oracle.ORDER[layout])


class Call:
    """A random call of append, and its expected results.

    large: of 2^17 elements and more. hold: of `Caches`, for arrays of as many axes as those of
    `KVCache`.
    """

    def __init__(self, rng, dtype, cache_dtype, interleaved, large=False, hold=None):
        self.dtype = DTYPES[dtype]
        self.width = int(rng.choice(WIDTHS))
        self.layout = str(rng.choice(LAYOUTS))
        kind = ROTARIES[rng.integers(len(ROTARIES))]
        self.rope = kind(rng, self.width, interleaved)
        batch = 1 if self.layout == "thd" else int(rng.integers(1, 4))
        kv_heads = int(rng.choice([2, 4]))
        heads = kv_heads * int(rng.choice([1, 2, 4]))
        least = 2**17 // (batch * (heads + 2 * kv_heads) * self.width) if large else 0
        self.tokens = (batch, least + int(rng.integers(1, 8)))
        self.value_width = int(rng.choice([self.width, self.width, 1, 8, 100]))
        paging = "pages" if hold else self._paging(rng)
        page_size = int(rng.choice([1, 3, 16, 40]))
        pages = -(-2 * batch * self.tokens[1] // page_size) + 1
        sizes = (pages, page_size, kv_heads, self.width, self.value_width)
        scale_paging = "pages" if hold else str(rng.choice(list(SCALE_PAGINGS)))
        self.caches = Caches(rng, cache_dtype, paging, scale_paging, sizes, hold or list)
        self.slots = draw_slots(rng, self.caches.count, self.tokens)
        self.norms = (
            draw_norm(rng, self.width),
            draw_norm(rng, self.width),
            draw_norm(rng, self.value_width),
        )
        shapes = [(heads, self.width), (kv_heads, self.width), (kv_heads, self.value_width)]
        self.values = [noise(rng, (*self.tokens, *shape), self.dtype) for shape in shapes]
        self.place = INPUT_PLACES[rng.integers(len(INPUT_PLACES))]
        self.out = str(rng.choice(["new", "in place", "own", "own with gaps"]))
        self.integers = rng.choice(["int64", "int32", "list", ">i8"])
        self.ids = self._draw_ids(rng)
        self.text = (
            f"{kind.__name__} {self.width} {self.layout} {paging} {scale_paging} "
            f"{self.place.__name__} {self.out} {[norm is not None for norm in self.norms]}"
        )

    def _paging(self, rng):
        usable = [
            name
            for name, row in PAGINGS.items()
            if self.value_width == self.width or not row.same_width
        ]
        return str(rng.choice(usable))

    def _draw_ids(self, rng):
        shape = self.tokens if self.rope.axes == 1 else (*self.tokens, self.rope.axes)
        return rng.integers(0, 5000, shape)

    def rotated(self, x):
        """Return float32 (batch, tokens, heads, width), rotated."""
        return self.rope.plan(self.ids).rotate(x)

    def plan(self):
        """Return the plan of the tokens in the layout."""
        ids = self.ids[0] if self.layout == "thd" else self.ids
        return self.rope.plan(ids, layout=self.layout)

    def run(self):
        """Append; return the queries as (batch, tokens, heads, width)."""
        q, k, v = (in_layout(x, self.layout) for x in self.place(self.values))
        slots = self.slots[0] if self.layout == "thd" else self.slots
        given = slots.tolist() if self.integers == "list" else slots.astype(self.integers)
        out = self._make_out(q)
        q_norm, k_norm, v_norm = map(to_norm, self.norms)
        result = self.plan().append(
            q, k, v, self.caches.cache, given, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, out=out
        )
        assert out is None or result is out
        untouched = [(k, self.values[1]), (v, self.values[2])]
        if self.out != "in place":
            untouched.append((q, self.values[0]))
        for x, values in untouched:
            assert x.tobytes() == in_layout(values, self.layout).tobytes(), self.text
        return oracle.from_layout(result, self.layout)

    def _make_out(self, q):
        if self.out == "new":
            return None
        if self.out == "in place":
            return q
        if self.out == "own":
            return np.zeros(q.shape, q.dtype)
        return np.zeros((*q.shape[:-1], q.shape[-1] + 3), q.dtype)[..., 2:-1]

    def expect(self):
        """Write what the caches must hold; return the expected queries."""
        q, k, v = (
            steps.normalised(x.astype(np.float32), norm)
            for x, norm in zip(self.values, self.norms, strict=True)
        )
        slots = self.slots.reshape(-1)
        keys = self.rotated(k).reshape(slots.size, *k.shape[2:])
        self.caches.expect(slots, keys, v.reshape(slots.size, *v.shape[2:]))
        return steps.stored(self.rotated(q), self.dtype)
