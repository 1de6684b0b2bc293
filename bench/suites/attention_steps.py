"""The cases of attention over a server's cache: decode steps, and a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

from ..implementations import attentions
from ..implementations.attended import Attended
from ..implementations.cache_workload import HEAD_DIM, HEADS, KV_HEADS
from ..measurement.case import Case, Contender
from ..measurement.rows import Row
from ..measurement.timing import Call, Effort
from .case_names import described
from .contenders import baselines

LENGTH = 4000

# Family → sequences, new tokens of each, tokens of each.
STEPS = {
    "attention-1": Attended(1, 1, LENGTH),
    "attention-8": Attended(8, 1, LENGTH),
    "attention-chunk": Attended(1, 512, LENGTH),
}
# Part of the name of a case → dtype of the cache.
CACHE_DTYPES = {"": "float32", "/to-bfloat16": "bfloat16", "/to-int8": "int8"}

# The case that a run without patterns times.
_DEFAULT = "attention-1/float32"


class Implementation(NamedTuple):
    """The role of a row, and the function that prepares its call."""

    role: str
    prepare: Callable[[Attended], Call]


IMPLEMENTATIONS = {
    "attention": Implementation("ours", attentions.attention),
    "NumPy": Implementation("peer", attentions.numpy_attention),
    "torch sdpa": Implementation("peer", attentions.torch_attention),
    "onnxruntime GroupQueryAttention": Implementation("peer", attentions.onnx_attention),
}


def cases(peers: bool | None) -> Iterator[Case]:
    """Yield the cases. peers: False leaves other libraries out."""
    for (family, step), (suffix, dtype) in product(STEPS.items(), CACHE_DTYPES.items()):
        cached = replace(step, cache_dtype=dtype)
        heads = f"{HEADS} / {KV_HEADS} heads of {HEAD_DIM}"
        name = f"{family}/float32{suffix}"
        yield Case(
            name,
            described(family, heads, f"a cache of {dtype}"),
            partial(_contenders, cached, peers is not False),
            default=name == _DEFAULT,
            memory=_bytes_needed(cached),
            effort=Effort(budget=3.0),
            overrun=2.0,
        )


def _bytes_needed(step: Attended) -> int:
    """Return an upper bound: a cache for each row, float32 copies, and the scores in NumPy."""
    vectors = 2 * step.sequences * step.length * KV_HEADS * HEAD_DIM * 4
    scores = 3 * step.new * HEADS * step.length * 4
    return (len(IMPLEMENTATIONS) + 3) * vectors + scores


def _contenders(step: Attended, peers: bool) -> list[Contender]:
    contenders: list[Contender] = [
        (Row(name, implementation.role), partial(implementation.prepare, step))
        for name, implementation in IMPLEMENTATIONS.items()
        if peers or implementation.role == "ours"
    ]
    return contenders + baselines(step.bytes_accessed)
