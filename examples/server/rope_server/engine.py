"""Continuous batching: sequences enter and leave between steps; each step serves all of them.

A step computes the next token of every sequence that decodes, and a chunk of the prompts that have
not been read yet, in one forward pass. Admission reserves pages for the prompt and all tokens that
may follow, so that a sequence that has started always finishes. `submit` and `leave` may be called
from any thread; all else belongs to the engine's own.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import rope_cpu
from rope_server.model import forward
from rope_server.pages import Pages, prefix_hashes
from rope_server.sampling import Drawn, Sampling, draw
from rope_server.weights import Weights


class QueueFullError(RuntimeError):
    """As many requests wait as may."""


class Event(NamedTuple):
    """A token of a sequence, or its end: "stop", "length" or "error"; or both."""

    drawn: Drawn | None
    finish: str | None


@dataclass(frozen=True)
class Request:
    """A prompt to continue.

    stop_tokens: ids that end the text. deliver: called with each event, in the engine's thread.
    """

    prompt: list[int]
    max_tokens: int
    deliver: Callable[[Event], object]
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()

    @property
    def most(self) -> int:
        """Number of tokens that the sequence may reach."""
        return len(self.prompt) + self.max_tokens


# Arguments of `KVCache.zeros` for each cache dtype. Large channels of keys need Hadamard in int8.
CACHES = {name: {"dtype": name} for name in ("float32", "float16", "bfloat16", "int8")}
CACHES["int8-hadamard"] = {"dtype": "int8", "hadamard": True}
CACHES["k8v4"] = CACHES["int8-hadamard"] | {"value_dtype": "int4"}


@dataclass(frozen=True)
class Settings:
    """Sizes of an engine.

    cache_dtype: a key of `CACHES`. pages of page_size tokens. chunk: tokens of prompts that a step
    reads. sequences: number that take part in a step. queue: number that may wait.
    """

    cache_dtype: str = "float32"
    pages: int = 1024
    page_size: int = 16
    chunk: int = 256
    sequences: int = 256
    queue: int = 1024

    def __post_init__(self) -> None:
        """Refuse another cache dtype, and sizes with which no request would be served."""
        if self.cache_dtype not in CACHES:
            raise ValueError(f"cache_dtype is {self.cache_dtype!r}; it must be {', '.join(CACHES)}")
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


@dataclass
class Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    generated_tokens: int = 0


@dataclass(eq=False)
class Sequence:
    """A request on its way.

    tokens: those of the prompt and all that were drawn. cached: number of them whose keys are in
    the caches, rotated by `frequencies`. outgrows: these change before max_tokens are reached.
    """

    request: Request
    tokens: list[int]
    frequencies: bytes
    outgrows: bool
    hashes: list[bytes]
    random: np.random.Generator
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    has_left: bool = False

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next can be drawn."""
        return len(self.tokens) - self.cached


class Engine:
    """A model, its caches and the sequences that use them."""

    def __init__(self, weights: Weights, settings: Settings) -> None:
        self.weights = weights
        self.settings = settings
        self.pages = Pages(settings.pages)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._caches = [_cache(layer.facts, settings) for layer in weights.layers]
        self._changed = threading.Condition()
        self._is_closing = False
        # A daemon, so that it does not outlive a process that is told twice to end.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def context(self) -> int:
        """Number of tokens that a sequence may have."""
        return min(self.weights.context, self.settings.pages * self.settings.page_size)

    @property
    def is_alive(self) -> bool:
        """Whether steps are computed."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finish all sequences, and end the thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join()

    def submit(self, request: Request) -> Sequence:
        """Queue a request.

        Raises ValueError if it can never be served, QueueFullError if it cannot now.
        """
        self._check(request)
        frequencies = self._frequencies(len(request.prompt))
        outgrows = frequencies != self._frequencies(request.most)
        # Its pages are written anew later, so nobody may share them. The last token of a prompt is
        # always computed, for its logits.
        shareable = [] if outgrows else request.prompt[:-1]
        sequence = Sequence(
            request=request,
            tokens=list(request.prompt),
            frequencies=frequencies,
            outgrows=outgrows,
            hashes=prefix_hashes(shareable, self.settings.page_size, frequencies),
            random=np.random.default_rng(request.sampling.seed),
        )
        with self._changed:
            if self._is_closing or len(self.waiting) >= self.settings.queue:
                raise QueueFullError(f"{len(self.waiting)} requests wait already; try again later")
            self.waiting.append(sequence)
            self._changed.notify()
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """Give up a sequence; its pages are free after the step that is being computed."""
        sequence.has_left = True

    def step(self) -> None:
        """Admit sequences that fit, and compute one step of all that run."""
        self._remove_left()
        self._admit()
        parts = self._parts()
        if not parts:
            return
        logits = self._forward(parts)
        self.counters.steps += 1
        drawing = []
        for sequence, count in parts:
            sequence.cached += count
            if not sequence.pending:
                drawing.append(sequence)
        for sequence, row in zip(drawing, logits, strict=True):
            try:
                drawn = draw(row, sequence.request.sampling, sequence.random)
            except Exception:
                logging.exception("no token could be drawn; the sequence ends")
                self._finish(sequence, "error")
            else:
                self._advance(sequence, drawn)

    def _check(self, request: Request) -> None:
        """Raise ValueError for a request that can never be served."""
        if not request.prompt:
            raise ValueError("the prompt has no tokens; it must have one at least")
        if request.most > self.context:
            raise ValueError(
                f"the prompt of {len(request.prompt)} tokens and max_tokens of "
                f"{request.max_tokens} are more than {self.context}, the context of this server"
            )
        wrong = [x for x in request.prompt if not 0 <= x < self.weights.vocabulary]
        if wrong:
            most = self.weights.vocabulary - 1
            raise ValueError(f"the prompt has the token {wrong[0]}; tokens are 0 to {most}")

    def _frequencies(self, length: int) -> bytes:
        """Return a value that two lengths share if keys are rotated alike for both."""
        ropes = [rope.at_length(length) for rope in self.weights.ropes]
        return b"".join(x.inv_freq.tobytes() + struct.pack("d", x.attention_factor) for x in ropes)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.running or self.waiting or self._is_closing)
            if not (self.running or self.waiting):
                return
            try:
                self.step()
            except Exception:
                logging.exception("a step failed; its sequences end")
                for sequence in list(self.running):
                    self._finish(sequence, "error")

    def _remove_left(self) -> None:
        for sequence in [x for x in self.running if x.has_left]:
            self._retire(sequence)
        with self._changed:
            for sequence in [x for x in self.waiting if x.has_left]:
                self.waiting.remove(sequence)

    def _admit(self) -> None:
        """Start waiting sequences in their order, as long as there are pages."""
        while self.waiting and len(self.running) < self.settings.sequences:
            sequence = self.waiting[0]
            count = -(-sequence.request.most // self.settings.page_size)
            reserved = self.pages.reserve(sequence.hashes, count)
            if reserved is None:
                return
            sequence.pages, shared = reserved
            sequence.cached = shared * self.settings.page_size
            self.counters.shared_tokens += sequence.cached
            self.counters.prompt_tokens += len(sequence.tokens)
            self.waiting.popleft()
            self.running.append(sequence)

    def _parts(self) -> list[tuple[Sequence, int]]:
        """Return the sequences of a step and the number of new tokens of each."""
        room = self.settings.chunk
        parts = []
        for sequence in self.running:
            self._forget_other_keys(sequence)
            if sequence.pending == 1:
                parts.append((sequence, 1))
            elif room:
                count = min(sequence.pending, room)
                room -= count
                parts.append((sequence, count))
        return parts

    def _forget_other_keys(self, sequence: Sequence) -> None:
        """Compute all keys of a sequence anew if it has grown to where frequencies change."""
        if not sequence.outgrows:
            return
        frequencies = self._frequencies(len(sequence.tokens))
        if frequencies != sequence.frequencies:
            sequence.frequencies = frequencies
            sequence.cached = 0

    def _forward(self, parts: list[tuple[Sequence, int]]) -> np.ndarray:
        """Return the logits of the sequences that can draw a token after this step."""
        tokens = []
        rows = []
        for sequence, count in parts:
            tokens += sequence.tokens[sequence.cached : sequence.cached + count]
            if count == sequence.pending:
                rows.append(len(tokens) - 1)
        batch = rope_cpu.Batch(
            seq_lens=[sequence.cached + count for sequence, count in parts],
            query_lens=[count for _, count in parts],
            page_table=[sequence.pages for sequence, _ in parts],
            page_size=self.settings.page_size,
        )
        lengths = [len(sequence.tokens) for sequence, _ in parts]
        return forward(self.weights, self._caches, tokens, batch, lengths, rows)

    def _advance(self, sequence: Sequence, drawn: Drawn) -> None:
        """Deliver a token, and finish its sequence if it is the last."""
        request = sequence.request
        if len(sequence.tokens) == len(request.prompt):
            self._publish(sequence)
        self.counters.generated_tokens += 1
        if drawn.token in request.stop_tokens:
            self._finish(sequence, "stop")
            return
        sequence.tokens.append(drawn.token)
        if len(sequence.tokens) == request.most:
            self._finish(sequence, "length", drawn)
        else:
            request.deliver(Event(drawn, None))

    def _publish(self, sequence: Sequence) -> None:
        """Let others share the full pages of a sequence."""
        if sequence.outgrows:
            return
        tokens = sequence.tokens[: sequence.cached]
        hashes = prefix_hashes(tokens, self.settings.page_size, sequence.frequencies)
        for page, digest in zip(sequence.pages, hashes, strict=False):
            self.pages.publish(page, digest)

    def _finish(self, sequence: Sequence, reason: str, drawn: Drawn | None = None) -> None:
        if reason != "error":
            self._publish(sequence)
        self._retire(sequence)
        sequence.request.deliver(Event(drawn, reason))

    def _retire(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)


def _cache(facts: rope_cpu.AttentionLayer, settings: Settings) -> rope_cpu.KVCache:
    return rope_cpu.KVCache.zeros(
        settings.pages,
        settings.page_size,
        facts.num_kv_heads,
        facts.head_dim,
        value_dim=facts.value_dim,
        **CACHES[settings.cache_dtype],
    )
