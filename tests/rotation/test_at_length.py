"""RotaryEmbedding.at_length and packed sequences; tests by rope type are in tests/frequencies."""

import array
import collections
import pickle
import re

import numpy as np
import oracle
import pytest
from oracle import draw

from rope_cpu import RotaryEmbedding
from rope_cpu.positions import packed

ORIGINAL = 32
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [4.0, 5.0, 7.0, 9.0]}
SECTIONS = {
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL, **FACTORS},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic_powers": {"rope_type": "dynamic_powers"},
}
# Sequences without tokens, of the original length, one token longer, and much longer.
LENGTHS = [3, 0, 40, ORIGINAL, ORIGINAL + 1, 200, 0]
COUNTS = [3, 0, 1, ORIGINAL, 2, 5, 0]  # the last tokens of each sequence
CU_SEQLENS = np.concatenate([[0], np.cumsum(COUNTS)])
IDS = np.concatenate([np.arange(n - count, n) for n, count in zip(LENGTHS, COUNTS, strict=True)])


def embedding(kind, **options):
    """Return the rotary embedding of a rope type, of 4 pairs in 10 elements."""
    options = {"rotary_dim": 8, "max_position_embeddings": 4 * ORIGINAL, **options}
    if kind != "longrope":
        options["max_position_embeddings"] = ORIGINAL
    return RotaryEmbedding(10, scaling=SECTIONS[kind], **options)


def sequences(x):
    """Return the tokens of each sequence of a packed array."""
    return np.split(x, CU_SEQLENS[1:-1])


def test_a_length_plays_no_part_where_frequencies_are_fixed():
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.1])
    assert rope.at_length(5) is rope
    assert rope.at_length([5, 6]) is rope
    assert rope.at_length([5, 0]) is rope


def test_packed_sequences_have_the_frequencies_of_their_own_lengths(dtype, interleaved, rng):
    """LongRoPE from its formula: 1 / (factor · base^(2i/d)), and √(1 + ln s / ln L)."""
    rope = embedding("longrope", interleaved=interleaved)
    x = draw(rng, (len(IDS), 2, 10), dtype)
    plan = rope.at_length(LENGTHS).plan(IDS, layout="thd", cu_seqlens=CU_SEQLENS)
    result = plan.rotate(x)
    attention_factor = np.sqrt(1 + np.log(4) / np.log(ORIGINAL))
    # The formula is rounded five times, which shifts an angle by as many units.
    shift = 5 * 2.0**-53 * np.abs(IDS).max()
    for length, rotated, xs, ids in zip(
        LENGTHS, sequences(result), sequences(x), sequences(IDS), strict=True
    ):
        factors = FACTORS["long_factor" if length > ORIGINAL else "short_factor"]
        if not len(ids):
            continue
        cos, sin = oracle.cos_sin(ids, oracle.inv_freq(8) / factors)
        exact, reach = oracle.rotate(
            xs[..., :8], attention_factor * cos, attention_factor * sin, interleaved
        )
        allowed = oracle.bound(exact, reach, x.dtype, attention_factor)
        allowed += (shift + 2 * 2.0**-53) * attention_factor * reach
        assert (np.abs(rotated[..., :8].astype(np.float64) - exact) <= allowed).all()
        assert rotated[..., 8:].tobytes() == xs[..., 8:].tobytes()


def mrope(kind):
    """Return an M-RoPE of a rope type."""
    original = 4 * ORIGINAL if kind == "longrope" else ORIGINAL
    scaling = {**SECTIONS[kind], "max_position_embeddings": original}
    return RotaryEmbedding.mrope(8, (2, 1, 1), rope_theta=1e4, scaling=scaling)


ROPES = [
    *(pytest.param(embedding(kind), id=kind) for kind in SECTIONS),
    *(pytest.param(embedding(kind, angle_dtype="float32"), id=f"{kind}, f32") for kind in SECTIONS),
    *(pytest.param(mrope(kind), id=f"{kind}, mrope") for kind in SECTIONS),
]


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rope", ROPES)
def test_packed_sequences_rotate_as_each_does_alone(rope, inverse, dtype, rng):
    ids = rng.integers(0, 4 * ORIGINAL, (len(IDS), *[rope.axes] * (rope.axes > 1)))
    x = draw(rng, (len(ids), 4, rope.head_dim), dtype)
    plan = rope.at_length(LENGTHS).plan(
        ids, layout="thd", inverse=inverse, cu_seqlens=CU_SEQLENS.tolist()
    )
    alone = [
        rope.at_length([n]).plan(ids_, layout="thd", inverse=inverse).rotate(xs)
        for n, ids_, xs in zip(LENGTHS, sequences(ids), sequences(x), strict=True)
    ]
    assert plan.rotate(x).tobytes() == np.concatenate(alone).tobytes()
    assert plan(x, x)[1].tobytes() == plan.rotate(x).tobytes()
    assert pickle.loads(pickle.dumps(plan)).rotate(x).tobytes() == plan.rotate(x).tobytes()
    assert f"batch=1, seq={len(ids)}, layout='thd'" in repr(plan)


def test_batch_rows_rotate_as_packed_sequences_do(rng):
    rope = embedding("longrope").at_length([40, 5, 6])
    x = draw(rng, (3, 4, 2, 10), np.float32)
    ids = rng.integers(0, 40, (3, 4))
    plan = rope.plan(ids.reshape(-1), layout="thd", cu_seqlens=[0, 4, 8, 12])
    assert np.array_equal(rope.rotate(x, ids).reshape(12, 2, 10), plan.rotate(x.reshape(12, 2, 10)))


@pytest.mark.parametrize("lengths", [7, [7], [7, 9, 9]])
def test_sequences_of_equal_frequencies_may_be_packed(lengths, rng):
    rope = embedding("longrope").at_length(lengths)
    x = draw(rng, (5, 2, 10), np.float32)
    plan = rope.plan([0, 1, 0, 1, 2], layout="thd", cu_seqlens=[0, 2, 2, 5])
    assert np.array_equal(
        plan.rotate(x), embedding("longrope").at_length(7).rotate(x, [0, 1, 0, 1, 2], layout="thd")
    )


def test_cu_seqlens_change_nothing_where_lengths_play_no_part(rng):
    by_head = RotaryEmbedding.from_inv_freq(rng.uniform(-1, 1, (2, 2, 5)))
    ids = rng.integers(0, 99, (6, 2))
    x = draw(rng, (6, 4, 10), np.float32)
    usual = by_head.plan(ids, layout="thd").rotate(x)
    for rope in (by_head, by_head.at_length([2, 0, 4])):
        plan = rope.plan(ids, layout="thd", cu_seqlens=[0, 2, 2, 6])
        assert np.array_equal(plan.rotate(x), usual)


@pytest.mark.parametrize("lengths", [LENGTHS, [40, 41], [5], 40, range(3), np.array(LENGTHS)])
@pytest.mark.parametrize("rope", ROPES)
def test_lengths_are_those_of_the_spec(rope, lengths):
    at = rope.at_length(lengths)
    given = np.atleast_1d(lengths).tolist()
    spec = rope.spec.at_length(given)
    assert at.spec == spec
    assert at == type(rope).from_spec(spec) == pickle.loads(pickle.dumps(at))
    assert hash(at) == hash(type(rope).from_spec(spec))
    assert np.array_equal(at.inv_freq, type(rope).from_spec(spec).inv_freq)
    assert at.attention_factor == spec.attention_factor[0]
    assert f"lengths={tuple(given)}" in repr(at)
    assert at.at_length(7) == rope.at_length(7)


def test_equal_frequencies_are_computed_once(monkeypatch):
    """A server asks for lengths at every step."""
    rope = embedding("longrope", rope_theta=12345.0)
    rope.at_length([5, 40])
    monkeypatch.setattr(type(rope.spec), "at_length", None)
    for step in range(3):
        rope.at_length([5 + step, 6, 41 + step, 0])


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
X = np.zeros((2, 3, 4, 6), np.float32)
UNSIZED = RotaryEmbedding(
    6, scaling={"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}
)
SIZED = UNSIZED.at_length([3, 9, 12])


class ArrayOfOthers:
    """An array of another library, such as a tensor of PyTorch."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)


def plan(rope, cu_seqlens, layout="thd", ids=(0, 1, 2, 3)):
    return rope.plan(ids, layout=layout, cu_seqlens=cu_seqlens)


REFUSED = [
    (lambda: ROPE.at_length("12"), TypeError, "`seq_len` is '12'"),
    (lambda: ROPE.at_length(0), ValueError, "`seq_len` is 0; it must be at least 1"),
    (lambda: ROPE.at_length(np.array(0)), ValueError, "`seq_len` is 0; it must be at least 1"),
    (lambda: ROPE.at_length([3, -1]), ValueError, "`seq_len` is -1; it must be at least 0"),
    (lambda: ROPE.at_length(1.5), TypeError, "`seq_len` is 1.5; it must be an integer"),
    (lambda: ROPE.at_length([2, True]), TypeError, "`seq_len` is True; it must be an integer"),
    (lambda: ROPE.at_length([2, 2**53 + 1]), ValueError, "it must be at most 9007199254740992"),
    (lambda: ROPE.at_length({3, 5}), TypeError, "`seq_len` is .*; it must be an integer"),
    (lambda: ROPE.at_length(np.ma.array([3, 5])), TypeError, "`seq_len` is a masked array"),
    (lambda: SIZED.rotate(X), ValueError, "`x` has batch 2 .*batch 3, .* lengths"),
    (lambda: SIZED.plan([0, 1], layout="thd"), ValueError, "`layout` is 'thd'.* 3 lengths "),
    (lambda: plan(UNSIZED, [0, 4]), ValueError, "'dynamic' depends on the sequence length"),
    (lambda: plan(SIZED, [0, 1, 4]), ValueError, "`cu_seqlens` is for 2 sequences; it must"),
]
# Whether lengths play a part or not.
CU_SEQLENS_REFUSED = [
    (lambda r: plan(r, [0, 1, 1, 4], "bshd"), ValueError, "`cu_seqlens` is given with layout"),
    (lambda r: plan(r, [0, 1, 1, 5]), ValueError, "`cu_seqlens` ends at 5; .* tokens, 4"),
    (lambda r: plan(r, [0, 3, 1, 4]), ValueError, "`cu_seqlens` is .*never decrease"),
    (lambda r: plan(r, [1, 3, 3, 4]), ValueError, "`cu_seqlens` is .*must .*start at 0"),
    (lambda r: plan(r, []), ValueError, "`cu_seqlens` is array.*start at 0"),
    (lambda r: plan(r, 4), ValueError, "`cu_seqlens` is array.4.; it must be one-dimensional"),
    (lambda r: plan(r, [[0, 4]]), ValueError, "`cu_seqlens` is .*one-dimensional"),
    (lambda r: plan(r, [0, 1.0, 2.0, 4.0]), TypeError, "`cu_seqlens` has dtype float64"),
    (lambda r: plan(r, "text"), TypeError, "`cu_seqlens` has dtype <U4"),
    (lambda r: plan(r, np.array([0, 1, 1, 2**63], np.uint64)), ValueError, "`cu_seqlens` holds"),
    (lambda r: plan(r, np.zeros(2**20, int)), ValueError, "`cu_seqlens` ends at 0"),
    (lambda r: plan(r, [0, 1, 1, 4], ids=[[0, 1, 2, 3]]), ValueError, "`position_ids` has shape "),
]
REFUSED += [
    (lambda call=call, rope=rope: call(rope), error, message)
    for call, error, message in CU_SEQLENS_REFUSED
    for rope in (ROPE, SIZED)
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("count", [0, 1, 2**13 + 1])
@pytest.mark.parametrize("rope", [ROPE, *ROPES])
def test_a_step_has_any_number_of_sequences(rope, count, rng):
    """Each with another length, and one new token."""
    lengths = rng.permutation(np.arange(1, count + 1))
    ids = rng.integers(0, 99, (count, *[rope.axes] * (rope.axes > 1)))
    x = draw(rng, (count, 2, rope.head_dim), np.float32)
    at = rope.at_length(lengths)
    rotated = at.plan(ids, layout="thd", cu_seqlens=np.arange(count + 1)).rotate(x)
    assert rotated.shape == x.shape
    for token in {0, count // 2, count - 1} if count else ():
        one = slice(token, token + 1)
        alone = rope.at_length(int(lengths[token])).plan(ids[one], layout="thd").rotate(x[one])
        assert np.array_equal(rotated[one], alone)


@pytest.mark.parametrize("make", [tuple, np.array, array.array, collections.deque, ArrayOfOthers])
def test_lengths_are_any_sequence_or_array(make):
    given = make("q", LENGTHS) if make is array.array else make(LENGTHS)
    for rope in (ROPE, embedding("dynamic")):
        assert rope.at_length(given) == rope.at_length(LENGTHS)


def test_sequences_without_tokens():
    rope = embedding("dynamic").at_length([0, 0])
    plan = rope.plan([], layout="thd", cu_seqlens=[0, 0, 0])
    assert plan.rotate(np.zeros((0, 2, 10), np.float32)).shape == (0, 2, 10)
    assert packed([0, 0, 0]).tolist() == []
    assert re.search(r"lengths=\(0, 0\)", repr(rope))
