"""The timed steps of a server are right, by an oracle from the mathematics."""

import numpy as np
import pytest

from rope_cpu.array_types import CACHE_KINDS
from rope_cpu.bench import serving
from rope_cpu.bench.cases import SERVING
from rope_cpu.bench.measure import UnavailableError
from rope_cpu.bench.serving import Appended, Move

UNIT = 2.0**-24
FREQUENCIES = 5e5 ** (-np.arange(64) / 64)


def rotated(x, positions):
    """Rotate half-split pairs of (tokens, heads, 128) in complex numbers."""
    pairs = x[..., :64] + 1j * x[..., 64:]
    pairs = pairs * np.exp(1j * np.asarray(positions)[:, None, None] * FREQUENCIES)
    return np.concatenate([pairs.real, pairs.imag], -1)


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def check(result, exact, roundings, more=0.0):
    """Compare, where the two elements of a pair are rounded together up to so many times."""
    bound = roundings * UNIT * 2 * np.abs(exact).max() + more
    assert (np.abs(result - exact) <= bound).all()


def check_is_noticed(step, results, x, index):
    """Check that the error of a step tells another number of a cache from its own."""
    own = x[index]
    x[index] ^= 64
    assert step.error(results) > 1
    x[index] = own


@pytest.mark.parametrize(("kind", "is_normed"), SERVING.values(), ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("prepare", [serving.append, serving.plan_and_numpy])
def test_every_step_norms_rotates_and_writes(prepare, tokens, kind, is_normed):
    step = Appended(tokens, kind, is_normed)
    q, k, v = (x.astype(np.float64) for x in step.projections())
    try:
        call = prepare(step)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    (arguments,) = call.argument_sets
    q_rot, cache = results = call.results(call.function(*arguments))
    assert step.error(results) <= 1
    # A mean of 128 squares and the factor, besides a rotation.
    roundings = 4
    if is_normed:
        q_weight, k_weight = step.weights
        q = normed(q, q_weight)
        k = normed(k, k_weight)
        roundings += 128 / 2 + 6
    positions = step.batch.cache_position
    check(q_rot, rotated(q, positions), roundings)
    pages, places = np.divmod(step.batch.slot_mapping, cache.page_size)
    if kind.hadamard:
        for x in (cache.key, cache.value):
            check_is_noticed(step, results, x, (pages[0], places[0], 0, 0))
        return
    for name, exact in (("key", rotated(k, positions)), ("value", v)):
        stored = getattr(cache, name)[pages, places].astype(np.float64)
        more = 0.0
        if kind.key == "int8":
            scale = getattr(cache, f"{name}_scale")[pages, places][..., None]
            stored *= scale
            more = scale * (0.5 + 400 * UNIT)
        if kind.key == "bfloat16":
            more = 2.0**-9 * 2 * np.abs(exact)
        check(stored, exact, roundings, more)


def test_a_wrong_step_is_seen():
    step = Appended(8, CACHE_KINDS["int8"])
    call = serving.append(step)
    (arguments,) = call.argument_sets
    queries, cache = results = call.results(call.function(*arguments))
    place = divmod(int(step.batch.slot_mapping[3]), cache.page_size)
    for vector in (
        queries[3, 1],
        cache.key[place][1],
        cache.value[place][1],
        cache.key_scale[place],
    ):
        assert step.error(results) <= 1
        right = vector[0]
        vector[0] += 2
        assert step.error(results) > 1
        vector[0] = right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prepare", [serving.rotate_cached, serving.rotate_contiguous])
def test_every_move_rotates_all_keys(prepare, dtype):
    move = Move(dtype, tokens=64)
    call = prepare(move)
    (arguments,) = call.argument_sets
    keys = call.results(call.function(*arguments))
    exact = rotated(move.keys().astype(np.float64), np.full(64, -256))
    assert move.error(keys) <= 1
    rounding = 2.0**-9 * 2 * np.abs(exact) if dtype == "bfloat16" else 0.0
    check(keys.astype(np.float64), exact, 4, rounding)
    keys[...] = 1
    assert move.error(keys) > 1
