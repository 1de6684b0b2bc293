"""The timed steps of a server are right, by an oracle from the mathematics; others are named."""

import numpy as np
import pytest

from rope_cpu import KVCache
from rope_cpu.bench import server_calls
from rope_cpu.bench.cases import SERVING, SERVING_TOKENS
from rope_cpu.bench.measure import UnavailableError
from rope_cpu.bench.server_workloads import Move, Step

UNIT = 2.0**-24
FREQUENCIES = 5e5 ** (-np.arange(64) / 64)
STEPS = [
    server_calls.append,
    server_calls.plan_and_numpy,
    server_calls.torch_eager,
    server_calls.torch_compiled,
]
MOVES = [
    server_calls.rotate_cached,
    server_calls.rotate_contiguous,
    server_calls.gather_and_numpy,
]


def marked(functions):
    """Return parameters; those of torch run with the other peers."""
    return [
        pytest.param(
            function,
            id=function.__name__,
            marks=[pytest.mark.peers] if function.__name__.startswith("torch") else [],
        )
        for function in functions
    ]


def prepared(prepare, workload):
    try:
        return prepare(workload)
    except UnavailableError as reason:
        pytest.skip(str(reason))


def rotated(x, positions):
    """Rotate half-split pairs of (tokens, heads, 128) in complex numbers."""
    pairs = x[..., :64] + 1j * x[..., 64:]
    pairs = pairs * np.exp(1j * np.asarray(positions)[:, None, None] * FREQUENCIES)
    return np.concatenate([pairs.real, pairs.imag], -1)


def normed(x, weight):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight


def close(result, exact, roundings, more=0.0):
    """Compare, where the two elements of a pair are rounded together up to so many times."""
    bound = roundings * UNIT * 2 * np.abs(exact).max() + more
    assert (np.abs(result - exact) <= bound).all()


@pytest.mark.parametrize(("cache_dtype", "is_normed"), SERVING.values())
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("prepare", marked(STEPS))
@pytest.mark.filterwarnings("default")  # of torch, not of rope_cpu
def test_every_step_norms_rotates_and_writes(prepare, tokens, cache_dtype, is_normed):
    step = Step(tokens, cache_dtype, is_normed)
    q, k, v = (x.astype(np.float64) for x in step.projections())
    call = prepared(prepare, step)
    (arguments,) = call.argument_sets
    returned = call.function(*arguments)
    assert call.error(returned) <= 1
    if not isinstance(arguments[3], KVCache):
        return  # tensors, which the check above compares
    # A mean of 128 squares and the factor, besides a rotation.
    roundings = 4
    if is_normed:
        q_weight, k_weight = step.weights
        q = normed(q, q_weight)
        k = normed(k, k_weight)
        roundings += 128 / 2 + 6
    positions = step.batch.cache_position
    close(returned, rotated(q, positions), roundings)
    cache = arguments[3]
    pages = step.batch.slot_mapping // cache.page_size
    places = step.batch.slot_mapping % cache.page_size
    for name, exact in (("key", rotated(k, positions)), ("value", v)):
        stored = getattr(cache, name)[pages, places].astype(np.float64)
        more = 0.0
        if cache_dtype == "int8":
            scale = getattr(cache, f"{name}_scale")[pages, places][..., None]
            stored *= scale
            more = scale * (0.5 + 400 * UNIT)
        if cache_dtype == "bfloat16":
            more = 2.0**-9 * 2 * np.abs(exact)
        close(stored, exact, roundings, more)


def test_a_wrong_step_is_seen():
    for spoil in ("query", "key", "value", "scale"):
        step = Step(8, "int8")
        call = server_calls.append(step)
        ((*inputs, cache, out),) = call.argument_sets
        returned = call.function(*inputs, cache, out)
        assert call.error(returned) <= 1
        page, place = divmod(int(step.batch.slot_mapping[3]), cache.page_size)
        arrays = {
            "query": returned[3, 1],
            "key": cache.key[page, place, 1],
            "value": cache.value[page, place, 1],
            "scale": cache.key_scale[page, place],
        }
        arrays[spoil][0] += 2
        assert call.error(returned) > 1, spoil


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prepare", marked(MOVES))
@pytest.mark.filterwarnings("default")
def test_every_move_rotates_all_keys(prepare, dtype):
    call = prepared(prepare, Move(dtype, tokens=64))
    (arguments,) = call.argument_sets
    first = arguments[0].key if isinstance(arguments[0], KVCache) else arguments[0]
    is_array = isinstance(first, np.ndarray)
    before = first.reshape(64, 8, 128).astype(np.float64) if is_array else None
    returned = call.function(*arguments)
    assert call.error(returned) <= 1
    if is_array:
        exact = rotated(before, np.full(64, -256))
        rounding = 2.0**-9 * 2 * np.abs(exact) if dtype == "bfloat16" else 0.0
        close(first.reshape(64, 8, 128).astype(np.float64), exact, 4, rounding)
        first[...] = 1
        assert call.error(returned) > 1


@pytest.mark.parametrize("tokens", SERVING_TOKENS)
def test_every_token_has_a_slot_of_its_own(tokens):
    batch = Step(tokens).batch
    assert len(np.unique(batch.slot_mapping)) == len(batch.cache_position) == tokens
