"""What attention refuses, in words, with nothing written."""

import numpy as np
import pytest
from launch import steps

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


# The refused argument, the changes of a valid call, the class, and words that teach.
REFUSED = [
    ("q", lambda s: {"q": s.q.tolist()}, TypeError),
    ("q", lambda s: {"q": np.ma.array(s.q)}, TypeError),
    (
        "q",
        lambda s: {"q": s.q.astype(float)},
        TypeError,
        r".*q.astype\(np.float32\)",
    ),
    ("q", lambda s: {"q": s.q.astype(np.int8)}, TypeError),
    ("q", lambda s: {"q": s.q[None]}, ValueError),
    ("q", lambda s: {"q": s.q[:4]}, ValueError),
    ("q", lambda s: {"q": s.q[..., :8]}, ValueError),
    ("q", lambda s: {"q": s.q[:, :3]}, ValueError, ".*multiple"),
    ("q", lambda s: {"q": s.q[:, :0]}, ValueError),
    ("cache", lambda s: {"cache": s.key}, TypeError),
    ("cache", lambda s: {"cache": type("Sub", (KVCache,), {})(s.key, s.value)}, TypeError),
    ("batch", lambda s: {"batch": s.batch.slot_mapping}, TypeError),
    ("batch", lambda s: {"batch": s.make_batch(make=AlwaysEqual)}, TypeError, ".*no subclass"),
    ("batch", lambda s: {"batch": s.make_batch(page_size=16)}, ValueError, ".*cache`, 8$"),
    ("batch", lambda s: {"cache": heads_first(s)}, ValueError, r".*key.transpose\(0, 2, 1, 3\)$"),
    ("batch", lambda s: {"batch": s.make_batch(page_table=[[7, 0, 2], [1, 3, -1]])}, ValueError),
    ("batch", lambda s: {"batch": s.make_batch(page_table=[[6, 0, 2], [-1, 3, -1]])}, ValueError),
    (
        "batch",
        lambda s: given_back(s) | {"window": 10},
        ValueError,
        ".*0 … 7 .*from 7 on",
    ),
    ("scale", lambda s: {"scale": 0}, ValueError),
    ("scale", lambda s: {"scale": 1e-50}, ValueError, ".*in float32"),
    ("scale", lambda s: {"scale": np.nan}, ValueError),
    ("scale", lambda s: {"scale": "0.1"}, TypeError),
    ("window", lambda s: {"window": 0}, ValueError),
    ("window", lambda s: {"window": -1}, ValueError),
    ("window", lambda s: {"window": 8.0}, TypeError),
    ("softcap", lambda s: {"softcap": 0.0}, ValueError),
    ("softcap", lambda s: {"softcap": np.inf}, ValueError),
    ("softcap", lambda s: {"softcap": 1e39}, ValueError),
    ("sinks", lambda s: {"sinks": np.zeros(2)}, ValueError),
    ("sinks", lambda s: {"sinks": [0, 0, np.nan, 0]}, ValueError),
    ("sinks", lambda s: {"sinks": [0, 0, 1e39, 0]}, ValueError, ".* in float32"),
    ("sinks", lambda s: {"sinks": ["a"] * 4}, TypeError),
    ("out", lambda s: {"out": [0]}, TypeError),
    ("out", lambda s: {"out": np.zeros_like(s.q)}, ValueError, r".*that of `y`, \(5, 4, 12\)"),
    ("out", lambda s: {"out": s.out.astype(steps.DTYPES["bfloat16"])}, TypeError),
    ("out", lambda s: {"out": read_only(s.out)}, ValueError),
    ("out", lambda s: {"out": np.broadcast_to(s.out[:1], s.out.shape)}, ValueError),
    ("out", lambda s: {"out": s.over(300, 5, 4, 12)}, ValueError, ".*`q`"),
    ("out", lambda s: {"out": s.over(2800, 5, 4, 12)}, ValueError, ".*`cache.key`"),
    ("out", lambda s: {"out": s.over(4000, 5, 4, 12)}, ValueError, ".*`cache.value`"),
    ("out", lambda s: on_scales(s) | {"out": s.over(6000, 5, 4, 16)}, ValueError, ".*key_scale`"),
]


def heads_first(scene):
    """Return a cache whose arrays (pages, heads, page_size, width) are not transposed."""
    return KVCache(scene.key.reshape(7, 2, 8, 16), scene.value.reshape(7, 2, 8, 12))


def given_back(scene):
    return {"batch": scene.make_batch(page_table=[[-1, 0, 2], [1, 3, 9]])}


def on_scales(scene):
    return {"cache": int8_cache(scene.over(6000, 7, 8, 2))}


@pytest.mark.parametrize("row", REFUSED, ids=[f"{n}-{row[0]}" for n, row in enumerate(REFUSED)])
def test_refused(row):
    argument, changes, error, *words = row
    scene = Scene()
    scene.attend()
    before = scene.memory.tobytes()
    with pytest.raises(error, match=f"^`{argument}`{''.join(words)}") as caught:
        scene.attend(**changes(scene))
    assert caught.value.argument == argument
    assert scene.memory.tobytes() == before


def test_pages_outside_of_the_window_may_be_given_back_or_anything():
    scene = Scene()
    expected = scene.attend(window=4).copy()
    for page in (-1, 6, 1000):
        batch = scene.make_batch(page_table=[[page, 0, 2], [1, 3, 5000]])
        steps.assert_same_bits(scene.attend(batch=batch, window=4), expected)
