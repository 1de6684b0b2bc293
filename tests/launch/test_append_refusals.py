"""What append, rotate_cached and norms of plans refuse, in words, with nothing written."""

import time

import numpy as np
import pytest
import refusals
from launch import steps

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

    def over(self, start, *shape):
        """Return an array of this shape in the memory of the others."""
        return self.memory[start : start + int(np.prod(shape))].reshape(shape)

    def bytes(self):
        return self.memory.tobytes() + self.int8.tobytes()


@pytest.fixture
def scene():
    return Scene()


def check(scene, call, error, message):
    """Return the error of a call that is refused in such words, with nothing written."""
    before = scene.bytes()
    with pytest.raises(error, match=message) as caught:
        call(scene)
    assert len(str(caught.value)) < 2000
    assert scene.bytes() == before
    return caught.value


def refusals_of(*rows):
    """Parametrize a test by rows of the refused argument, the call, the class, and words to pin."""
    ids = [f"{number}-{row[0]}" for number, row in enumerate(rows)]
    rows = [row if len(row) == 4 else (*row, "") for row in rows]
    return pytest.mark.parametrize(("argument", "call", "error", "words"), rows, ids=ids)


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


# `tests/fuzz/test_refusals.py` draws wrong types, dtypes and shapes of each argument alone.
@refusals_of(
    ("q", lambda s: {"q": s.q.astype(float)}, TypeError, r".*norms and.*q.astype\(np.float32\)"),
    ("k", lambda s: {"k": s.k.astype(float)}, TypeError),
    ("q", lambda s: {name: getattr(s, name).astype(float) for name in "qkv"}, TypeError),
    ("q", lambda s: {name: getattr(s, name).astype(">f4") for name in "qkv"}, TypeError),
    ("k", lambda s: {"k": bfloat16(5, 2, 16)}, TypeError),
    ("v", lambda s: {"v": bfloat16(5, 2, 16)}, TypeError),
    ("q", lambda s: {"q": s.q[:4]}, ValueError),
    ("k", lambda s: {"k": s.k[:4]}, ValueError),
    ("v", lambda s: {"v": s.v[:4]}, ValueError),
    ("v", lambda s: {"v": s.v[:, :1]}, ValueError),
    ("q", lambda s: {"q": s.q[:, :0]}, ValueError),
    ("k", lambda s: {"k": s.k[:, :0], "v": s.v[:, :0]}, ValueError),
    ("k", lambda s: {"k": s.take(5, 3, 16), "v": s.take(5, 3, 16)}, ValueError, ".*of 16$"),
    (
        "k",
        lambda s: {"cache": heads_first(s), "slots": np.arange(5)},
        ValueError,
        r".*2 heads .*key\.transpose\(0, 2, 1, 3\)$",
    ),
    ("slot_mapping", lambda s: {"cache": heads_first(s), "slots": batch()}, ValueError, ".*transp"),
    ("v", lambda s: {"v": s.v[..., :8]}, ValueError),
    ("k", lambda s: {"cache": KVCache(s.take(3, 4, 2, 18), s.value)}, ValueError),
    ("cache", lambda s: {"cache": (s.key, s.value)}, TypeError),
    ("cache", lambda s: {"cache": KVCache}, TypeError),
    ("cache", lambda s: {"cache": subclass(KVCache)(s.key, s.value)}, TypeError, ".*no subclass"),
    ("slot_mapping", lambda s: {"slots": subclass(Batch)(**BATCH)}, TypeError, ".*no subclass"),
    ("slot_mapping", lambda s: {"slots": [9, 0, 1, 12, 2]}, ValueError, ".* -1 for a token"),
    ("slot_mapping", lambda s: {"slots": [9, 0, 1, 4]}, ValueError),
    ("slot_mapping", lambda s: {"slots": []}, ValueError),
    ("slot_mapping", lambda s: {"slots": 3}, ValueError),
    ("slot_mapping", lambda s: {"slots": s.slots > 0}, TypeError),
    ("slot_mapping", lambda s: {"slots": [[1], [2, 3]]}, ValueError),
    ("slot_mapping", lambda s: {"slots": np.array([2**64 - 1, 1, 2, 3, 4], "u8")}, ValueError),
    ("slot_mapping", lambda s: {"slots": batch(page_size=8)}, ValueError),
    ("slot_mapping", lambda s: {"slots": batch(page_table=[[0, 3]])}, ValueError),
    ("slot_mapping", lambda s: {"slots": batch(page_table=[[1, 1]])}, ValueError, " gives slot 4 "),
    ("slot_mapping", lambda s: {"slots": one_by_one()}, ValueError, " gives .*`attention` alone$"),
    ("slot_mapping", lambda s: {"slots": batch(query_lens=[4])}, ValueError),
    ("slot_mapping", lambda s: {"slots": batch(query_lens=[0])}, ValueError),
    ("slot_mapping", lambda s: {"slots": batch(), "plan": s.rope.plan(np.arange(5))}, ValueError),
    ("q_norm", lambda s: {"q_norm": subclass(RMSNorm)(np.ones(16))}, TypeError, ".*no subclass"),
    ("q_norm", lambda s: {"q_norm": np.ones(16)}, TypeError, ".*RMSNorm"),
    ("k_norm", lambda s: {"k_norm": abs}, TypeError),
    ("q_norm", lambda s: {"q_norm": RMSNorm(np.ones(64))}, ValueError, " has a weight of 64 .* 16"),
    ("k_norm", lambda s: {"k_norm": RMSNorm(np.ones(15))}, ValueError),
    ("v_norm", lambda s: narrow_values(s) | {"v_norm": RMSNorm(np.ones(16))}, ValueError),
    ("out", lambda s: {"out": (s.out, s.k)}, TypeError),
    ("out", lambda s: {"out": s.out[:, :2]}, ValueError),
    ("out", lambda s: {"out": s.out.astype("f2")}, TypeError),
    ("out", lambda s: {"q": s.over(0, 5, 4, 16), "out": s.over(16, 5, 4, 16)}, ValueError),
)
def test_append_refuses(scene, argument, call, error, words):
    caught = check(scene, lambda s: s.append(**call(s)), error, f"^`{argument}`{words}")
    assert caught.argument == argument


def one_by_one():
    """Return a batch for tokens that attend to each other both ways."""
    return batch(seq_lens=[5] * 5, query_lens=[1] * 5, page_table=[[0, 1]] * 5)


def heads_first(scene):
    """Return a cache whose arrays (pages, heads, page_size, head_dim) are not transposed."""
    shape = (3, 2, 4, 16)
    return KVCache(scene.key.reshape(shape), scene.value.reshape(shape))


def narrow_values(scene):
    return {"v": scene.v[..., :8].copy(), "cache": KVCache(scene.key, scene.value[..., :8])}


def wider_values_between_heads():
    """Values of 32 elements from the end of each head vector of `out` on, into the next one."""
    memory = np.zeros(5 * 160 + 16, np.float32)
    strides = (640, 160, 4)  # bytes
    out = np.lib.stride_tricks.as_strided(memory, (5, 4, 16), strides)
    v = np.lib.stride_tricks.as_strided(memory[16:], (5, 2, 32), strides)
    cache = KVCache.zeros(8, 4, 2, 16, value_dim=32, dtype="float32")
    return {"out": out, "v": v, "cache": cache}


# Calls with an output or a cache that shares memory with an input.
@pytest.mark.parametrize(
    ("argument", "other", "arguments"),
    [
        ("out", "k", lambda s: {"out": s.out, "k": s.out[:, 1:3]}),
        ("out", "v", lambda s: {"out": s.out, "v": s.out[:, :2]}),
        ("out", "k", lambda s: {"q": s.out, "out": s.out, "k": s.out[:, 2:]}),
        ("out", "v", lambda s: wider_values_between_heads()),
        ("q", "cache.key", lambda s: {"q": s.key.reshape(-1)[64:].reshape(5, 4, 16)}),
        ("k", "cache.key", lambda s: {"k": s.key.reshape(-1)[64:224].reshape(5, 2, 16)}),
        ("v", "cache.key", lambda s: {"v": s.key.reshape(-1)[64:224].reshape(5, 2, 16)}),
        ("k", "cache.value", lambda s: {"k": s.value[0:2].reshape(8, 2, 16)[:5]}),
        ("v", "cache.value", lambda s: {"v": s.value[0:2].reshape(8, 2, 16)[:5]}),
        ("q", "cache.value", lambda s: {"q": s.value.reshape(-1)[:320].reshape(5, 4, 16)}),
        ("out", "cache.key", lambda s: {"out": s.key.reshape(-1)[-320:].reshape(5, 4, 16)}),
        ("out", "cache.value", lambda s: {"out": s.value.reshape(-1)[-320:].reshape(5, 4, 16)}),
        ("q", "cache.key_scale", lambda s: {"q": on_scales(s, "key_scale", 5, 4, 16)}),
        ("k", "cache.key_scale", lambda s: {"k": on_scales(s, "key_scale", 5, 2, 16)}),
        ("v", "cache.value_scale", lambda s: {"v": on_scales(s, "value_scale", 5, 2, 16)}),
        ("out", "cache.value_scale", lambda s: {"out": on_scales(s, "value_scale", 5, 4, 16)}),
    ],
)
def test_append_refuses_shared_memory(scene, argument, other, arguments):
    text = f"`{argument}` shares memory with `{other}`"
    if other.endswith("scale"):
        scene.cache = scene.of_int8()
    check(scene, lambda s: s.append(**arguments(s)), ValueError, text)


def on_scales(scene, name, *shape):
    """Return an array in the memory of the scales, and behind them."""
    start = (getattr(scene, name).ctypes.data - scene.memory.ctypes.data) // 4
    return scene.over(start, *shape)


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


SLOTS = [np.arange(6), np.arange(6).reshape(3, 2), [[0, 1, 2]], [[0, 1, 2], [3, 4, 1]]]


@pytest.mark.parametrize("slots", SLOTS, ids=["no rows", "other rows", "fewer rows", "twice"])
def test_append_refuses_slots_of_batch_rows(slots):
    plan = RotaryEmbedding(16).plan(np.arange(3))
    cache = KVCache(*np.zeros((2, 3, 4, 2, 16), np.float32))
    x = np.ones((2, 3, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"^`slot_mapping` "):
        plan.append(x, x, x, cache, slots)
    assert not cache.key.any()
    assert not cache.value.any()


def random_slots(rng, most):
    """Draw slots below `most`: runs on pages in any order, among them single ones and −1."""
    starts = rng.integers(-1, most, rng.integers(1, rng.choice([6, 40])))
    return np.concatenate([np.arange(a, min(a + rng.integers(1, 6), most)) for a in starts])


def test_slots_are_refused_if_one_is_there_twice(rng):
    cache = KVCache(*np.zeros((2, 200, 4, 1, 2), np.float32))
    rope = RotaryEmbedding(2)
    moves = rope.shift_plan(0, layout="thd")

    def append(cache, slots):
        x = np.ones((len(slots), 1, 2), np.float32)
        rope.plan(np.arange(len(slots)), layout="thd").append(x, x, x, cache, slots)

    for _ in range(100):
        slots = random_slots(rng, rng.choice([32, 800]))
        kept = slots[slots >= 0].tolist()
        twice = {slot for slot in kept if kept.count(slot) > 1}
        for call in (moves.rotate_cached, append):
            if not twice:
                call(cache, slots)
                continue
            with pytest.raises(ValueError, match=r"`slot_mapping` holds slot \d+ twice") as raised:
                call(cache, slots)
            assert any(f"slot {slot} twice" in str(raised.value) for slot in twice)


@pytest.mark.parametrize("tokens", [1, 2, 64, 65, 300])
def test_each_slot_out_of_range_is_refused(tokens, rng):
    cache = KVCache(*np.zeros((2, 100, 4, 1, 2), np.float32))
    plan = RotaryEmbedding(2).plan(np.arange(tokens), layout="thd")
    x = np.ones((tokens, 1, 2), np.float32)
    slots = rng.permutation(400)[:tokens]
    for wrong in (-2, 400):
        slots[rng.integers(tokens)] = wrong
        with pytest.raises(ValueError, match=f"`slot_mapping` holds {wrong}; .* 0 to 399"):
            plan.append(x, x, x, cache, slots)
        slots = rng.permutation(400)[:tokens]
    assert not cache.key.any()


BY_HEAD = RotaryEmbedding.from_inv_freq(np.ones((1, 4, 8)))
WIDER = RotaryEmbedding(18)


@refusals_of(
    ("cache", lambda s: s.plan.rotate_cached(s.of_int8(), s.slots), TypeError, ".*in floats"),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, batch()), TypeError, ".*cached keys"),
    ("cache", lambda s: s.plan.rotate_cached(s.key, s.slots), TypeError),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, [0, 1, 2, 3, 12]), ValueError),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, [0, 1, 2, 3, -2]), ValueError),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, [0, 1]), ValueError, ".*positions"),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, []), ValueError),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, s.slots[None]), ValueError),
    ("slot_mapping", lambda s: s.plan.rotate_cached(s.cache, s.slots / 2), TypeError),
    ("slot_mapping", lambda s: rows(s).rotate_cached(s.cache, [[0, 1], [2, 3]]), ValueError),
    ("cache", lambda s: WIDER.plan([0], layout="thd").rotate_cached(s.cache, [0]), ValueError),
    ("cache", lambda s: BY_HEAD.plan([0], layout="thd").rotate_cached(s.cache, [0]), ValueError),
)
def test_rotate_cached_refuses(scene, argument, call, error, words):
    check(scene, call, error, f"^`{argument}`{words}")


def rows(scene):
    return scene.rope.plan(np.zeros((3, 2), int))


def test_rotate_cached_refuses_a_cache_that_has_become_read_only(scene):
    for cache in (scene.cache, KVCache(scene.key.astype("f2"), scene.value.astype("f2"))):
        cache.key.flags.writeable = False
        before = cache.key.tobytes()
        check(
            scene,
            lambda s, cache=cache: s.plan.rotate_cached(cache, s.slots),
            ValueError,
            "`cache.key` is read-only; .* from writeable arrays",
        )
        assert cache.key.tobytes() == before


NORM = RMSNorm(None)


@refusals_of(
    ("q", lambda s: s.plan(s.q.astype(float), s.k.astype(float), q_norm=NORM), TypeError),
    ("x", lambda s: s.plan.rotate(s.q.astype(float), norm=NORM), TypeError, r".*x.astype\(np.flo"),
    ("k", lambda s: s.plan(s.q, bfloat16(5, 2, 16), k_norm=NORM), TypeError),
    ("norm", lambda s: s.plan.rotate(s.q, norm=np.ones(16)), TypeError),
    ("q_norm", lambda s: s.plan(s.q, s.k, q_norm=1.0), TypeError),
    ("k_norm", lambda s: s.plan(s.q, s.k, k_norm=RMSNorm), TypeError),
    ("norm", lambda s: s.plan.rotate(s.q, norm=RMSNorm(np.ones(64))), ValueError),
    ("k_norm", lambda s: s.plan(s.q, s.k, k_norm=RMSNorm(np.ones(8))), ValueError),
    ("x", lambda s: s.plan.rotate([1.0], norm=NORM), TypeError),
    ("x", lambda s: s.rope.shift_plan(1, layout="thd").rotate([1.0], norm=NORM), TypeError),
    ("x", lambda s: s.plan.rotate(s.q[:4], norm=NORM), ValueError),
    ("out", lambda s: s.plan.rotate(s.q, s.out[:4], norm=NORM), ValueError),
    ("out", lambda s: s.plan.rotate(s.q, read_only(s.out), norm=NORM), ValueError),
    ("out", lambda s: s.plan(s.q, s.k, s.out, q_norm=NORM), TypeError),
    ("out.1.", lambda s: s.plan(s.q, s.k, (s.out, s.out[:, :2]), q_norm=NORM), ValueError),
    ("out.0.", lambda s: s.plan(s.q, s.out[:, 1:3], (s.out, s.k), q_norm=NORM), ValueError),
    ("out.1.", lambda s: s.plan(s.q, s.k, (s.out, s.q[:, :2]), k_norm=NORM), ValueError),
    (
        "out",
        lambda s: s.plan.rotate(s.over(0, 5, 4, 16), s.over(16, 5, 4, 16), norm=NORM),
        ValueError,
    ),
)
def test_norms_of_plans_refuse(scene, argument, call, error, words):
    check(scene, call, error, f"^`{argument}`{words}")


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
