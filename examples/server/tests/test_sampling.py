"""Sampling: probabilities of tokens, top_p, seeds, log probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from rope_server.sampling import Sampling, draw

PROBABILITIES = np.array([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + np.float32(3)


def shares(sampling, rng, count=20000):
    tokens = [draw(LOGITS, sampling, rng).token for _ in range(count)]
    return np.bincount(tokens, minlength=5) / count


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), PROBABILITIES),
        (Sampling(temperature=0.5), PROBABILITIES**2 / (PROBABILITIES**2).sum()),
        (Sampling(top_p=0.6), np.array([0, 4, 0, 3, 0]) / 7),
        (Sampling(top_p=0.71), np.array([0, 8, 3, 6, 0]) / 17),
        (Sampling(top_p=1e-9), np.array([0, 1, 0, 0, 0])),
        (Sampling(temperature=0), np.array([0, 1, 0, 0, 0])),
        (Sampling(temperature=5e-324), np.array([0, 1, 0, 0, 0])),
    ],
)
@pytest.mark.filterwarnings("error")
def test_shares_of_tokens(sampling, expected, rng):
    error = np.abs(shares(sampling, rng) - expected)
    # Six standard deviations of a share: one in 10^8 draws of it is farther off.
    assert (error <= 6 * np.sqrt(expected * (1 - expected) / 20000)).all()


def test_equal_seeds_draw_equal_tokens():
    runs = []
    for seed in (1, 1, 2):
        random = np.random.default_rng(seed)
        runs.append([draw(LOGITS, Sampling(seed=seed), random).token for _ in range(50)])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.999])
@pytest.mark.parametrize("width", [0.0, 1.0, 5.0])
def test_tokens_of_a_large_vocabulary(top_p, width, rng):
    """Of logits with ties: those that a sort of the whole vocabulary draws."""
    for seed in range(20):
        logits = np.round(rng.normal(0, width, 2000), 1).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        probabilities = np.exp(logits[order].astype(np.float64))
        cumulated = np.cumsum(probabilities / probabilities.sum())
        kept = np.count_nonzero(cumulated < top_p - 1e-12) + 1
        drawn = np.random.default_rng(seed).random() * cumulated[kept - 1]
        expected = order[np.count_nonzero(cumulated <= drawn)]
        sampling = Sampling(top_p=top_p, seed=seed)
        assert draw(logits, sampling, np.random.default_rng(seed)).token == expected


@pytest.mark.parametrize(
    ("sampling", "most"),
    [
        (Sampling(), 0),
        (Sampling(top_p=0.9), 256),
        (Sampling(top_logprobs=20), 20),
        (Sampling(temperature=0, top_logprobs=0), 1),
    ],
)
def test_the_vocabulary_is_not_sorted(sampling, most, rng, monkeypatch):
    sizes = [0]
    sort = np.argsort

    def counting(values, **options):
        sizes.append(len(values))
        return sort(values, **options)

    monkeypatch.setattr(np, "argsort", counting)
    draw(5 * rng.standard_normal(128256), sampling, rng)
    assert max(sizes) <= most


def test_log_probabilities(rng):
    drawn = draw(LOGITS, Sampling(temperature=0.5, top_logprobs=2), rng)
    # Of the model: temperature and top_p do not change them.
    assert drawn.logprob == pytest.approx(np.log(PROBABILITIES[drawn.token]), abs=1e-6)
    assert [token for token, _ in drawn.top] == [1, 3]
    np.testing.assert_allclose([x for _, x in drawn.top], np.log([0.4, 0.3]), rtol=0, atol=1e-6)
    assert draw(LOGITS, Sampling(top_logprobs=0), rng).top == []
    assert draw(LOGITS, Sampling(), rng).logprob is None
