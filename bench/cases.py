"""The benchmarks: a table of cases, each with its contenders.

A name is family/dtype and then any of: interleaved or half (the pairing, if it is not the model's),
out (results go to other arrays, not in place), norm, to-bfloat16, to-int8 (the dtype of the cache),
cold (arrays come from memory, not from the caches).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Array

from . import attention, components, frameworks, onnx_models, rotations, server_calls
from .attention import Attended
from .components import PAIRS, Positions
from .measure import Case, Prepare, on_threads
from .models import Model
from .server_workloads import HEAD_DIM, HEADS, KV_HEADS, Move, Step
from .timing import Call
from .workload import WARM_COPIES, Workload, text_ids, with_copies

# Contenders by name: functions that prepare the call of a workload, or raise UnavailableError.
Contenders = Mapping[str, Callable[[Any], Call]]

OURS: Contenders = {
    "plan": rotations.plan,
    "plan, new arrays": rotations.plan_new_arrays,
    "call": rotations.single_call,
}
PEERS: Contenders = {
    "NumPy rotate_half": rotations.rotate_half,
    "NumPy complex": rotations.complex_product,
    "torch eager": frameworks.torch_eager,
    "torch.compile": frameworks.torch_compiled,
    "JAX jit": frameworks.jax_jit,
    "ORT operator IO-bound": onnx_models.operator_call,
    "ORT RotaryEmbedding-23 run": partial(onnx_models.run_call, "onnx"),
    "ORT RotaryEmbedding-23 IO-bound": partial(onnx_models.bound_call, "onnx"),
    "ORT com.microsoft run": partial(onnx_models.run_call, "ort"),
    "ORT com.microsoft IO-bound": partial(onnx_models.bound_call, "ort"),
    "ORT primitive ops run": partial(onnx_models.run_call, "primitive"),
    "ORT primitive ops IO-bound": partial(onnx_models.bound_call, "primitive"),
}
# NumPy's form of the pairing that is not interleaved (False), and of the one that is.
_NUMPY_FORMS = {False: "NumPy rotate_half", True: "NumPy complex"}

STEPS_OURS: Contenders = {
    "append": server_calls.append,
    "plan alone, no cache": server_calls.plan_alone,
}
STEPS_PEERS: Contenders = {
    "plan and NumPy": server_calls.plan_and_numpy,
    "torch eager": server_calls.torch_eager,
    "torch.compile": server_calls.torch_compiled,
}
MOVES_OURS: Contenders = {
    "rotate_cached": server_calls.rotate_cached,
    "contiguous keys, in place": server_calls.rotate_contiguous,
}
MOVES_PEERS: Contenders = {
    "NumPy, gather and scatter": server_calls.gather_and_numpy,
}
ATTENTION_OURS: Contenders = {"attention": attention.attention}
ATTENTION_PEERS: Contenders = {
    "NumPy": attention.numpy_attention,
    "torch sdpa": attention.torch_attention,
    "onnxruntime GroupQueryAttention": attention.onnx_attention,
}

SEPARATE_TOKENS = (1, 32, 128, 512, 2048, 4096)
# Name of a shape → (batch, tokens).
SHAPES = {
    "decode-1": (1, 1),
    "decode-8": (8, 1),
    "decode-64": (64, 1),
    "prefill-128": (1, 128),
    "prefill-512": (1, 512),
    "prefill-4096": (1, 4096),
    "prefill-32768": (1, 32768),
}
HEADLINE = ("decode-1", "prefill-512", "prefill-4096")
USUAL_DTYPES = ("bfloat16", "float32")
SERVING_TOKENS = (1, 8, 32, 128, 512)
# Part of a name → dtype of the cache, and whether q and k are normed.
SERVING = {
    "": ("float32", False),
    "/norm": ("float32", True),
    "/to-bfloat16": ("bfloat16", False),
    "/to-int8": ("int8", False),
}
ATTENTION_CACHES = {"": "float32", "/to-bfloat16": "bfloat16", "/to-int8": "int8"}
# Family → its description, and sequences, new tokens of each, tokens of each.
ATTENTION = {
    "attention-1": ("one token attends to 4000", Attended(1, 1, 4000)),
    "attention-8": ("one token of each of 8 sequences attends to 4000", Attended(8, 1, 4000)),
    "attention-chunk": ("512 tokens attend to 3488 and each other", Attended(1, 512, 4000)),
}

# Position of the first decoded token; those of further sequences are so many tokens apart.
_CONTEXT = 4096
_CONTEXT_STEP = 17
# Seconds of the rounds of a case with peers, and without.
_PEERS_BUDGET = 6.0
_OWN_BUDGET = 1.5


def all_cases(model: Model, peers: bool | None = None, threads: Sequence[int] = ()) -> list[Case]:
    """Return every case; rotations have the heads and frequencies of a model.

    peers: time other libraries in all cases that have them, in none, or (None) in the most common.
    threads: several numbers of threads to compare; only rotations are then timed.
    """
    rotation_cases = [*_separate(model, peers), *_packed(model, peers), *_other_rotations(model)]
    if threads:
        return [on_threads(case, threads) for case in rotation_cases]
    servers = [*_serving(peers is not False), *_attention(peers is not False)]
    return [*rotation_cases, _layouts(model), *servers, *_components(peers is not False)]


def _separate(model: Model, peers: bool | None) -> Iterator[Case]:
    """Yield q and k in arrays of their own, as projections leave them; all are default cases."""
    for tokens, in_place in product(SEPARATE_TOKENS, (True, False)):
        ids = np.arange(tokens) if tokens > 1 else np.array([_CONTEXT])
        workload = _workload(model, ids, packed=False, in_place=in_place)
        what = f"{_tokens(tokens)}, q and k apart, float32, {_target(in_place)}"
        suffix = "" if in_place else "/out"
        case = _rotation(f"separate-{tokens}/float32{suffix}", what, workload, peers is not False)
        if not in_place:
            unaligned = replace(with_copies(workload), aligned_out=False)
            ours: dict[str, Prepare] = {"plan, unaligned out": partial(rotations.plan, unaligned)}
            case = replace(case, ours={**case.ours, **ours})
        yield replace(case, default=True)


def _packed(model: Model, peers: bool | None) -> Iterator[Case]:
    """Yield q and k as views of one packed buffer, and one change at a time."""
    other_pairing = "half" if model.own.interleaved else "interleaved"
    for shape, dtype in product(SHAPES, USUAL_DTYPES):
        headline = shape in HEADLINE
        with_peers = headline if peers is None else peers
        yield _packed_case(model, f"{shape}/{dtype}", with_peers, headline)
        yield _packed_case(model, f"{shape}/{dtype}/out", bool(peers))
        if headline:
            yield _packed_case(model, f"{shape}/{dtype}/{other_pairing}", bool(peers))
            yield _packed_case(model, f"{shape}/{dtype}/cold", bool(peers))
    for shape, dtype in product(HEADLINE, ("float64", "float16")):
        yield _packed_case(model, f"{shape}/{dtype}", bool(peers))


def _packed_case(model: Model, name: str, peers: bool, default: bool = False) -> Case:
    """Return the case of a name: shape, dtype and perhaps a change."""
    shape, dtype, *changes = name.split("/")
    batch, tokens = SHAPES[shape]
    ids = np.arange(tokens) if tokens > 1 else _CONTEXT + _CONTEXT_STEP * np.arange(batch)[:, None]
    rope = model.other if {"half", "interleaved"} & set(changes) else model.own
    in_place = "out" not in changes
    workload = replace(_workload(model, ids, rope, in_place=in_place), dtype=dtype)
    words = _tokens(tokens) if batch == 1 else f"one token of each of {batch} sequences"
    others = [change for change in changes if change != "out"]
    what = ", ".join([words, "q and k packed", dtype, _target(in_place), *others])
    case = _rotation(name, what, workload, peers, cold="cold" in changes)
    return replace(case, default=default)


def _workload(
    model: Model, ids: Array, rope: RotaryEmbedding | None = None, **more: Any
) -> Workload:
    rope = rope or model.own
    return Workload(rope, text_ids(rope, ids), model.heads, model.kv_heads, **more)


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def _target(in_place: bool) -> str:
    return "in place" if in_place else "into other arrays"


def _rotation(name: str, what: str, workload: Workload, peers: bool, cold: bool = False) -> Case:
    workload = with_copies(workload, cold)
    unused_form = _NUMPY_FORMS[not workload.rope.interleaved]
    others = {key: peer for key, peer in PEERS.items() if key != unused_form} if peers else {}
    return Case(
        name,
        what,
        _prepared(OURS, workload),
        _prepared(others, workload),
        workload.bytes_accessed,
        workload.copies,
        cold,
        # Each contender, the limit counting as one, has inputs and outputs.
        memory=2 * (1 + len(OURS) + len(others)) * workload.copies * workload.packed_bytes,
        budget=_PEERS_BUDGET if peers else _OWN_BUDGET,
    )


def _prepared(contenders: Contenders, workload: Any) -> dict[str, Prepare]:
    return {name: partial(prepare, workload) for name, prepare in contenders.items()}


def _other_rotations(model: Model) -> Iterator[Case]:
    """Yield partial, image and multimodal rotations, which other libraries lack."""
    half = RotaryEmbedding(128, rotary_dim=64, rope_theta=5e5)
    axial = RotaryEmbedding.axial(64, 2)
    patches = np.indices((64, 64)).reshape(2, -1).T
    mrope = RotaryEmbedding.mrope(128, [16, 24, 24], rope_theta=1e6)
    coordinates = text_ids(mrope, np.arange(512))
    kinds = {
        "partial": ("512 tokens, half of each head rotated", Workload(half, np.arange(512))),
        "axial-2d": ("an image of 64 by 64 patches", Workload(axial, patches, 16, 16)),
        "mrope": ("512 tokens at three coordinates each", Workload(mrope, coordinates, 28, 4)),
    }
    for (kind, (what, workload)), dtype in product(kinds.items(), USUAL_DTYPES):
        chosen = replace(workload, dtype=dtype)
        yield _rotation(f"{kind}/{dtype}", f"{what}, {dtype}, in place", chosen, peers=False)


def _layouts(model: Model) -> Case:
    """Return the case of layouts, whose ratios are per byte."""
    apart = replace(_workload(model, np.arange(512), packed=False), copies=WARM_COPIES)
    ours = {"contiguous bshd float32": partial(rotations.plan, apart)}
    for dtype, layout in product(("float32", "bfloat16"), ("bshd", "bhsd", "thd")):
        views = replace(apart, dtype=dtype, layout=layout, packed=True)
        ours[f"{layout} {dtype}"] = partial(rotations.plan, views)
    what = "512 tokens, packed or contiguous, ratios per byte"
    return Case("layouts", what, ours, {}, apart.bytes_accessed, apart.copies)


def _serving(peers: bool) -> Iterator[Case]:
    """Yield steps into a server's cache, and cached keys moved in place."""
    heads = f"{HEADS} + {KV_HEADS} heads of {HEAD_DIM}"
    for tokens, (suffix, (cache, normed)) in product(SERVING_TOKENS, SERVING.items()):
        step = Step(tokens, cache, normed)
        words = "appended with norms" if normed else "appended"
        what = f"{_tokens(tokens)} {words}, {heads}, float32 into {cache}"
        name = f"serving-{tokens}/float32{suffix}"
        case = _served(name, what, step, STEPS_OURS, STEPS_PEERS if peers else {})
        yield replace(case, default=tokens == 32)
    for dtype in USUAL_DTYPES:
        what = f"8192 paged keys, shifted, {KV_HEADS} heads of {HEAD_DIM}, {dtype}, in place"
        others = MOVES_PEERS if peers else {}
        yield _served(f"serving-shift/{dtype}", what, Move(dtype), MOVES_OURS, others)


def _attention(peers: bool) -> Iterator[Case]:
    """Yield attention over a server's cache: decode steps, and a chunk of a prompt."""
    for (family, (words, step)), (suffix, dtype) in product(
        ATTENTION.items(), ATTENTION_CACHES.items()
    ):
        cached = replace(step, cache_dtype=dtype)
        what = f"{words}, {HEADS} / {KV_HEADS} heads of {HEAD_DIM}, a cache of {dtype}"
        name = f"{family}/float32{suffix}"
        case = _served(name, what, cached, ATTENTION_OURS, ATTENTION_PEERS if peers else {})
        # A cache for each row, float32 copies, and the scores in NumPy.
        vectors = 2 * step.sequences * step.length * KV_HEADS * HEAD_DIM * 4
        memory = 7 * vectors + 3 * step.new * HEADS * step.length * 4
        default = name == "attention-1/float32"
        yield replace(case, memory=memory, default=default)


def _served(name: str, what: str, step: Any, ours: Contenders, peers: Contenders) -> Case:
    accessed = step.bytes_accessed
    return Case(name, what, _prepared(ours, step), _prepared(peers, step), accessed, budget=3.0)


def _components(peers: bool) -> Iterator[Case]:
    """Yield cos and sin alone, and plans."""
    others: Contenders = {"NumPy float64, cast": components.numpy_cos_sin} if peers else {}
    ours: Contenders = {
        "cos_sin": components.cos_sin,
        "cos_sin, preallocated arrays": components.cos_sin_into,
    }
    words = f"{PAIRS} pairs, float32"
    tables = {
        "angles-4096": ("cos and sin of 4096 positions", Positions(4096)),
        "angles-131072": ("cos and sin of 131072 positions", Positions(131072)),
        "angles-axes": ("cos and sin of 131072 positions on three axes", Positions(131072, 3)),
    }
    for name, (what, positions) in tables.items():
        yield _served(name, f"{what}, {words}", positions, ours, others)
    plans = {
        "plan-64": ("a plan of one token of 64 sequences", np.arange(64)[:, None]),
        "plan-4096": ("a plan of 4096 tokens", np.arange(4096)),
    }
    for name, (what, ids) in plans.items():
        prepare = {"plan": partial(components.plan, ids)}
        yield Case(name, f"{what}, {words}", prepare, {}, components.plan_bytes(ids))
