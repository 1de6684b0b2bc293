"""The benchmarks: a table of cases, each with its contenders.

A name is family/dtype and then any of: out (results go to other arrays, not in place), norm,
to-bfloat16, to-int8, to-int8-hadamard, to-int8-int4-hadamard (the kind of the cache).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import CACHE_KINDS, DTYPES, Array

from . import attention, rotations, serving
from .attention import Attended
from .measure import Case, Contenders
from .serving import HEAD_DIM, HEADS, KV_HEADS, Appended, Move
from .workloads import Workload

OURS: Contenders = {
    "plan": rotations.plan,
    "plan, new arrays": rotations.plan_new_arrays,
    "call": rotations.single_call,
    "making the plan": rotations.make_plan,
}
UNALIGNED: Contenders = {"plan, unaligned out": rotations.plan_unaligned_out}
PEERS: Contenders = {
    "NumPy rotate_half": rotations.rotate_half,
    "torch eager": rotations.torch_call,
    "torch.compile": partial(rotations.torch_call, compiled=True),
    "JAX jit": rotations.jax_jit,
    "ORT operator IO-bound": rotations.onnx_operator,
    "ORT RotaryEmbedding-23 run": partial(rotations.exported_run, "onnx"),
    "ORT RotaryEmbedding-23 IO-bound": partial(rotations.exported_bound, "onnx"),
    "ORT com.microsoft IO-bound": partial(rotations.exported_bound, "ort"),
    "ORT primitive ops IO-bound": partial(rotations.exported_bound, "primitive"),
}
STEPS_OURS: Contenders = {"append": serving.append, "plan alone, no cache": serving.plan_alone}
STEPS_PEERS: Contenders = {"plan and NumPy": serving.plan_and_numpy}
MOVES: Contenders = {
    "rotate_cached": serving.rotate_cached,
    "contiguous keys, in place": serving.rotate_contiguous,
}
ATTENTION_OURS: Contenders = {"attention": attention.attention}
ATTENTION_PEERS: Contenders = {
    "NumPy": attention.numpy_attention,
    "onnxruntime GroupQueryAttention": attention.onnx_attention,
}

_HEADS = f"{HEADS} + {KV_HEADS} heads of {HEAD_DIM}"
_KEYS = f"8192 paged keys of {KV_HEADS} heads of {HEAD_DIM}, shifted in place"
SHIFTS = [
    Case("serving-shift/bfloat16", f"{_KEYS}, bfloat16", Move("bfloat16"), MOVES),
    Case("serving-shift/float32", f"{_KEYS}, float32", Move("float32"), MOVES),
]

# Name of a shape → sequences, new tokens of each, and whether q and k are views of one packed
# buffer, or in arrays of their own, as projections leave them.
SHAPES = {f"separate-{tokens}": (1, tokens, False) for tokens in (1, 32, 128, 512, 2048, 4096)}
SHAPES |= {f"decode-{sequences}": (sequences, 1, True) for sequences in (1, 8, 64)}
SHAPES |= {f"prefill-{tokens}": (1, tokens, True) for tokens in (128, 512, 4096)}
# Of packed cases, those that run by default, in place.
USUAL_SHAPES = ("decode-1", "prefill-512", "prefill-4096")
USUAL_DTYPES = ("bfloat16", "float32")
SERVING_TOKENS = (1, 32, 128, 512)
# Part of a name → kind of the cache.
CACHES = {"": CACHE_KINDS["float32"]}
for _kind in ("bfloat16", "int8", "int8-hadamard", "int8-int4-hadamard"):
    CACHES[f"/to-{_kind}"] = CACHE_KINDS[_kind]
# Part of a name → kind of the cache, and whether q and k are normed.
SERVING = {suffix: (kind, False) for suffix, kind in CACHES.items()}
SERVING["/norm"] = (CACHE_KINDS["float32"], True)
# Family → its description, and sequences, new tokens of each, tokens of each.
ATTENTION = {
    "attention-1": ("one token attends to 4000", Attended(1, 1, 4000)),
    "attention-8": ("one token of each of 8 sequences attends to 4000", Attended(8, 1, 4000)),
    "attention-chunk": ("512 tokens attend to 3488 and each other", Attended(1, 512, 4000)),
}

# Position of the first token; those of further sequences are so many tokens apart.
_CONTEXT = 4096
_CONTEXT_STEP = 17


def all_cases(rope: RotaryEmbedding, heads: tuple[int, int]) -> list[Case]:
    """Return every case; rotations are those of `rope`, with the heads of q and of k."""
    return [*_rotations(rope, *heads), *_serving(), *_attention(), *SHIFTS]


def _rotations(rope: RotaryEmbedding, heads: int, kv_heads: int) -> Iterator[Case]:
    """Yield rotations: packed ones in every dtype, others in float32."""
    for (shape, (batch, tokens, packed)), in_place in product(SHAPES.items(), (True, False)):
        words = _tokens(tokens) if batch == 1 else f"one token of each of {batch} sequences"
        where = "packed" if packed else "apart"
        target = "in place" if in_place else "into other arrays"
        is_usual = shape in USUAL_SHAPES and in_place
        for dtype in DTYPES if packed else ["float32"]:
            ids = _ids(rope.axes, batch, tokens)
            work = Workload(rope, ids, heads, kv_heads, dtype, packed, in_place)
            yield Case(
                f"{shape}/{dtype}" if in_place else f"{shape}/{dtype}/out",
                f"{words}, q and k {where}, {dtype}, {target}",
                work,
                OURS if packed or in_place else {**OURS, **UNALIGNED},
                PEERS,
                default=not packed or (is_usual and dtype in USUAL_DTYPES),
            )


def _ids(axes: int, batch: int, tokens: int) -> Array:
    """Return consecutive positions, (tokens,) of one sequence or (batch, tokens)."""
    ids = _CONTEXT + _CONTEXT_STEP * np.arange(batch)[:, None] + np.arange(tokens)
    if batch == 1:
        ids = ids[0]
    return ids if axes == 1 else np.repeat(ids[..., None], axes, axis=-1)


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def _serving() -> Iterator[Case]:
    """Yield steps into the cache of a server."""
    for tokens, (suffix, (cache, normed)) in product(SERVING_TOKENS, SERVING.items()):
        name = f"serving-{tokens}/float32{suffix}"
        words = "appended with norms" if normed else "appended"
        what = f"{_tokens(tokens)} {words}, {_HEADS}, float32 to {cache}"
        step = Appended(tokens, cache, normed)
        yield Case(name, what, step, STEPS_OURS, STEPS_PEERS, default=tokens == 32)


def _attention() -> Iterator[Case]:
    """Yield attention over the cache of a server: decode steps, and a chunk of a prompt."""
    for (family, (words, step)), (suffix, cache) in product(ATTENTION.items(), CACHES.items()):
        name = f"{family}/float32{suffix}"
        what = f"{words}, {_HEADS}, {cache} cache"
        cached = replace(step, kind=cache)
        yield Case(name, what, cached, ATTENTION_OURS, ATTENTION_PEERS, family == "attention-1")
