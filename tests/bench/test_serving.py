"""The timed steps of a server are right, and wrong ones are seen."""

import pytest

from rope_cpu.bench import serving
from rope_cpu.bench.cases import SERVING
from rope_cpu.bench.measure import UnavailableError
from rope_cpu.bench.serving import Appended, Move


@pytest.mark.parametrize(("kind", "is_normed"), SERVING.values(), ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 128])
@pytest.mark.parametrize("prepare", [serving.append, serving.plan_and_numpy])
def test_every_step_norms_rotates_and_writes(prepare, tokens, kind, is_normed):
    step = Appended(tokens, kind, is_normed)
    try:
        call = prepare(step)
    except UnavailableError as reason:
        pytest.skip(str(reason))
    q_rot, cache = results = call.results(call.function(*call.arguments))
    assert step.error(results) <= 1
    page, place = divmod(int(step.batch.slot_mapping[-1]), cache.page_size)
    scales = (cache.key_scale, cache.value_scale)
    for x in (
        q_rot[-1],
        *(x[page, place] for x in (cache.key, cache.value, *scales) if x is not None),
    ):
        element = (1,) * x.ndim
        right = x[element]
        x[element] = right ^ 64 if x.dtype.kind in "iu" else right + 2
        assert step.error(results) > 1
        x[element] = right


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("prepare", [serving.rotate_cached, serving.rotate_contiguous])
def test_every_move_rotates_all_keys(prepare, dtype):
    move = Move(dtype, tokens=64)
    call = prepare(move)
    keys = call.results(call.function(*call.arguments))
    assert move.error(keys) <= 1
    keys[-1, 0, 0] += 1
    assert move.error(keys) > 1
