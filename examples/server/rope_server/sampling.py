"""From logits to a token and its log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rope_server.weights import Array


@dataclass(frozen=True)
class Sampling:
    """How tokens of a request are drawn.

    temperature: 0 takes the most probable token. top_p: the most probable tokens that have this
    probability together are drawn from. seed: equal seeds draw equal tokens; None draws others
    each time. top_logprobs: number of alternatives to report; None reports nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    top_logprobs: int | None = None


class Drawn(NamedTuple):
    """A token, its log probability, and the most probable tokens with theirs."""

    token: int
    logprob: float | None
    top: list[tuple[int, float]]


def draw(logits: Array, sampling: Sampling, random: np.random.Generator) -> Drawn:
    """Draw a token from logits (vocabulary,)."""
    token = _draw_token(logits, sampling, random)
    if sampling.top_logprobs is None:
        return Drawn(token, None, [])
    logprobs = log_softmax(logits)
    count = sampling.top_logprobs
    order = np.argsort(-logprobs, kind="stable")[:count]
    return Drawn(token, float(logprobs[token]), [(int(i), float(logprobs[i])) for i in order])


def log_softmax(logits: Array) -> np.ndarray:
    """Return log probabilities in float64."""
    shifted = logits - np.max(logits).astype(np.float64)
    return shifted - np.log(np.exp(shifted).sum())


def _draw_token(logits: Array, sampling: Sampling, random: np.random.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # -inf is a probability of 0
        scaled = (logits - logits.max()) / np.float64(sampling.temperature)
    order = np.argsort(-scaled, kind="stable")
    cumulated = np.cumsum(np.exp(log_softmax(scaled[order])))
    kept = int(np.searchsorted(cumulated, sampling.top_p)) + 1
    cumulated = cumulated[:kept]
    place = np.searchsorted(cumulated, random.random() * cumulated[-1], side="right")
    return int(order[min(place, len(cumulated) - 1)])
