"""Perplexity of the demo model on a text, with each cache, and with large channels of keys.

    python perplexity.py held-out.txt

Blank lines separate documents. "Large": in every key head two channels that rotate together are
multiplied by 30, and those of the queries divided by it, so that exact scores stay as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rope_server.__main__ import DEMO
from rope_server.engine import CACHES
from rope_server.model import forward
from rope_server.sampling import log_softmax
from rope_server.text import Text
from rope_server.weights import Layer, Weights, load

import rope_cpu

WINDOW = 512
FACTOR = 30
KINDS = CACHES | {"int8-int4": {"dtype": "int8", "value_dtype": "int4"}}
END = 0  # the token after a document


def perplexity(weights: Weights, windows: list[list[int]], kind: dict[str, Any]) -> float:
    """Return the perplexity of windows of up to 512 tokens, with caches of a kind."""
    facts = weights.layers[0].facts
    shape = (1, WINDOW, facts.num_kv_heads, facts.head_dim)
    caches = rope_cpu.KVCache.zeros(*shape, layers=len(weights.layers), **kind)
    losses = []
    for tokens in windows:
        size = [len(tokens)]
        batch = rope_cpu.Batch(seq_lens=size, query_lens=size, page_table=[[0]], page_size=WINDOW)
        logits = forward(weights, caches, tokens, batch, size, range(len(tokens) - 1))
        losses += [-log_softmax(row)[token] for row, token in zip(logits, tokens[1:], strict=True)]
    return float(np.exp(np.mean(losses)))


def enlarge_channels(layer: Layer) -> None:
    """Multiply the first pair of each key head, and divide that of each query head."""
    facts = layer.facts
    heads = layer.qkv.weight.reshape(-1, facts.head_dim, layer.qkv.weight.shape[-1])
    pair = [0, facts.head_dim // 2]
    heads[: facts.num_heads, pair] /= FACTOR
    heads[facts.num_heads : facts.num_heads + facts.num_kv_heads, pair] *= FACTOR


def windows_of(text: str) -> list[list[int]]:
    """Return the whole windows of the tokens of a text."""
    tokens: list[int] = []
    for document in text.strip().split("\n\n"):
        tokens += [*Text(DEMO).encode(document), END]
    starts = range(0, len(tokens) - WINDOW + 1, WINDOW)
    return [tokens[start : start + WINDOW] for start in starts]


def rows(windows: list[list[int]]) -> Iterator[tuple[str, float, float]]:
    """Yield the name of each kind of cache, its perplexity, and that with large channels."""
    weights = load(DEMO)
    large = load(DEMO)
    for layer in large.layers:
        enlarge_channels(layer)
    for name, kind in KINDS.items():
        yield name, perplexity(weights, windows, kind), perplexity(large, windows, kind)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    windows = windows_of(parser.parse_args().text.read_text())
    print(f"{len(windows)} windows of {WINDOW} tokens\n| cache | perplexity | large channels |")
    for name, found, found_large in rows(windows):
        print(f"| {name} | {found:.3f} | {found_large:.3f} |", flush=True)


if __name__ == "__main__":
    main()
