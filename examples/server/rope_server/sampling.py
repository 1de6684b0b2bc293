"""From logits to a token and its log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rope_server.weights import Array

FEW = 256  # tokens that mostly hold top_p


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
    order = _largest(logprobs, sampling.top_logprobs)
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
    weights = np.exp(scaled)
    if sampling.top_p == 1:
        return _drawn_place(weights, random)
    kept = _most_probable(weights, sampling.top_p)
    return int(kept[_drawn_place(weights[kept], random)])


def _drawn_place(weights: np.ndarray, random: np.random.Generator) -> int:
    cumulated = np.cumsum(weights)
    place = np.searchsorted(cumulated, random.random() * cumulated[-1], side="right")
    return min(int(place), len(weights) - 1)


def _most_probable(weights: np.ndarray, share: float) -> np.ndarray:
    """Return the places of the fewest weights that are a share of all, the largest first."""
    needed = share * weights.sum()
    count = FEW
    while True:
        order = _largest(weights, count)
        cumulated = np.cumsum(weights[order])
        if cumulated[-1] >= needed or len(order) == len(weights):
            return order[: np.searchsorted(cumulated, needed) + 1]
        count *= 8


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the places of the largest values, the largest first, and of equal ones the first."""
    size = min(max(count, 1), len(values))
    places = np.flatnonzero(values >= np.partition(values, -size)[-size])
    return places[np.argsort(-values[places], kind="stable")][:count]
