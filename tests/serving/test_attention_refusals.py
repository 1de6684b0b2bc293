"""What attention refuses, in words, with nothing written."""

import numpy as np
import pytest
from serving import steps

import rope_cpu
from rope_cpu import Batch, KVCache


class AlwaysEqual(Batch):
    """A batch that would pass for any other where batches are compared."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Scene:
    """Valid arguments: 5 packed tokens of two sequences, 4 heads of 16, and 2 key heads."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.memory = rng.standard_normal(8192).astype(np.float32)
        self.q = self.memory[:320].reshape(5, 4, 16)
        self.out = self.memory[320:560].reshape(5, 4, 12)
        self.key = self.memory[1024:2816].reshape(7, 8, 2, 16)
        self.value = self.memory[4096:5440].reshape(7, 8, 2, 12)
        self.cache = KVCache(self.key, self.value)
        self.batch = self.make_batch()

    def make_batch(self, make=Batch, **changes):
        arguments = {
            "seq_lens": [20, 9],
            "query_lens": [4, 1],
            "page_table": [[6, 0, 2], [1, 3, -1]],
            "page_size": 8,
        }
        return make(**(arguments | changes))

    def attend(self, **changes):
        given = {name: getattr(self, name) for name in ("q", "cache", "batch", "out")}
        return rope_cpu.attention(**(given | changes))

    def over(self, start, *shape):
        """Return an array of this shape in the memory of the others."""
        return self.memory[start : start + int(np.prod(shape))].reshape(shape)


def read_only(x):
    frozen = x.view()
    frozen.flags.writeable = False
    return frozen


def int8_cache(scale):
    ints = np.zeros((2, 7, 8, 2, 16), np.int8)
    return KVCache(*ints, key_scale=scale, value_scale=np.ones((7, 8, 2), np.float32))


REFUSED = {
    "q, a list": (lambda s: s.attend(q=s.q.tolist()), TypeError, "`q` is a list; .*np.asarray.q."),
    "q, masked": (lambda s: s.attend(q=np.ma.array(s.q)), TypeError, "`q` is a masked array"),
    "q, float64": (
        lambda s: s.attend(q=s.q.astype(float)),
        TypeError,
        r"`q` has dtype float64; attention is computed .*q.astype\(np.float32\)",
    ),
    "q, int8": (lambda s: s.attend(q=s.q.astype(np.int8)), TypeError, "`q` has dtype int8; it mu"),
    "q, bshd": (lambda s: s.attend(q=s.q[None]), ValueError, r"`q` has shape \(1, 5, 4, 16\)"),
    "q, fewer tokens": (
        lambda s: s.attend(q=s.q[:4]),
        ValueError,
        "`q` has 4 tokens, but `batch` has 5 new",
    ),
    "q, narrower": (
        lambda s: s.attend(q=s.q[..., :8]),
        ValueError,
        "`q` has head_dim 8, but the keys of `cache` have 16",
    ),
    "q, 3 heads": (
        lambda s: s.attend(q=s.q[:, :3]),
        ValueError,
        "`q` has 3 heads, but `cache` has 2; .*multiple",
    ),
    "q, no heads": (lambda s: s.attend(q=s.q[:, :0]), ValueError, "`q` has 0 heads"),
    "cache, an array": (
        lambda s: s.attend(cache=s.key),
        TypeError,
        "`cache` is a ndarray; it must be a rope_cpu.KVCache",
    ),
    "batch, slots": (
        lambda s: s.attend(batch=s.batch.slot_mapping),
        TypeError,
        "`batch` is a ndarray; it must be a rope_cpu.Batch",
    ),
    "batch, page size": (
        lambda s: s.attend(batch=s.make_batch(page_size=16)),
        ValueError,
        "`batch` has page_size 16, but the pages of `cache` have 8 tokens",
    ),
    "batch, a page too far under an old key": (
        lambda s: s.attend(batch=s.make_batch(page_table=[[7, 0, 2], [1, 3, -1]])),
        ValueError,
        "`batch` has page 7, but `cache` has 7 pages",
    ),
    "batch, of a subclass": (
        lambda s: s.attend(batch=s.make_batch(make=AlwaysEqual)),
        TypeError,
        "`batch` is a AlwaysEqual; it must be a rope_cpu.Batch .no subclass",
    ),
    "cache, of a subclass": (
        lambda s: s.attend(cache=type("Sub", (KVCache,), {})(s.key, s.value)),
        TypeError,
        "`cache` is a Sub; it must be a rope_cpu.KVCache .no subclass",
    ),
    "batch, a page given back": (
        lambda s: s.attend(batch=s.make_batch(page_table=[[6, 0, 2], [-1, 3, -1]])),
        ValueError,
        "`batch` has page -1 under tokens 0 … 7 of sequence 1, .*from 0 on; .*outside of `window`",
    ),
    "batch, a page given back within the window": (
        lambda s: s.attend(batch=s.make_batch(page_table=[[-1, 0, 2], [1, 3, 9]]), window=10),
        ValueError,
        "`batch` has page -1 under tokens 0 … 7 of sequence 0, .*from 7 on",
    ),
    "scale, 0": (lambda s: s.attend(scale=0), ValueError, "`scale` is 0; .*above 0"),
    "scale, tiny": (lambda s: s.attend(scale=1e-50), ValueError, "`scale` is 1e-50; .*in float32"),
    "scale, NaN": (lambda s: s.attend(scale=np.nan), ValueError, "`scale` is nan; it must be fini"),
    "scale, a text": (lambda s: s.attend(scale="0.1"), TypeError, "`scale` is '0.1'; .*a number"),
    "window, 0": (lambda s: s.attend(window=0), ValueError, "`window` is 0; it must be at least 1"),
    "window, -1": (lambda s: s.attend(window=-1), ValueError, "`window` is -1"),
    "window, a float": (lambda s: s.attend(window=8.0), TypeError, "`window` is 8.0; .*integer"),
    "softcap, 0": (lambda s: s.attend(softcap=0.0), ValueError, "`softcap` is 0.0; .*above 0"),
    "softcap, infinite": (lambda s: s.attend(softcap=np.inf), ValueError, "`softcap` is inf"),
    "softcap, large": (
        lambda s: s.attend(softcap=1e39),
        ValueError,
        "`softcap` is 1e.39; .*float32",
    ),
    "sinks, of key heads": (
        lambda s: s.attend(sinks=np.zeros(2)),
        ValueError,
        r"`sinks` has shape \(2,\); it must be \(heads,\), \(4,\)",
    ),
    "sinks, NaN": (
        lambda s: s.attend(sinks=[0, 0, np.nan, 0]),
        ValueError,
        "`sinks` holds nan; it must be finite",
    ),
    "sinks, large": (
        lambda s: s.attend(sinks=[0, 0, 1e39, 0]),
        ValueError,
        "`sinks` holds a number beyond float32",
    ),
    "sinks, texts": (lambda s: s.attend(sinks=["a"] * 4), TypeError, "`sinks` has dtype <U1"),
    "out, a list": (lambda s: s.attend(out=[0]), TypeError, "`out` is a list"),
    "out, as wide as q": (
        lambda s: s.attend(out=np.zeros_like(s.q)),
        ValueError,
        r"`out` has shape \(5, 4, 16\); it must be that of `y`, \(5, 4, 12\)",
    ),
    "out, bfloat16": (
        lambda s: s.attend(out=s.out.astype(steps.DTYPES["bfloat16"])),
        TypeError,
        "`out` has dtype bfloat16; it must be that of `y`, float32",
    ),
    "out, read-only": (lambda s: s.attend(out=read_only(s.out)), ValueError, "`out` is read-only"),
    "out, onto itself": (
        lambda s: s.attend(out=np.broadcast_to(s.out[:1], s.out.shape)),
        ValueError,
        "`out` is read-only|overlapping",
    ),
    "out on q": (
        lambda s: s.attend(out=s.over(300, 5, 4, 12)),
        ValueError,
        "`out` shares memory with `q`",
    ),
    "out on the keys": (
        lambda s: s.attend(out=s.over(2800, 5, 4, 12)),
        ValueError,
        "`out` shares memory with `cache.key`",
    ),
    "out on the values": (
        lambda s: s.attend(out=s.over(4000, 5, 4, 12)),
        ValueError,
        "`out` shares memory with `cache.value`",
    ),
    "out on scales": (
        lambda s: s.attend(cache=int8_cache(s.over(6000, 7, 8, 2)), out=s.over(6000, 5, 4, 16)),
        ValueError,
        "`out` shares memory with `cache.key_scale`",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(call, error, message):
    scene = Scene()
    scene.attend()
    before = scene.memory.tobytes()
    with pytest.raises(error, match=message) as caught:
        call(scene)
    assert "`" in str(caught.value)
    assert scene.memory.tobytes() == before


def test_pages_outside_of_the_window_may_be_given_back_or_anything():
    scene = Scene()
    expected = scene.attend(window=4).copy()
    for page in (-1, 6, 1000):
        batch = scene.make_batch(page_table=[[page, 0, 2], [1, 3, 5000]])
        steps.assert_same_bits(scene.attend(batch=batch, window=4), expected)
