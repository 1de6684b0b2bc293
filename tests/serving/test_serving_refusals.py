"""What append, rotate_cached and norms of plans refuse, in words, with nothing written."""

import time

import numpy as np
import pytest
import refusals
from serving import steps

from rope_cpu import Batch, KVCache, RMSNorm, RotaryEmbedding

BFLOAT16 = steps.DTYPES["bfloat16"]


class Scene:
    """Valid arguments of a step of 5 packed tokens: 4 heads of 16, 2 heads of keys and values."""

    def __init__(self):
        rng = np.random.default_rng(0)
        # One buffer holds everything, so that views of it can share memory in any way.
        self.memory = rng.standard_normal(4096).astype(np.float32)
        self.end = 0
        self.q = self.take(5, 4, 16)
        self.k = self.take(5, 2, 16)
        self.v = self.take(5, 2, 16)
        self.out = self.take(5, 4, 16)
        self.key = self.take(3, 4, 2, 16)
        self.value = self.take(3, 4, 2, 16)
        self.key_scale = self.take(3, 4, 2)
        self.value_scale = self.take(3, 4, 2)
        self.int8 = rng.integers(-128, 128, (2, 3, 4, 2, 16)).astype(np.int8)
        self.rope = RotaryEmbedding(16)
        self.plan = self.rope.plan(np.arange(5), layout="thd")
        self.cache = KVCache(self.key, self.value)
        self.slots = np.array([9, 0, -1, 4, 2])

    def take(self, *shape):
        """Return the next part of the buffer, with room behind it."""
        start = self.end
        self.end += int(np.prod(shape))
        taken = self.memory[start : self.end].reshape(shape)
        self.end += 16
        return taken

    def of_int8(self):
        """Return a cache of int8."""
        return KVCache(*self.int8, key_scale=self.key_scale, value_scale=self.value_scale)

    def append(self, **changes):
        """Append, with some arguments changed."""
        names = ("q", "k", "v", "cache", "slots")
        given = [changes.pop(name, getattr(self, name)) for name in names]
        return changes.pop("plan", self.plan).append(*given, **changes)

    def bytes(self):
        return self.memory.tobytes() + self.int8.tobytes()


@pytest.fixture
def scene():
    return Scene()


def check(scene, call, error, message):
    """Raise unless a call is refused in such words, with nothing written."""
    before = scene.bytes()
    with pytest.raises(error, match=message) as caught:
        call(scene)
    text = str(caught.value)
    assert "`" in text
    assert len(text) < 2000
    assert scene.bytes() == before


BATCH = {"seq_lens": [5], "query_lens": [5], "page_table": [[0, 1]], "page_size": 4}


def batch(**changes):
    return Batch(**(BATCH | changes))


def subclass(kind):
    return type("Sub", (kind,), {})


def bfloat16(*shape):
    return np.zeros(shape, BFLOAT16)


def read_only(x):
    frozen = x.view()
    frozen.flags.writeable = False
    return frozen


APPEND = {
    # Types and dtypes
    "q, a list": (lambda s: s.append(q=s.q.tolist()), TypeError, "`q` is a list; .*np.asarray.q."),
    "k, None": (lambda s: s.append(k=None), TypeError, "`k` is a NoneType"),
    "v, masked": (lambda s: s.append(v=np.ma.array(s.v)), TypeError, "`v` is a masked array"),
    "q, float64": (
        lambda s: s.append(q=s.q.astype(float)),
        TypeError,
        r"`q` has dtype float64; norms and caches .*q.astype\(np.float32\)",
    ),
    "k, float64": (
        lambda s: s.append(k=s.k.astype(float)),
        TypeError,
        "`k` has dtype float64; nor",
    ),
    "all float64": (
        lambda s: s.append(q=s.q.astype(float), k=s.k.astype(float), v=s.v.astype(float)),
        TypeError,
        "`q` has dtype float64; norms",
    ),
    "v, integers": (lambda s: s.append(v=s.v.astype(int)), TypeError, "`v` has dtype int64"),
    "q, byte order": (lambda s: s.append(q=s.q.astype(">f4")), TypeError, "`q` has dtype >f4"),
    "all, byte order": (
        lambda s: s.append(q=s.q.astype(">f4"), k=s.k.astype(">f4"), v=s.v.astype(">f4")),
        TypeError,
        "`q` has dtype >f4",
    ),
    "k of another dtype": (
        lambda s: s.append(k=bfloat16(5, 2, 16)),
        TypeError,
        "`k` has dtype bfloat16; it must have that of `q`, float32",
    ),
    "v of another dtype": (
        lambda s: s.append(v=bfloat16(5, 2, 16)),
        TypeError,
        "`v` has dtype bfloat16, but `q` has float32",
    ),
    # Shapes
    "q, one axis less": (lambda s: s.append(q=s.q[0]), ValueError, r"`q` has shape \(4, 16\); it"),
    "k, one axis more": (
        lambda s: s.append(k=s.k[None]),
        ValueError,
        r"`k` has shape \(1, 5, 2, 1",
    ),
    "q, wider": (lambda s: s.append(q=s.take(5, 4, 18)), ValueError, "`q` has head_dim 18; it"),
    "k, narrower": (lambda s: s.append(k=s.k[..., :8]), ValueError, "`k` has head_dim 8; it"),
    "q, fewer tokens": (lambda s: s.append(q=s.q[:4]), ValueError, "`q` has 4 tokens, but posi"),
    "k, fewer tokens": (
        lambda s: s.append(k=s.k[:4]),
        ValueError,
        "`k` has 4 tokens, but `q` has 5",
    ),
    "v, fewer tokens": (
        lambda s: s.append(v=s.v[:4]),
        ValueError,
        r"`v` has shape \(4, 2, 16\), but",
    ),
    "v, fewer heads": (
        lambda s: s.append(v=s.v[:, :1]),
        ValueError,
        r"`v` has shape \(5, 1, 16\), b",
    ),
    "q without heads": (lambda s: s.append(q=s.q[:, :0]), ValueError, "`q` has shape .* one head"),
    "no keys": (
        lambda s: s.append(k=s.k[:, :0], v=s.v[:, :0]),
        ValueError,
        "`k` has 0 heads of 16, but `cache` has 2 heads of 16",
    ),
    "more heads than the cache": (
        lambda s: s.append(k=s.take(5, 4, 16), v=s.take(5, 4, 16)),
        ValueError,
        "`k` has 4 heads of 16, but `cache` has 2 heads of 16",
    ),
    "v, narrower than the cache": (
        lambda s: s.append(v=s.v[..., :8]),
        ValueError,
        "`v` has 2 heads of 8, but `cache` has 2 heads of 16",
    ),
    "keys of another width than the cache": (
        lambda s: s.append(cache=KVCache(s.take(3, 4, 2, 18), s.value)),
        ValueError,
        "`k` has 2 heads of 16, but `cache` has 2 heads of 18",
    ),
    # The cache
    "cache, an array": (
        lambda s: s.append(cache=s.key),
        TypeError,
        "`cache` is a ndarray; .*KVCach",
    ),
    "cache, a pair": (lambda s: s.append(cache=(s.key, s.value)), TypeError, "`cache` is a tuple"),
    "cache, the class": (lambda s: s.append(cache=KVCache), TypeError, "`cache` is a type"),
    "cache, of a subclass": (
        lambda s: s.append(cache=subclass(KVCache)(s.key, s.value)),
        TypeError,
        "`cache` is a Sub; it must be a rope_cpu.KVCache .no subclass",
    ),
    # Slots
    "batch, of a subclass": (
        lambda s: s.append(slots=subclass(Batch)(**BATCH)),
        TypeError,
        "`slot_mapping` is a Sub; it must be a rope_cpu.Batch .no subclass",
    ),
    "slot past the cache": (
        lambda s: s.append(slots=[9, 0, 1, 12, 2]),
        ValueError,
        "`slot_mapping` holds 12; a slot of this cache is from 0 to 11, and -1 means",
    ),
    "slot -2": (lambda s: s.append(slots=[9, 0, -2, 4, 2]), ValueError, "`slot_mapping` holds -2"),
    "the last slot beyond": (
        lambda s: s.append(slots=[9, 0, 1, 4, 2**62]),
        ValueError,
        "`slot_mapping` holds 4611686018427387904",
    ),
    "a slot twice": (
        lambda s: s.append(slots=[9, 0, -1, 4, 9]),
        ValueError,
        "`slot_mapping` holds slot 9 twice; each token needs a slot of its own",
    ),
    "slot 0 twice": (lambda s: s.append(slots=[0, 0, -1, -1, 9]), ValueError, "holds slot 0 twice"),
    "fewer slots": (
        lambda s: s.append(slots=[9, 0, 1, 4]),
        ValueError,
        "`slot_mapping` has 4 slots .*but `q` has 5 tokens; each token needs a slot, or -1",
    ),
    "one slot": (lambda s: s.append(slots=[3]), ValueError, "`slot_mapping` has 1 slots"),
    "no slots": (lambda s: s.append(slots=[]), ValueError, "`slot_mapping` has 0 slots"),
    "slots, a number": (
        lambda s: s.append(slots=3),
        ValueError,
        r"`slot_mapping` has shape \(\); ",
    ),
    "slots with rows": (
        lambda s: s.append(slots=s.slots[None]),
        ValueError,
        r"`slot_mapping` has shape \(1, 5\); with layout 'thd' it must be \(tokens,\)",
    ),
    "slots, floats": (
        lambda s: s.append(slots=s.slots.astype(float)),
        TypeError,
        "`slot_mapping` has dtype float64; it must hold integers",
    ),
    "slots, bool": (
        lambda s: s.append(slots=s.slots > 0),
        TypeError,
        "`slot_mapping` has dtype bool",
    ),
    "slots, None": (lambda s: s.append(slots=None), TypeError, "`slot_mapping` has dtype object"),
    "slots, unequal rows": (
        lambda s: s.append(slots=[[1], [2, 3]]),
        ValueError,
        "`slot_mapping` is",
    ),
    "slots, masked": (
        lambda s: s.append(slots=np.ma.array(s.slots)),
        TypeError,
        "`slot_mapping` is a masked array",
    ),
    "slots, unsigned": (
        lambda s: s.append(slots=np.array([2**64 - 1, 1, 2, 3, 4], np.uint64)),
        ValueError,
        "`slot_mapping` holds 18446744073709551615",
    ),
    # A batch
    "batch of other pages": (
        lambda s: s.append(slots=batch(page_size=8)),
        ValueError,
        "`slot_mapping` has page_size 8, but the pages of `cache` have 4 tokens",
    ),
    "batch of more pages": (
        lambda s: s.append(slots=batch(page_table=[[0, 3]])),
        ValueError,
        "`slot_mapping` writes to page 3, but `cache` has 3 pages",
    ),
    "batch of fewer tokens": (
        lambda s: s.append(slots=batch(query_lens=[4])),
        ValueError,
        "`slot_mapping` has 4 slots .*but `q` has 5 tokens",
    ),
    "batch without tokens": (
        lambda s: s.append(slots=batch(query_lens=[0])),
        ValueError,
        "`slot_mapping` has 0 slots .*but `q` has 5 tokens",
    ),
    "batch in another layout": (
        lambda s: s.append(slots=batch(), plan=s.rope.plan(np.arange(5))),
        ValueError,
        "`slot_mapping` is a Batch, whose tokens are packed, but .* 'bshd'; .*layout='thd'",
    ),
    # Norms
    "q_norm, of a subclass": (
        lambda s: s.append(q_norm=subclass(RMSNorm)(np.ones(16))),
        TypeError,
        "`q_norm` is a Sub; it must be a rope_cpu.RMSNorm .no subclass",
    ),
    "q_norm, an array": (
        lambda s: s.append(q_norm=np.ones(16)),
        TypeError,
        "`q_norm` is .*RMSNorm",
    ),
    "k_norm, a function": (
        lambda s: s.append(k_norm=abs),
        TypeError,
        "`k_norm` is .*RMSNorm",
    ),
    "q_norm of another width": (
        lambda s: s.append(q_norm=RMSNorm(np.ones(64))),
        ValueError,
        "`q_norm` has a weight of 64 elements, but the head vectors that it normalises have 16",
    ),
    "k_norm of another width": (
        lambda s: s.append(k_norm=RMSNorm(np.ones(15))),
        ValueError,
        "`k_norm` has a weight of 15 elements",
    ),
    "v_norm of another width": (
        lambda s: s.append(
            v=s.v[..., :8].copy(),
            cache=KVCache(s.key, s.value[..., :8]),
            v_norm=RMSNorm(np.ones(16)),
        ),
        ValueError,
        "`v_norm` has a weight of 16 elements, .* have 8",
    ),
    # out
    "out, a list": (lambda s: s.append(out=[1]), TypeError, "`out` is a list; .*like `q`"),
    "out, a pair": (lambda s: s.append(out=(s.out, s.k)), TypeError, "`out` is a tuple"),
    "out of another shape": (
        lambda s: s.append(out=s.out[:, :2]),
        ValueError,
        r"`out` has shape \(5, 2, 16\); it must be that of `q`",
    ),
    "out of another dtype": (
        lambda s: s.append(out=s.out.astype("f2")),
        TypeError,
        "`out` has dtype float16; it must be that of `q`, float32",
    ),
    "out, byte order": (
        lambda s: s.append(out=s.out.astype(">f4")),
        TypeError,
        "`out` has dtype >f4",
    ),
    "out, masked": (
        lambda s: s.append(out=np.ma.array(s.out)),
        TypeError,
        "`out` is a masked array",
    ),
    "out, read-only": (
        lambda s: s.append(out=read_only(s.out)),
        ValueError,
        "`out` is read-only; ",
    ),
    "out, overlapping itself": (
        lambda s: s.append(out=np.lib.stride_tricks.as_strided(s.out, s.q.shape, (64, 64, 4))),
        ValueError,
        "`out` has overlapping elements",
    ),
    "out beside q": (
        lambda s: s.append(
            q=s.memory[:320].reshape(5, 4, 16), out=s.memory[16:336].reshape(5, 4, 16)
        ),
        ValueError,
        "`out` shares memory with `q`; it must be the very same array",
    ),
}
# Calls with an output or a cache that shares memory with an input: arguments and error text.
SHARED = {
    "out, k": (lambda s: {"out": s.out, "k": s.out[:, 1:3]}, "`out` shares memory with `k`"),
    "out, v": (lambda s: {"out": s.out, "v": s.out[:, :2]}, "`out` shares memory with `v`"),
    "q in place, k": (
        lambda s: {"q": s.out, "out": s.out, "k": s.out[:, 2:]},
        "`out` shares memory with `k`",
    ),
    "key, q": (
        lambda s: {"q": s.key.reshape(-1)[64:].reshape(5, 4, 16)},
        "`q` shares memory with `cache.key`",
    ),
    "key, k": (
        lambda s: {"k": s.key.reshape(-1)[64:224].reshape(5, 2, 16)},
        "`k` shares memory with `cache.key`",
    ),
    "key, v": (
        lambda s: {"v": s.key.reshape(-1)[64:224].reshape(5, 2, 16)},
        "`v` shares memory with `cache.key`",
    ),
    "value, k": (
        lambda s: {"k": s.value[0:2].reshape(8, 2, 16)[:5]},
        "`k` shares memory with `cache.value`",
    ),
    "value, v": (
        lambda s: {"v": s.value[0:2].reshape(8, 2, 16)[:5]},
        "`v` shares memory with `cache.value`",
    ),
    "value, q": (
        lambda s: {"q": s.value.reshape(-1)[:320].reshape(5, 4, 16)},
        "`q` shares memory with `cache.value`",
    ),
    "key, out": (
        lambda s: {"out": s.key.reshape(-1)[-320:].reshape(5, 4, 16)},
        "`out` shares memory with `cache.key`",
    ),
    "value, out": (
        lambda s: {"out": s.value.reshape(-1)[-320:].reshape(5, 4, 16)},
        "`out` shares memory with `cache.value`",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), APPEND.values(), ids=APPEND)
def test_append_refuses(scene, call, error, message):
    check(scene, call, error, message)


@pytest.mark.parametrize(("arguments", "message"), SHARED.values(), ids=SHARED)
def test_append_refuses_shared_memory(scene, arguments, message):
    check(scene, lambda s: s.append(**arguments(s)), ValueError, message)


SHARED_SCALES = {
    "key_scale, q": lambda s: {"q": _around(s.key_scale, 320).reshape(5, 4, 16)},
    "key_scale, k": lambda s: {"k": _around(s.key_scale, 160).reshape(5, 2, 16)},
    "value_scale, v": lambda s: {"v": _around(s.value_scale, 160).reshape(5, 2, 16)},
    "value_scale, out": lambda s: {"out": _around(s.value_scale, 320).reshape(5, 4, 16)},
    "key_scale, q in place": lambda s: dict.fromkeys(
        ("q", "out"), _around(s.key_scale, 320).reshape(5, 4, 16)
    ),
}


def _around(x, count):
    """Return so many elements of the buffer that `x` is a view of, from its first one on."""
    memory = x.base
    start = (x.ctypes.data - memory.ctypes.data) // x.itemsize
    return memory[start : start + count]


@pytest.mark.parametrize("arguments", SHARED_SCALES.values(), ids=SHARED_SCALES)
def test_append_refuses_memory_of_scales(scene, arguments):
    check(
        scene,
        lambda s: s.append(cache=s.of_int8(), **arguments(s)),
        ValueError,
        "shares memory with `cache.(key|value)_scale`",
    )


@pytest.mark.parametrize("frozen", ["before the cache is made", "afterwards"])
@pytest.mark.parametrize("name", ["key", "value", "key_scale", "value_scale"])
@pytest.mark.parametrize("dtype", steps.CACHE_DTYPES)
def test_append_refuses_read_only_caches(scene, dtype, name, frozen):
    key, value = np.zeros((2, 3, 4, 2, 16), steps.DTYPES[dtype])
    arrays = {"key": key.view(), "value": value.view()}
    if dtype == "int8":
        arrays |= {"key_scale": scene.key_scale.view(), "value_scale": scene.value_scale.view()}
    elif name not in arrays:
        pytest.skip("only int8 has scales")
    if frozen == "before the cache is made":
        arrays[name].flags.writeable = False
    cache = KVCache(**arrays)
    arrays[name].flags.writeable = False
    for q in (scene.q, np.asfortranarray(scene.q)):  # at once, and as a copy
        check(scene, lambda s, q=q: s.append(q=q, cache=cache), ValueError, f"`cache.{name}` is r")
    assert not key.any()
    assert not value.any()


PLANS = {
    "inverse": lambda rope: rope.plan(np.arange(5), layout="thd", inverse=True),
    "shift": lambda rope: rope.shift_plan(np.arange(5), layout="thd"),
    "one shift": lambda rope: rope.shift_plan(5, layout="thd"),
    "rerotate": lambda rope: rope.rerotate_plan(rope, np.arange(5), layout="thd"),
}


@pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)
def test_append_refuses_plans_of_other_operations(scene, make):
    plan = make(scene.rope)
    check(scene, lambda s: s.append(plan=plan), ValueError, "`append` needs a plan of rope.plan")


def test_append_refuses_heads_that_frequencies_do_not_fit(scene):
    rope = RotaryEmbedding.from_inv_freq(np.ones((1, 4, 8)))
    plan = rope.plan(np.arange(5), layout="thd")
    text = "`k` has 2 heads; it must have a multiple of 4"
    check(scene, lambda s: s.append(plan=plan), ValueError, text)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (
            np.arange(6),
            r"`slot_mapping` has shape \(6,\); with layout 'bshd' it must be .batch, seq",
        ),
        (
            np.arange(6).reshape(3, 2),
            r"`slot_mapping` has 6 slots of shape \(3, 2\), but `q` has sh",
        ),
        (
            np.arange(3).reshape(1, 3),
            r"`slot_mapping` has 3 slots of shape \(1, 3\), but `q` has sh",
        ),
        ([[0, 1, 2], [3, 4, 1]], "`slot_mapping` holds slot 1 twice"),
    ],
)
def test_append_refuses_slots_of_another_shape(slots, message):
    plan = RotaryEmbedding(16).plan(np.arange(3))
    cache = KVCache(*np.zeros((2, 3, 4, 2, 16), np.float32))
    x = np.ones((2, 3, 2, 16), np.float32)
    with pytest.raises(ValueError, match=message):
        plan.append(x, x, x, cache, slots)
    assert not cache.key.any()
    assert not cache.value.any()


def random_slots(rng, most):
    """Draw slots below `most`: runs on pages in any order, among them single ones and −1."""
    starts = rng.integers(-1, most, rng.integers(1, 6))
    return np.concatenate([np.arange(a, min(a + rng.integers(1, 6), most)) for a in starts])


def test_slots_are_refused_if_one_is_there_twice(rng):
    cache = KVCache(*np.zeros((2, 8, 4, 1, 2), np.float32))
    moves = RotaryEmbedding(2).shift_plan(0, layout="thd")
    for _ in range(500):
        slots = random_slots(rng, 32)
        kept = slots[slots >= 0].tolist()
        twice = {slot for slot in kept if kept.count(slot) > 1}
        if not twice:
            moves.rotate_cached(cache, slots)
            continue
        with pytest.raises(ValueError, match=r"`slot_mapping` holds slot \d+ twice") as raised:
            moves.rotate_cached(cache, slots)
        assert any(f"slot {slot} twice" in str(raised.value) for slot in twice)


CACHED = {
    "int8": (
        lambda s: s.plan.rotate_cached(s.of_int8(), s.slots),
        TypeError,
        "`cache` is int8, and rotating its keys would round each a second time; keep the keys",
    ),
    "a batch": (
        lambda s: s.plan.rotate_cached(s.cache, batch()),
        TypeError,
        "`slot_mapping` is a Batch, which has the slots of new tokens alone; pass the slots",
    ),
    "an array": (lambda s: s.plan.rotate_cached(s.key, s.slots), TypeError, "`cache` is a ndarray"),
    "a slot twice": (
        lambda s: s.plan.rotate_cached(s.cache, [0, 1, 2, 3, 0]),
        ValueError,
        "`slot_mapping` holds slot 0 twice",
    ),
    "a slot past the cache": (
        lambda s: s.plan.rotate_cached(s.cache, [0, 1, 2, 3, 12]),
        ValueError,
        "`slot_mapping` holds 12; a slot of this cache is from 0 to 11",
    ),
    "slot -2": (lambda s: s.plan.rotate_cached(s.cache, [0, 1, 2, 3, -2]), ValueError, "holds -2"),
    "fewer slots": (
        lambda s: s.plan.rotate_cached(s.cache, [0, 1]),
        ValueError,
        "`slot_mapping` has 2 slots, but positions are given for 5 tokens",
    ),
    "fewer slots than deltas": (
        lambda s: s.rope.shift_plan(np.arange(5), layout="thd").rotate_cached(s.cache, [0, 1]),
        ValueError,
        "`slot_mapping` has 2 slots, but `delta` is given for 5 tokens",
    ),
    "no slots": (lambda s: s.plan.rotate_cached(s.cache, []), ValueError, "has 0 slots, but posi"),
    "rows": (
        lambda s: s.plan.rotate_cached(s.cache, s.slots[None]),
        ValueError,
        r"`slot_mapping` has shape \(1, 5\); with layout 'thd' it must be \(tokens,\)",
    ),
    "another batch": (
        lambda s: s.rope.plan(np.zeros((3, 2), int)).rotate_cached(s.cache, [[0, 1], [2, 3]]),
        ValueError,
        "`slot_mapping` has batch 2, but positions are given for 3",
    ),
    "another width": (
        lambda s: RotaryEmbedding(18).plan([0], layout="thd").rotate_cached(s.cache, [0]),
        ValueError,
        "`cache` has keys of head_dim 16, but this rotary embedding has head_dim 18",
    ),
    "frequencies by head": (
        lambda s: (
            RotaryEmbedding.from_inv_freq(np.ones((1, 4, 8)))
            .plan([0], layout="thd")
            .rotate_cached(s.cache, [0])
        ),
        ValueError,
        "`cache` has 2 heads, but cos and sin differ by head and are for 4 heads",
    ),
    "floats": (
        lambda s: s.plan.rotate_cached(s.cache, s.slots / 2),
        TypeError,
        "dtype float64; it",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), CACHED.values(), ids=CACHED)
def test_rotate_cached_refuses(scene, call, error, message):
    check(scene, call, error, message)


def test_rotate_cached_refuses_a_cache_that_has_become_read_only(scene):
    for cache in (scene.cache, KVCache(scene.key.astype("f2"), scene.value.astype("f2"))):
        cache.key.flags.writeable = False
        before = cache.key.tobytes()
        check(
            scene,
            lambda s, cache=cache: s.plan.rotate_cached(cache, s.slots),
            ValueError,
            "`cache.key` is read-only, and would be written to",
        )
        assert cache.key.tobytes() == before


NORM = RMSNorm(None)
NORMS = {
    "q, float64": (
        lambda s: s.plan(s.q.astype(float), s.k.astype(float), q_norm=NORM),
        TypeError,
        r"`q` has dtype float64; norms .*pass q.astype\(np.float32\)",
    ),
    "x, float64": (
        lambda s: s.plan.rotate(s.q.astype(float), norm=NORM),
        TypeError,
        r"`x` has dtype float64; norms .*pass x.astype\(np.float32\)",
    ),
    "k of another dtype": (
        lambda s: s.plan(s.q, bfloat16(5, 2, 16), k_norm=NORM),
        TypeError,
        "`k` has dtype bfloat16",
    ),
    "norm, an array": (
        lambda s: s.plan.rotate(s.q, norm=np.ones(16)),
        TypeError,
        "`norm` is a ndarray",
    ),
    "q_norm, a number": (
        lambda s: s.plan(s.q, s.k, q_norm=1.0),
        TypeError,
        "`q_norm` is a float; .*RMS",
    ),
    "k_norm, the class": (
        lambda s: s.plan(s.q, s.k, k_norm=RMSNorm),
        TypeError,
        "`k_norm` is a type; ",
    ),
    "norm of another width": (
        lambda s: s.plan.rotate(s.q, norm=RMSNorm(np.ones(64))),
        ValueError,
        "`norm` has a weight of 64 elements, but the head vectors that it normalises have 16",
    ),
    "k_norm of another width": (
        lambda s: s.plan(s.q, s.k, k_norm=RMSNorm(np.ones(8))),
        ValueError,
        "`k_norm` has a weight of 8 elements",
    ),
    "x, a list": (lambda s: s.plan.rotate([1.0], norm=NORM), TypeError, "`x` is a list"),
    "fewer tokens": (
        lambda s: s.plan.rotate(s.q[:4], norm=NORM),
        ValueError,
        "`x` has 4 tokens, but",
    ),
    "out of another shape": (
        lambda s: s.plan.rotate(s.q, s.out[:4], norm=NORM),
        ValueError,
        r"`out` has shape \(4, 4, 16\); it must be that of `x`",
    ),
    "out, read-only": (
        lambda s: s.plan.rotate(s.q, read_only(s.out), norm=NORM),
        ValueError,
        "`out` is read-only",
    ),
    "out, one array": (
        lambda s: s.plan(s.q, s.k, s.out, q_norm=NORM),
        TypeError,
        "`out` has shape .*; it must be a pair of arrays",
    ),
    "outputs share memory": (
        lambda s: s.plan(s.q, s.k, (s.out, s.out[:, :2]), q_norm=NORM),
        ValueError,
        r"`out\[1\]` shares memory with `out\[0\]`",
    ),
    "out of q and k share memory": (
        lambda s: s.plan(s.q, s.out[:, 1:3], (s.out, s.k), q_norm=NORM),
        ValueError,
        r"`out\[0\]` shares memory with `k`",
    ),
    "out of k and q share memory": (
        lambda s: s.plan(s.q, s.k, (s.out, s.q[:, :2]), k_norm=NORM),
        ValueError,
        r"`out\[1\]` shares memory with `q`",
    ),
    "out beside x": (
        lambda s: s.plan.rotate(
            s.memory[:320].reshape(5, 4, 16), s.memory[16:336].reshape(5, 4, 16), norm=NORM
        ),
        ValueError,
        "`out` shares memory with `x`",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), NORMS.values(), ids=NORMS)
def test_norms_of_plans_refuse(scene, call, error, message):
    check(scene, call, error, message)


HOSTILE = {
    "slots that fit memory": lambda s: s.append(slots=np.broadcast_to(np.int64(0), (2**26,))),
    "slots that fit no memory": lambda s: s.append(slots=np.broadcast_to(np.int64(0), (2**59,))),
    "tokens that are not kept": lambda s: s.append(slots=np.broadcast_to(np.int64(-1), (2**26,))),
    "a range of slots": lambda s: s.append(slots=range(2**60)),
    "a nested list": lambda s: s.append(slots=refusals.nested(60)),
    "a slot of many digits": lambda s: s.append(slots=[10**5000] * 5),
    "slots of a text": lambda s: s.append(slots="0" * 10**6),
    "v that fits no memory": lambda s: s.append(v=np.broadcast_to(np.float32(0), (5, 2, 2**50))),
    "a dtype with a long name": lambda s: s.append(q=np.zeros((5, 4, 16), [("x" * 10**6, "f4")])),
    "rotated slots": lambda s: s.rope.shift_plan(1, layout="thd").rotate_cached(
        s.cache, np.broadcast_to(np.int64(0), (2**26,))
    ),
    "the most slots": lambda s: s.rope.shift_plan(1, layout="thd").rotate_cached(
        s.cache, np.broadcast_to(np.int64(0), (2**22,))
    ),
    "a norm of a text": lambda s: s.plan.rotate(s.q, norm="x" * 10**7),
    "a norm of a list": lambda s: s.plan.rotate(s.q, norm=[[0] * 1000] * 1000),
}


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE)
def test_hostile_arguments_are_refused_at_once(scene, call):
    refusals.refusal(lambda: call(scene))  # loads the kernels
    before = scene.bytes()
    start = time.process_time()
    with pytest.raises((ValueError, TypeError)):
        call(scene)
    assert time.process_time() - start < 0.5
    assert scene.bytes() == before


def test_what_is_not_refused(scene):
    """The scene itself is valid: what the tests above refuse is refused for the reason given."""
    q_rot = scene.append(out=scene.out, q_norm=NORM, k_norm=NORM, v_norm=NORM)
    assert q_rot is scene.out
    scene.append(cache=scene.of_int8(), slots=batch())
    scene.plan.rotate_cached(scene.cache, scene.slots)
    scene.plan(scene.q, scene.k, (scene.out, scene.k), k_norm=NORM)
