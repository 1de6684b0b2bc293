"""The engine against transformers, and the ways in which sequences come and go."""

from __future__ import annotations

import numpy as np
import pytest
from models import BORDER, complete, tokens_of
from rope_server.engine import Engine, QueueFullError, Request, Settings
from rope_server.sampling import Sampling, draw

GREEDY = Sampling(temperature=0, top_logprobs=0)
LENGTHS = (1, 2, 15, 16, 17, 40, BORDER - 1, 90)
SMALL_CHUNKS = Settings(pages=128, page_size=8, chunk=13)


def prompts_of(rng):
    """Return prompts of 8 lengths, the longer ones with a common beginning."""
    common = rng.integers(0, 320, 33).tolist()
    prompts = [rng.integers(0, 320, length).tolist() for length in LENGTHS]
    return [common + prompt[33:] if len(prompt) > 33 else prompt for prompt in prompts]


@pytest.mark.parametrize("settings", [Settings(pages=128), SMALL_CHUNKS])
def test_tokens_and_log_probabilities(model, settings, rng):
    engine = Engine(model.weights, settings)
    prompts = prompts_of(rng)
    requests = [{"prompt": prompt, "max_tokens": 64, "sampling": GREEDY} for prompt in prompts]
    for answers in (complete(engine, requests), complete(engine, requests)):
        for prompt, events in zip(prompts, answers, strict=True):
            tokens = tokens_of(events)
            assert len(tokens) == 64
            assert [event.finish for event in events] == [None] * 63 + ["length"]
            logits = model.logits_of_growth(prompt + tokens)[len(prompt) - 1 : -1]
            of_tokens = logits[np.arange(64), tokens]
            # Each of two logits is right to 1e-4.
            assert (of_tokens >= logits.max(axis=1) - 2e-4).all()
            logprobs = of_tokens - np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
            found = [event.drawn.logprob for event in events]
            np.testing.assert_allclose(found, logprobs, rtol=0, atol=2e-4)
    assert engine.counters.shared_tokens > 0
    assert max(engine.pages.states()) <= 0


def test_a_sequence_is_the_same_alone_and_among_others(model, rng):
    requests = [
        {"prompt": prompt, "max_tokens": 20, "sampling": Sampling(0.8, 0.9, seed)}
        for seed, prompt in enumerate(prompts_of(rng))
    ]
    together = complete(Engine(model.weights, SMALL_CHUNKS), requests)
    for request, events in zip(requests, together, strict=True):
        (alone,) = complete(Engine(model.weights, SMALL_CHUNKS), [request])
        assert alone == events


def test_a_shared_prefix_is_not_computed_again(llama, rng):
    engine = Engine(llama.weights, Settings(page_size=8))
    prompt = rng.integers(0, 320, 41).tolist()
    request = {"prompt": prompt, "max_tokens": 8, "sampling": GREEDY}
    (first,) = complete(engine, [request])
    (second,) = complete(engine, [request])
    assert engine.counters.shared_tokens == 40
    assert tokens_of(first) == tokens_of(second)
    # The next turn of a conversation shares the answer, too.
    prompt = prompt + tokens_of(first)
    complete(engine, [{"prompt": prompt, "max_tokens": 1}])
    assert engine.counters.shared_tokens == 40 + 48


def test_stop_tokens_end_a_sequence(llama, rng):
    engine = Engine(llama.weights, Settings())
    request = {"prompt": [1, 2, 3], "max_tokens": 20, "sampling": GREEDY}
    (events,) = complete(engine, [request])
    tokens = tokens_of(events)
    (events,) = complete(engine, [{**request, "stop_tokens": frozenset([tokens[5]])}])
    end = tokens.index(tokens[5])
    assert tokens_of(events) == tokens[:end]
    assert events[-1] == (None, "stop")


def test_more_requests_than_pages_are_served_in_their_order(llama):
    engine = Engine(llama.weights, Settings(pages=4, page_size=8))
    finished = []
    for index in range(10):
        request = Request(
            [index] * 9, 8, lambda event, i=index: event.finish and finished.append(i)
        )
        engine.submit(request)
    while engine.running or engine.waiting:
        engine.step()
        assert sum(x > 0 for x in engine.pages.states()) <= 4
    assert finished == list(range(10))


def test_a_sequence_that_leaves_frees_its_pages(llama):
    engine = Engine(llama.weights, Settings(pages=4, page_size=8))
    events = []
    running = engine.submit(Request([1] * 9, 20, events.append))
    waiting = engine.submit(Request([2] * 9, 20, events.append))
    last = engine.submit(Request([3] * 9, 20, events.append))
    engine.step()
    assert engine.running == [running]
    engine.leave(running)
    engine.leave(waiting)
    engine.step()
    assert engine.running == [last]
    assert len(events) == 2


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, "no tokens"),
        ([1, 320], 1, "token 320"),
        ([-1], 1, "token -1"),
        ([1] * 30, 3, "30 tokens and max_tokens of 3 are more than 32"),
    ],
)
def test_refused(llama, prompt, max_tokens, words):
    engine = Engine(llama.weights, Settings(pages=4, page_size=8))
    with pytest.raises(ValueError, match=words):
        engine.submit(Request(prompt, max_tokens, print))


def test_a_full_queue(llama):
    engine = Engine(llama.weights, Settings(queue=2))
    for _ in range(2):
        engine.submit(Request([1], 1, print))
    with pytest.raises(QueueFullError):
        engine.submit(Request([1], 1, print))


def test_a_failed_step_ends_its_sequences_alone(llama, monkeypatch, rng):
    engine = Engine(llama.weights, Settings())
    events = []

    def fail(*args):
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr("rope_server.engine.forward", fail)
    engine.submit(Request([1], 1, events.append))
    engine.start()
    engine.stop()
    assert [event.finish for event in events] == ["error"]
    assert max(engine.pages.states()) == 0


def test_a_failed_draw_ends_its_sequence_alone(llama, monkeypatch):
    requests = [
        {"prompt": [seed], "max_tokens": 5, "sampling": Sampling(seed=seed)} for seed in range(3)
    ]
    expected = complete(Engine(llama.weights, Settings()), requests)

    def fail(logits, sampling, random):
        if sampling.seed == 1:
            raise ArithmeticError
        return draw(logits, sampling, random)

    monkeypatch.setattr("rope_server.engine.draw", fail)
    engine = Engine(llama.weights, Settings())
    assert complete(engine, requests) == [expected[0], [(None, "error")], expected[2]]
    assert max(engine.pages.states()) <= 0


def test_stop_finishes_all(llama):
    engine = Engine(llama.weights, Settings())
    events = []
    for _ in range(5):
        engine.submit(Request([1], 10, events.append))
    engine.start()
    engine.stop()
    assert sum(event.finish == "length" for event in events) == 5
    with pytest.raises(QueueFullError):
        engine.submit(Request([1], 1, events.append))
