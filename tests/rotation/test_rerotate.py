"""RotaryEmbedding.rerotate_plan: rotated keys changed to the rotation of other frequencies."""

import numpy as np
import oracle
import pytest
from oracle import draw

from rope_cpu import RotaryEmbedding

ARRAYS = {"old": (1.25, oracle.inv_freq(8)), "new": (0.75, oracle.inv_freq(8, 500000.0))}


def pair(interleaved=False, **options):
    """Return an old and a new rotary embedding, of 4 pairs in 10 elements."""
    return [
        RotaryEmbedding.from_inv_freq(
            inv_freq, attention_factor=factor, head_dim=10, interleaved=interleaved, **options
        )
        for factor, inv_freq in ARRAYS.values()
    ]


def exact(keys, positions, new, old):
    """Return the exact result for keys (batch, seq, heads, head_dim), and its allowed error.

    inv_freq of new and old: (axes, pairs).
    """
    stacked = np.concatenate([np.atleast_2d(new.inv_freq), -np.atleast_2d(old.inv_freq)])
    cos, sin = oracle.cos_sin_axes(np.concatenate([positions, positions], axis=-1), stacked)
    factor = new.attention_factor / old.attention_factor
    rotated, reach = oracle.rotate(
        keys[..., : new.rotary_dim], factor * cos, factor * sin, new.interleaved, new.blocks
    )
    return rotated, oracle.bound(rotated, reach, keys.dtype, factor)


def assert_exact(result, keys, positions, new, old):
    rotated, allowed = exact(keys, positions, new, old)
    assert result.dtype == keys.dtype
    error = np.abs(result[..., : new.rotary_dim].astype(np.float64) - rotated)
    assert (error <= allowed).all()
    tail = slice(new.rotary_dim, None)
    assert result[..., tail].tobytes() == keys[..., tail].tobytes()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
def test_keys_of_an_old_rotation_get_the_new_one(layout, dtype, interleaved, rng):
    old, new = pair(interleaved)
    batch = 1 if layout == "thd" else 2
    positions = rng.integers(-9999, 9999, (batch, 5))
    keys = draw(rng, (batch, 5, 3, 10), dtype)
    ids = positions[0] if layout == "thd" else positions
    plan = new.rerotate_plan(old, ids, layout=layout)
    given = oracle.to_layout(keys, layout)
    result = plan.rotate(given)
    assert_exact(oracle.from_layout(result, layout), keys, positions[..., None], new, old)
    assert plan(given, given)[0].tobytes() == result.tobytes()
    assert plan.rotate(given, out=given) is given
    assert given.tobytes() == result.tobytes()


def test_positions_of_any_size(rng):
    """Angles are exact where the angle of either rotation has thousands of revolutions."""
    old, new = pair()
    ids = np.array([0, 1, 2**24 + 1, 2**31 - 1, -(2**40) - 1, 2**53])
    keys = draw(rng, (1, 6, 2, 10), np.float64)
    assert_exact(new.rerotate_plan(old, ids).rotate(keys), keys, ids[None, :, None], new, old)


def test_frequencies_that_nearly_agree(rng):
    """The difference of two frequencies is exact, also if they differ in their last bits."""
    inv_freq = oracle.inv_freq(8)
    old = RotaryEmbedding.from_inv_freq(inv_freq)
    new = RotaryEmbedding.from_inv_freq(np.nextafter(inv_freq, 1))
    ids = np.array([1, 2**31 - 1, 2**52 + 1])
    keys = draw(rng, (1, 3, 2, 8), np.float64)
    assert_exact(new.rerotate_plan(old, ids).rotate(keys), keys, ids[None, :, None], new, old)
    assert np.array_equal(new.rerotate_plan(new, ids).rotate(keys), keys)


def test_several_axes_and_blocks(dtype, rng):
    old = RotaryEmbedding.axial(12, 2, axis_dims=(4, 8))
    new = RotaryEmbedding.axial(12, 2, axis_dims=(4, 8), rope_theta=50.0)
    positions = rng.integers(-99, 99, (2, 5, 2))
    keys = draw(rng, (2, 5, 3, 12), dtype)
    assert_exact(new.rerotate_plan(old, positions).rotate(keys), keys, positions, new, old)


def test_frequencies_by_head(rng):
    tables = rng.uniform(-1, 1, (2, 2, 3, 4))
    old, new = (RotaryEmbedding.from_inv_freq(table) for table in tables)
    positions = rng.integers(-99, 99, (1, 5, 2))
    keys = draw(rng, (1, 5, 3, 8), np.float64)
    result = new.rerotate_plan(old, positions).rotate(keys)
    for head in range(3):
        of_head = [RotaryEmbedding.from_inv_freq(table[:, head]) for table in tables]
        one = slice(head, head + 1)
        assert_exact(result[:, :, one], keys[:, :, one], positions, of_head[1], of_head[0])


LONGROPE = RotaryEmbedding(
    8,
    scaling={
        "rope_type": "longrope",
        "short_factor": [1.0, 1.0, 1.5, 2.0],
        "long_factor": [2.0, 4.0, 5.0, 7.0],
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 32,
    },
)


def test_the_switch_of_longrope(dtype, rng):
    """One sequence, batch rows, and packed sequences, of which some switch."""
    old, new = LONGROPE.at_length(32), LONGROPE.at_length(33)
    keys = draw(rng, (1, 32, 2, 8), dtype)
    ids = np.arange(32)
    switched = new.rerotate_plan(old, ids).rotate(keys)
    assert_exact(switched, keys, ids[None, :, None], new, old)
    kept = old.rerotate_plan(old, ids).rotate(keys)
    assert np.array_equal(kept, keys)
    rows = LONGROPE.at_length([33, 7]).rerotate_plan(LONGROPE.at_length([32, 6]), ids)
    both = rows.rotate(np.concatenate([keys, keys]))
    assert both.tobytes() == np.concatenate([switched, kept]).tobytes()
    packed = LONGROPE.at_length([7, 0, 33]).rerotate_plan(
        LONGROPE.at_length(6),
        np.concatenate([ids[:7], ids]),
        layout="thd",
        cu_seqlens=[0, 7, 7, 39],
    )
    in_turn = packed.rotate(np.concatenate([keys[0, :7], keys[0]]))
    assert in_turn.tobytes() == np.concatenate([kept[0, :7], switched[0]]).tobytes()


OLD, NEW = pair()
FACTOR = 2.0**100
LARGE, SMALL = (
    RotaryEmbedding.from_inv_freq([1.0], attention_factor=factor) for factor in (FACTOR, 1 / FACTOR)
)
FLOAT32 = RotaryEmbedding(8, angle_dtype="float32")
DYNAMIC = RotaryEmbedding(
    8, scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=4
)
ONE, TWO, THREE = (DYNAMIC.at_length(lengths) for lengths in (4, [5, 6], [5, 6, 7]))


def by(new, old, ids=(0, 1), **options):
    return lambda: new.rerotate_plan(old, ids, **options)


def of(inv_freq, **options):
    return RotaryEmbedding.from_inv_freq(inv_freq, **options)


REFUSED = [
    (by(NEW, OLD.spec), TypeError, "`old` is RopeSpec"),
    (by(NEW, of(np.ones(4))), ValueError, "`old` has head_dim 8; .* 10"),
    (by(NEW, of(np.ones(3), head_dim=10)), ValueError, "`old` has rotary_dim 6; .* 8"),
    (by(NEW, pair(True)[0]), ValueError, "`old` has interleaved True; .* False"),
    (by(NEW, pair(blocks=2)[0]), ValueError, "`old` has blocks .4, 4.; .* .8,."),
    (by(of(np.ones((2, 4))), of(np.ones(4))), ValueError, "`old` has axes 1; .* 2"),
    (by(of(np.ones((1, 1, 4))), of(np.ones((1, 3, 4)))), ValueError, "`old` has frequency_heads"),
    (by(of(oracle.inv_freq(8)), FLOAT32), ValueError, "`old` has angle_dtype 'float32', and .*64"),
    (by(FLOAT32, of(oracle.inv_freq(8))), ValueError, "`old` has angle_dtype 'float64', and .*32"),
    (by(LARGE, SMALL), ValueError, r"`old` makes the quotient of attention factors .*\+"),
    (by(SMALL, LARGE), ValueError, "`old` makes the quotient of attention factors .*-"),
    (by(LONGROPE, LONGROPE.at_length(5)), ValueError, "'longrope' depends on the sequence length"),
    (by(LONGROPE.at_length(5), LONGROPE), ValueError, "length .up to 32 the short factors, from"),
    (by(THREE, TWO), ValueError, "`old` has lengths"),
    (by(THREE, ONE, [[0], [1]]), ValueError, "`position_ids` has batch 2; .* number of lengths"),
    (by(ONE, TWO, layout="thd"), ValueError, "`layout` is"),
    (by(ONE, TWO, layout="thd", cu_seqlens=[0, 2]), ValueError, "`cu_seqlens` is for 1 seq.* 2"),
    (by(NEW, OLD, layout="bsdh"), ValueError, "`layout` is 'bsdh'"),
    (by(NEW, OLD, 5), ValueError, "`position_ids` has shape ..; it must be"),
    (lambda: by(NEW, OLD)().rotate(np.zeros((1, 3, 1, 10))), ValueError, "`x` has 3 tok.* have 2"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[row[2] for row in REFUSED])
def test_refusals(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert len(str(caught.value)) < 2000
