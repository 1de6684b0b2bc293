"""The demo model: its tokens against transformers, and its perplexity with each cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from models import complete, tokens_of
from perplexity import enlarge_channels, perplexity
from rope_server.__main__ import DEMO
from rope_server.engine import CACHES, Engine, Settings
from rope_server.sampling import Sampling, log_softmax
from rope_server.text import Text
from rope_server.weights import load

# The beginning of Genesis 1, in the King James Version.
TEXT = """In the beginning God created the heaven and the earth.
And the earth was without form, and void; and darkness was upon the face of the deep. And the \
Spirit of God moved upon the face of the waters.
And God said, Let there be light: and there was light.
And God saw the light, that it was good: and God divided the light from the darkness."""


@pytest.fixture(scope="module")
def peer():
    found = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return found.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens():
    return Text(DEMO).encode(TEXT)


def logits_of(peer, tokens):
    return peer(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 17, 40, 64])
def test_64_tokens(peer, tokens, length):
    engine = Engine(load(DEMO), Settings(pages=16, chunk=24))
    sampling = Sampling(temperature=0, top_logprobs=0)
    request = {"prompt": tokens[:length], "max_tokens": 64, "sampling": sampling}
    (events,) = complete(engine, [request])
    found = tokens_of(events)
    logits = logits_of(peer, tokens[:length] + found)[length - 1 : -1]
    logprobs = [log_softmax(row)[token] for row, token in zip(logits, found, strict=True)]
    best = [log_softmax(row).max() for row in logits]
    # Each of two logits is right to 1e-4.
    assert (np.array(logprobs) >= np.array(best) - 2e-4).all()
    reported = [event.drawn.logprob for event in events]
    np.testing.assert_allclose(reported, logprobs, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("float32", 1e-4),
        ("float16", 0.01),
        ("bfloat16", 0.01),
        ("int8", 0.03),
        ("int8-hadamard", 0.03),
        ("k8v4", 0.03),
    ],
)
def test_perplexity(peer, tokens, name, share):
    """The rounding of keys and values costs less than a small share of the perplexity."""
    found = perplexity(load(DEMO), [tokens], CACHES[name])
    chosen = [
        log_softmax(row)[token]
        for row, token in zip(logits_of(peer, tokens), tokens[1:], strict=False)
    ]
    expected = np.exp(-np.mean(chosen))
    print(f"{name}: {found:.4f}, transformers {expected:.4f}")
    assert found == pytest.approx(expected, rel=share)


def test_large_channels_of_keys(tokens):
    """They change nothing but the rounding of keys in int8, which Hadamard makes small again."""
    plain = perplexity(load(DEMO), [tokens], CACHES["float32"])
    weights = load(DEMO)
    for layer in weights.layers:
        enlarge_channels(layer)
    errors = {
        name: abs(perplexity(weights, [tokens], CACHES[name]) / plain - 1)
        for name in ("float32", "int8", "int8-hadamard")
    }
    print(errors)
    assert errors["float32"] < 1e-4
    assert errors["int8-hadamard"] < 0.5 * errors["int8"]
