"""cos and sin are those of the exact product of position and float64 frequency, at any position."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import oracle
import pytest
from refusals import assert_refused, zeros

from rope_cpu import RotaryEmbedding
from rope_cpu.rotation import cos_sin as angles


def positions_up_to(limit, count, rng):
    whole = rng.integers(-limit, limit, count, endpoint=True)
    return np.concatenate([whole, [0, 1, -1, 2, 3, limit, limit - 1, -limit]]).astype(np.float64)


def largest_error(rope, positions, dtype):
    """Return the largest error of cos and sin of a rotary embedding of one axis."""
    exact = rope.attention_factor * np.stack(oracle.cos_sin(positions, rope.inv_freq))
    return np.abs(np.stack(rope.cos_sin(positions, dtype)) - exact).max()


@pytest.mark.parametrize("pairs", [1, 3, 7, 16, 31, 64, 129])
def test_float32_is_the_exact_value_rounded_once(pairs, rng):
    """The error before rounding is below 1e-15, so the result is seldom a neighbour of the nearest.

    In units of 2^-53: for half the angle, √2·sin a is at most 1 and errs by 2.0; its polynomial's
    last step gives 1 of it and the last rounding 0.5. So its square errs by 4.0, and by 0.5 more
    with separate roundings of products, and 1 minus the square by another 0.5. √2·sin a · √2·cos a
    errs by less. The angle is rounded twice, by 2^-56 of a revolution and past a quarter by 2^-55:
    2.4. The sum is 7.4, and 1 for a factor that is no power of two: 9.4e-16.
    """
    rope = RotaryEmbedding.from_inv_freq(rng.uniform(-3, 3, pairs))
    positions = positions_up_to(2**20, 3000 // pairs, rng)
    assert_rounded_once(rope.cos_sin(positions), oracle.cos_sin(positions, rope.inv_freq), 1e-15)


@pytest.mark.parametrize("fastest", [1, 16, 300])
@pytest.mark.parametrize("limit", [2**31 - 1, 2**33, 2**53])
def test_float32_is_rounded_once_wherever_positions_are(fastest, limit, rng):
    """Of up to 300·2^53 / 2π < 2^59 revolutions, less than 64 remain, rounded twice to 2^-48."""
    rope = RotaryEmbedding.from_inv_freq(fastest * rng.uniform(-1, 1, 40))
    positions = positions_up_to(limit, 60, rng)
    positions = np.concatenate([positions, rng.uniform(0.5, 1, 30) * -limit])
    bound = 1e-15 + 2 * np.pi * 2 * (2.0**-48 if fastest * limit > 2**50 else 0)
    assert_rounded_once(rope.cos_sin(positions), oracle.cos_sin(positions, rope.inv_freq), bound)


def assert_rounded_once(tables, exact, error):
    """Assert cos and sin within half a float32 unit plus `error`, and nearly always the nearest."""
    tables, exact = np.stack(tables), np.stack(exact)
    half_ulp = 0.5 * 2.0 ** (np.floor(np.log2(np.maximum(np.abs(exact), 2.0**-126))) - 23)
    assert (np.abs(tables - exact) <= half_ulp + error).all()
    assert np.mean(tables == exact.astype(np.float32)) > 0.999


def test_more_revolutions_than_float64_counts_stay_on_the_circle(rng):
    rope = RotaryEmbedding.from_inv_freq([2.0**40, 1e12, -3e11])
    cos, sin = rope.cos_sin(rng.integers(2**52, 2**53, 100).astype(np.float64))
    assert (
        np.abs(cos.astype(np.float64) ** 2 + sin.astype(np.float64) ** 2 - 1).max() <= 9e-8
    )  # 2·√2·2^-25


FREQUENCIES = [[frequency, -frequency] for frequency in (1e-30, 1e-5, 0.5, 2 * np.pi, 200.0, 1e9)]


@pytest.mark.parametrize(
    ("inv_freq", "limit"),
    [
        *((oracle.inv_freq(96, 5e5), limit) for limit in (100, 2**31 - 1, 2**53)),
        *((inv_freq, 2**20) for inv_freq in FREQUENCIES),
    ],
)
def test_float64_is_within_two_units(inv_freq, limit, rng):
    rope = RotaryEmbedding.from_inv_freq(inv_freq)
    positions = np.concatenate([positions_up_to(limit, 60, rng), rng.uniform(-1e6, 1e6, 60)])
    assert largest_error(rope, positions, np.float64) <= 2 * 2.0**-53


def test_float32_positions_are_taken_as_they_are():
    rope = RotaryEmbedding.from_inv_freq([1.0])
    third = np.float32(1 / 3)
    assert rope.cos_sin(np.array([third]), np.float64)[1][0, 0] == pytest.approx(
        np.sin(float(third)), abs=2.0**-52
    )


def test_position_zero_and_frequency_zero_are_the_identity():
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.25, 0.0])
    cos, sin = rope.cos_sin([0, 7])
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()
    assert cos[1, 2] == 1
    assert sin[1, 2] == 0


@pytest.mark.parametrize("axes", [2, 3, 24, 64])
def test_several_axes_add_up(axes, rng):
    """With many axes, whole revolutions are dropped from the sum, too."""
    matrix = rng.uniform(-3, 3, (axes, 20))
    rope = RotaryEmbedding.from_inv_freq(matrix)
    positions = [rng.uniform(-1e5, 1e5, (40, axes)), rng.integers(-(2**31), 2**31, (40, axes))]
    exact = oracle.cos_sin_axes(np.concatenate(positions), matrix)
    tables = rope.cos_sin(np.concatenate(positions), np.float64)
    assert np.abs(np.stack(tables) - np.stack(exact)).max() <= 2 * 2.0**-53
    if axes <= 3:  # each adds about a quarter revolution at most, rounded to 2^-53 of one
        bound = 1e-15 + 2 * np.pi * axes * 2.0**-53
        assert_rounded_once(rope.cos_sin(np.concatenate(positions)), exact, bound)


def alternate_axes(omega, axes):
    """Return frequencies (axes, …, pairs) for one axis per pair, in turn."""
    owners = np.arange(omega.shape[-1]) % axes
    return np.stack([np.where(owners == axis, omega, 0.0) for axis in range(axes)])


@pytest.mark.parametrize("axes", [2, 3, 11])
@pytest.mark.parametrize("fastest", [1, 50])
@pytest.mark.parametrize("limit", [1000, 2**53])
def test_axes_that_share_out_the_pairs(axes, fastest, limit, rng):
    """Less than 2 · 50·2^53 / 2π / 2^53 < 16 revolutions remain, rounded twice to 2^-50."""
    rope = RotaryEmbedding.from_inv_freq(alternate_axes(fastest * rng.uniform(-1, 1, 37), axes))
    positions = rng.integers(-limit, limit, (20, axes), endpoint=True).astype(np.float64)
    exact = oracle.cos_sin_axes(positions, rope.inv_freq)
    assert_rounded_once(
        rope.cos_sin(positions),
        exact,
        1e-15 + 2 * np.pi * 2 * (2.0**-50 if fastest * limit > 2**53 else 0),
    )
    if fastest * limit <= 2**53:
        assert (
            np.abs(np.stack(rope.cos_sin(positions, np.float64)) - np.stack(exact)).max()
            <= 2 * 2.0**-53
        )


@pytest.mark.parametrize("part", [0.5, 0.25])
def test_a_position_has_the_same_bits_wherever_it_stands(part):
    """Near half and quarter revolutions a sine or cosine is so small that any other step shows."""
    first, odd = 2**31 - 4, 2 * np.arange(2**30, 2**30 + 2000) + 1
    omega = 2 * np.pi * part * odd / first
    ids, slow = np.arange(first, 2**31), RotaryEmbedding.from_inv_freq(omega[omega <= 16])
    tables = np.stack(slow.cos_sin(ids))
    assert np.abs(tables[1 if part == 0.5 else 0, 0]).max() < 1e-5
    pairs = slow.inv_freq.size
    far = np.stack(slow.cos_sin([*ids, 2**40]))[:, :4]
    fast = np.stack(RotaryEmbedding.from_inv_freq([*slow.inv_freq, 100.0]).cos_sin(ids))[
        ..., :pairs
    ]
    added = RotaryEmbedding.from_inv_freq([[*slow.inv_freq, 1.0], [*np.zeros(pairs), 1.0]])
    added = np.stack(added.cos_sin(np.stack([ids, ids], axis=-1)))[..., :pairs]
    alone = np.stack(
        [RotaryEmbedding.from_inv_freq([w]).cos_sin(ids) for w in slow.inv_freq[::100]], axis=-1
    )
    backwards = np.stack(slow.cos_sin(-ids)) * np.array([1, -1], np.float32)[:, None, None]
    for found in (far, fast, added, backwards):
        assert found.tobytes() == tables.tobytes()
    assert np.array_equal(alone[..., 0, :], tables[..., ::100])
    x = np.zeros((1, 4, 1, 2 * pairs), np.float32)
    x[..., pairs:] = 1
    without_a_plan = [
        slow.rotate(x, offset=first),
        slow.rotate(x[:, :3], offset=first),
        slow.rotate(x, -ids, inverse=True),
    ]
    for found in without_a_plan:
        cos, sin = tables[:, : found.shape[1]]
        assert np.array_equal(-found[0, :, 0, :pairs], sin)
        assert np.array_equal(found[0, :, 0, pairs:], cos)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sine_of_zero_is_positive(sign):
    omega = sign * oracle.inv_freq(128)
    ropes = [
        RotaryEmbedding.from_inv_freq(w) for w in (omega, [*omega, 100.0], alternate_axes(omega, 3))
    ]
    for rope in ropes:
        zeros = (
            np.zeros((2, 3)) * np.array([[1], [-1]]) if rope.axes == 3 else np.array([0.0, -0.0])
        )
        sines = [
            rope.cos_sin(zeros)[1],
            rope.cos_sin(np.concatenate([zeros, zeros[:1] + 2**40]))[1][:2],
        ]
        assert not np.signbit(sines).any()
        x = np.full((1, 2, 1, rope.head_dim), -0.0, np.float32)
        x[..., rope.head_dim // 2 :] = 1
        rotated = [rope.rotate(x, zeros), rope.rotate(x, zeros, inverse=True)]
        assert rotated[0].tobytes() == rotated[1].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_equal_coordinates_have_the_bits_of_one_axis(dtype, rng):
    omega, ids = oracle.inv_freq(128), rng.integers(-(2**40), 2**40, 30)
    several = RotaryEmbedding.from_inv_freq(alternate_axes(omega, 3)).cos_sin(
        np.repeat(ids[:, None], 3, axis=1), dtype
    )
    alone = RotaryEmbedding.from_inv_freq(omega).cos_sin(ids, dtype)
    assert [table.tobytes() for table in several] == [table.tobytes() for table in alone]


@pytest.mark.parametrize("shared_out", [True, False])
@pytest.mark.parametrize("angle_dtype", ["float64", "float32"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_pairs_do_not_depend_on_their_number(angle_dtype, dtype, shared_out, rng):
    """Many pairs, of two axes and two heads, have the same bits as each pair alone.

    The kernel computes fewer pairs than these at a time.
    """

    def cos_sin(matrix):
        spec = RotaryEmbedding.from_inv_freq(matrix, attention_factor=1.3).spec
        return RotaryEmbedding.from_spec(replace(spec, angle_dtype=angle_dtype)).cos_sin(
            positions, dtype
        )

    matrix = (
        alternate_axes(rng.uniform(-3, 3, (2, 300)), 2)
        if shared_out
        else rng.uniform(-3, 3, (2, 2, 300))
    )
    positions = rng.integers(-(2**20), 2**20, (3, 2))
    together = cos_sin(matrix)
    for pair in (0, 1, 127, 128, 129, 255, 256, 299):
        alone = cos_sin(matrix[:, :, pair : pair + 1])
        assert [t[..., pair : pair + 1].tobytes() for t in together] == [t.tobytes() for t in alone]


def test_attention_factor_is_multiplied_before_the_one_rounding(rng):
    factor = 1.3465735902799727
    rope = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64), attention_factor=factor)
    positions = rng.integers(0, 10**6, 100)
    half_ulp = 0.5 * 2.0 ** (np.floor(np.log2(factor)) - 23)
    assert largest_error(rope, positions, np.float32) <= half_ulp + 1e-9 * factor


@pytest.mark.parametrize(("dtype", "bits"), [(np.float16, 11), (ml_dtypes.bfloat16, 8)])
def test_16_bit_tables_do_not_round_twice(dtype, bits):
    # Just above the middle of two numbers, and just below: float32 would move both to the middle.
    step = 2.0 ** (1 - bits)
    wanted = {
        1 + step / 2 + 2.0**-40: 1 + step,
        1 + step / 2: 1,
        1 + 3 * step / 2 - 2.0**-40: 1 + step,
    }
    for factor, expected in wanted.items():
        cos, sin = RotaryEmbedding.from_inv_freq([1.0], attention_factor=factor).cos_sin([0], dtype)
        assert (float(cos[0, 0]), float(sin[0, 0])) == (expected, 0.0)


def test_float32_angles_repeat_float32_arithmetic(rng):
    spec = RotaryEmbedding.from_inv_freq(oracle.inv_freq(64).astype(np.float32)).spec
    rope = RotaryEmbedding.from_spec(
        replace(spec, angle_dtype="float32", attention_factor=np.array([1.1]))
    )
    positions = rng.integers(0, 131072, 300)
    product = positions.astype(np.float32)[:, None] * rope.inv_freq.astype(np.float32)
    cos, sin = rope.cos_sin(positions)
    exact_cos, exact_sin = oracle.cos_sin(np.unique(product), [1.0])
    index = np.searchsorted(np.unique(product), product)
    assert np.array_equal(cos, exact_cos[index, 0].astype(np.float32) * np.float32(1.1))
    assert np.array_equal(sin, exact_sin[index, 0].astype(np.float32) * np.float32(1.1))


def test_revolutions_hold_106_bits():
    inv_freq = oracle.inv_freq(128, 5e5)
    for frequency, high, low in zip(inv_freq, *angles.revolutions(inv_freq), strict=True):
        exact = oracle.CONTEXT.mpf(float(frequency)) / (2 * oracle.CONTEXT.pi)
        assert abs((oracle.CONTEXT.mpf(high) + oracle.CONTEXT.mpf(low) - exact) / exact) < 2.0**-105


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4), (0,)])
def test_shapes(shape):
    rope = RotaryEmbedding.from_inv_freq([1.0, 0.5])
    cos, sin = rope.cos_sin(np.zeros(shape, int))
    assert cos.shape == sin.shape == (*shape, 2)
    axial = RotaryEmbedding.from_inv_freq([[1.0, 0.5], [0.0, 2.0]])
    assert axial.cos_sin(np.zeros((*shape, 2)))[0].shape == (*shape, 2)
    per_head = RotaryEmbedding.from_inv_freq(np.ones((2, 3, 4)))
    assert per_head.cos_sin(np.zeros((*shape, 2)))[0].shape == (*shape, 3, 4)


def test_revolutions_may_underflow():
    with np.errstate(all="raise"):
        assert RotaryEmbedding.from_inv_freq([5e-324, 1.0]).cos_sin([1])[1][0, 0] == 0


ROPE = RotaryEmbedding.from_inv_freq([1.0, 0.1], head_dim=6)
AXIAL = RotaryEmbedding.from_inv_freq([[1.0, 0.1], [0.5, 2.0], [1.0, 1.0]])

REFUSED = [
    (lambda: AXIAL.cos_sin(zeros(3, 2, 5)), ValueError, "position_ids"),
    (lambda: ROPE.cos_sin([np.nan]), ValueError, "position_ids"),
    (lambda: ROPE.cos_sin([1], dtype=int), TypeError, "dtype"),
    (lambda: ROPE.cos_sin([1], "foo"), TypeError, "dtype"),
    (lambda: ROPE.cos_sin([1], None), TypeError, "dtype"),
]


@pytest.mark.parametrize(("call", "error", "argument"), REFUSED)
def test_refusals(call, error, argument):
    assert_refused(call, error, argument)
