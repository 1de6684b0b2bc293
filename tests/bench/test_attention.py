"""The timed calls of attention are right; others are named."""

import numpy as np
import pytest

from rope_cpu.bench.attention import Attended
from rope_cpu.bench.cases import ATTENTION_OURS, ATTENTION_PEERS, CACHES
from rope_cpu.bench.measure import UnavailableError

CONTENDERS = {**ATTENTION_OURS, **ATTENTION_PEERS}


@pytest.mark.parametrize("kind", CACHES.values(), ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 40), (3, 1, 300), (1, 20, 70)])
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_call_attends(name, shape, kind):
    step = Attended(*shape, kind)
    try:
        call = CONTENDERS[name](step)
    except (ImportError, UnavailableError) as reason:
        pytest.skip(str(reason))
    for _ in range(2):  # a call must not change what the next one reads
        assert step.error(call.results(call.function(*call.arguments))) <= 1


def test_the_reference_attends_causally():
    """By its definition: a loop over keys for one head of one token."""
    step = Attended(2, 3, 12)
    q = step.queries().astype(np.float64)
    key, value = step.keys_and_values()
    token, head = 4, 7  # the second new token of the second sequence
    weights = [np.exp(q[token, head] @ key[1, head // 4, j] / np.sqrt(128)) for j in range(11)]
    expected = sum(w * value[1, head // 4, j] for j, w in enumerate(weights)) / sum(weights)
    call = ATTENTION_OURS["attention"](step)
    result = call.function(*call.arguments)
    assert np.abs(result[token, head] - expected).max() <= 2e-6 * np.abs(value).max()
    assert step.error(result) <= 1
    result[5, 0, 0] += 1e-3
    assert step.error(result) > 1
