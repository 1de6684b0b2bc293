"""apply_rotary: rotation by the caller's tables."""

import itertools

import numpy as np
import oracle
import pytest
from oracle import draw, from_layout, to_layout
from refusals import assert_refused, zeros

from rope_cpu import RotaryEmbedding, apply_rotary


def tables(rng, rows, pairs, dtype):
    angles = rng.uniform(-9, 9, (rows, pairs))
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_against_the_matrix(dtype, interleaved, layout, inverse, rng):
    batch = 1 if layout == "thd" else 2
    x = draw(rng, (batch, 5, 3, 22), dtype)
    given = itertools.product((np.float32, np.float64), (True, False), {False, batch > 1})
    for table_dtype, looked_up, by_row in given:
        cos, sin = tables(rng, 40, 10, table_dtype)
        ids = rng.integers(0, 40, (batch if by_row else 1, 5))
        used = ids if by_row else ids[0]
        arguments = (cos, sin, used) if looked_up else (cos[used], sin[used])
        result = apply_rotary(
            to_layout(x, layout),
            *arguments,
            interleaved=interleaved,
            layout=layout,
            inverse=inverse,
        )
        wide_cos, wide_sin = cos[ids].astype(float), (-sin if inverse else sin)[ids].astype(float)
        exact, reach = oracle.rotate(x, wide_cos, wide_sin, interleaved)
        assert result.dtype == x.dtype
        # A float64 table is cut to float32 for the arithmetic, which the 3·u of the bound contains.
        assert (
            np.abs(from_layout(result, layout).astype(float) - exact)
            <= oracle.bound(exact, reach, x.dtype)
        ).all()


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("inverse", [False, True])
def test_tables_by_head(dtype, interleaved, layout, inverse, rng):
    """Heads of x are twice those of the tables; each is compared with a rotation of its own."""
    batch = 1 if layout == "thd" else 2
    x = draw(rng, (batch, 5, 6, 22), dtype)
    angles = rng.uniform(-9, 9, (40, 3, 10))
    ids = rng.integers(0, 40, (batch, 5))
    looked_up = ids[0] if layout == "thd" else ids
    options = {"interleaved": interleaved, "layout": layout, "inverse": inverse}
    for table_dtype in (np.float32, np.float64):
        cos = np.cos(angles).astype(table_dtype)
        sin = np.sin(angles).astype(table_dtype)
        expected = [
            apply_rotary(
                to_layout(x[:, :, head : head + 1].copy(), layout),
                cos[:, head // 2],
                sin[:, head // 2],
                looked_up,
                **options,
            )
            for head in range(6)
        ]
        expected = np.concatenate([from_layout(part, layout) for part in expected], axis=2)
        for given in ((cos, sin, looked_up), (cos[looked_up], sin[looked_up])):
            result = from_layout(apply_rotary(to_layout(x, layout), *given, **options), layout)
            assert result.tobytes() == expected.tobytes()
        if layout != "thd":
            same = apply_rotary(to_layout(x, layout), cos[ids[0]], sin[ids[0]], **options)
            row = apply_rotary(to_layout(x, layout), cos[ids[:1]], sin[ids[:1]], **options)
            assert same.tobytes() == row.tobytes()


def test_frequencies_by_head_give_the_rotation_of_the_embedding(rng):
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(0, 1, (1, 2, 8)))
    x = rng.standard_normal((2, 6, 4, 16)).astype(np.float32)
    cos, sin = rope.cos_sin(np.arange(6))
    assert cos.shape == (6, 2, 8)
    assert np.array_equal(apply_rotary(x, cos, sin), rope.rotate(x))


def test_three_axes_that_fit_are_rows_of_a_batch(rng):
    x = rng.standard_normal((4, 4, 4, 8)).astype(np.float32)
    cos = rng.standard_normal((4, 4, 4)).astype(np.float32)
    sin = rng.standard_normal((4, 4, 4)).astype(np.float32)
    by_row = apply_rotary(x, cos[:, :, None], sin[:, :, None])
    assert np.array_equal(apply_rotary(x, cos, sin), by_row)
    assert not np.array_equal(apply_rotary(x, cos[None], sin[None]), by_row)


def test_in_place_and_strided_tables(rng):
    x = rng.standard_normal((1, 4, 2, 8)).astype(np.float32)
    wide = rng.standard_normal((4, 8))
    expect = apply_rotary(x, wide[:, ::2].copy(), wide[:, 1::2].copy())
    assert apply_rotary(x, wide[:, ::2], wide[:, 1::2], out=x) is x
    assert np.array_equal(x, expect)


def test_mapped_tables_are_read(tmp_path, rng):
    rope, x = RotaryEmbedding(16), rng.standard_normal((1, 3, 2, 16)).astype(np.float32)
    cos, sin = rope.cos_sin(np.arange(3))
    mapped = []
    for name, table in (("cos", cos), ("sin", sin)):
        mapped.append(np.memmap(tmp_path / name, table.dtype, "w+", shape=table.shape))
        mapped[-1][:] = table
    assert np.array_equal(apply_rotary(x, *mapped), apply_rotary(x, cos, sin))


def test_one_pair_of_any_stride(rng):
    x = rng.standard_normal((1, 5, 2, 4)).astype(np.float32)
    cos, sin = (rng.standard_normal((5, 1)).astype(np.float32) for _ in range(2))
    # NumPy calls them contiguous, whatever it is to a second pair.
    wide = [np.lib.stride_tricks.as_strided(table, (5, 1), (4, 16)) for table in (cos, sin)]
    assert np.array_equal(apply_rotary(x, *wide), apply_rotary(x, cos, sin))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "thd"])
@pytest.mark.parametrize("same", [(True, False), (False, True), (True, True)])
def test_a_table_that_is_the_same_for_all_tokens(layout, same, dtype, rng):
    """Broadcast, with a stride of 0, one of the two or both; more tokens than go one by one."""
    real = np.float64 if dtype == np.float64 else np.float32
    pair = [rng.standard_normal((1 if alike else 40, 5)).astype(real) for alike in same]
    broadcast = [np.broadcast_to(table, (40, 5)) for table in pair]
    x = to_layout(rng.standard_normal((1, 40, 3, 12)).astype(dtype), layout)
    expect = apply_rotary(x, *(table.copy() for table in broadcast), layout=layout)
    assert apply_rotary(x, *broadcast, layout=layout).tobytes() == expect.tobytes()


def test_no_tokens_have_no_rows():
    x, table = np.zeros((1, 0, 1, 8), np.float32), np.ones((9, 4), np.float32)
    assert apply_rotary(x, table, table, []).shape == x.shape


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000, 0xFFC0FFFF])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_is_no_number_in_a_table_is_none_in_the_result(dtype, interleaved, layout, bits):
    """Also a NaN that rounding to 16 bits would make a zero: memory full of ones."""
    cos, sin = np.ones((9, 32), np.float32), np.zeros((9, 32), np.float32)
    cos.view(np.uint32)[:, ::3] = bits
    before = cos.tobytes()
    x = to_layout(np.ones((1, 9, 3, 64), dtype), layout)
    result = from_layout(
        apply_rotary(x, cos, sin, interleaved=interleaved, layout=layout), layout
    ).astype(float)
    first = result[..., ::2] if interleaved else result[..., :32]
    assert np.array_equal(np.isnan(first), np.broadcast_to(np.isnan(cos)[:, None], first.shape))
    assert (first[~np.isnan(first)] == 1).all()
    assert cos.tobytes() == before


TABLE = zeros(10, 2)
X, BUFFER = WATCHED = zeros(2, 3, 4, 6), zeros(100)
PART = BUFFER[:6].reshape(3, 2)
WHOLE = BUFFER[:72].reshape(1, 3, 4, 6)

REFUSED = [
    (lambda: apply_rotary(X, zeros(2), zeros(2)), ValueError, "cos"),
    (lambda: apply_rotary(X, zeros(3, 2, dtype=int), TABLE), TypeError, "cos"),
    (lambda: apply_rotary(X, TABLE, [1]), TypeError, "sin"),
    (lambda: apply_rotary(X, np.ma.array(TABLE[:3]), TABLE[:3]), TypeError, "cos"),
    (lambda: apply_rotary(X, zeros(3, 2), zeros(3, 3)), ValueError, "sin"),
    (lambda: apply_rotary(X, zeros(3, 4), zeros(3, 4)), ValueError, "cos"),
    (lambda: apply_rotary(X, zeros(4, 2), zeros(4, 2)), ValueError, "x"),
    (lambda: apply_rotary(X, zeros(1, 2, 3, 2), zeros(1, 2, 3, 2), [0, 1, 2]), ValueError, "cos"),
    (lambda: apply_rotary(X, zeros(3, 3, 2), zeros(3, 3, 2)), ValueError, "x"),
    (lambda: apply_rotary(X, zeros(3, 0, 2), zeros(3, 0, 2)), ValueError, "cos"),
    (lambda: apply_rotary(X, TABLE, TABLE, [[[0]]]), ValueError, "position_ids"),
    (lambda: apply_rotary(X, TABLE, TABLE, [0.0, 1.0, 2.0]), TypeError, "position_ids"),
    (lambda: apply_rotary(X, TABLE, TABLE, np.ma.array([1, 2, 3])), TypeError, "position_ids"),
    (lambda: apply_rotary(X, TABLE, TABLE, [0, 1, 10]), ValueError, "position_ids"),
    (lambda: apply_rotary(X, TABLE, TABLE, [0, -1, 2]), ValueError, "position_ids"),
    (lambda: apply_rotary(X, TABLE, TABLE, [0, 1]), ValueError, "x"),
    (lambda: apply_rotary(X, TABLE, TABLE, [[0, 1, 2]] * 3), ValueError, "x"),
    (lambda: apply_rotary(X[:1], PART, TABLE[:3], out=WHOLE), ValueError, "out"),
    (lambda: apply_rotary(X[:1], PART, TABLE[:3], [0, 1, 2], out=WHOLE), ValueError, "out"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals_write_nothing(call, error, argument):
    for array in WATCHED:
        array[...] = 1
    assert_refused(call, error, argument)
    assert all((array == 1).all() for array in WATCHED)


@pytest.mark.parametrize("ids", [[True] * 3, [0.5] * 3, ["a"] * 3])
def test_only_integers_look_up_rows(ids):
    with pytest.raises(TypeError, match=r"`position_ids` has dtype .*; it must hold integers, wh"):
        apply_rotary(X, TABLE, TABLE, ids)
