"""The cases of rotation: decode and prefill in all variants, other kinds of rotation, layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.array_types import Array
from rope_cpu.machine import last_level_cache

from ..implementations.table import first_calls, installed, peer_names
from ..measurement.case import Case, Contender
from ..measurement.timing import Effort
from ..models import Model
from ..workload import Workload, text_ids
from .case_names import described
from .contenders import baselines, rotation

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
# In the order of the cases: the dtypes that models run in come first.
_DTYPE_ORDER = ("bfloat16", "float32", "float64", "float16")
USUAL_DTYPES = ("bfloat16", "float32")

# Position of the first decoded token; those of further sequences are so many tokens apart.
_CONTEXT = 4096
_CONTEXT_STEP = 17
# From so many tokens on only the plan is timed.
_LONG = 16384
# Cold copies together take so many times the last-level cache, but there are at most so many.
_BEYOND_CACHE = 3
_MOST_COLD_COPIES = 4096
# Copies of warm arrays, so that a lucky or unlucky allocation does not decide.
_WARM_COPIES = 5

# Peers are slow: for each, the fewest rounds exceed the budget by the time for one packed buffer at
# so many bytes per second.
_BYTES_OF_PEERS = 1.5e8

_PLAN = "plan"
_PLAN_NEW_ARRAYS = "plan, new arrays"
_CALL = "call"


class Variant(NamedTuple):
    """Differences between the cases of one shape; own_pairing: that of the model."""

    dtype: str
    own_pairing: bool
    in_place: bool
    cold: bool

    @property
    def changes(self) -> int:
        """Number of differences from the headline: own pairing, in place, warm, a usual dtype."""
        differences = [
            not self.own_pairing,
            not self.in_place,
            self.cold,
            self.dtype not in USUAL_DTYPES,
        ]
        return sum(differences)

    def case_name(self, shape: str, interleaved: bool) -> str:
        """Return the name of the case of this variant."""
        parts = [shape, self.dtype]
        if not self.own_pairing:
            parts.append("interleaved" if interleaved else "half")
        if not self.in_place:
            parts.append("out")
        if self.cold:
            parts.append("cold")
        return "/".join(parts)

    def is_default(self, shape: str) -> bool:
        """Whether a run without patterns includes it.

        These are the headline, and one change at a time: of 512 tokens and, cold, of a decode step.
        """
        if self.changes == 1:
            return shape == "prefill-512" or (shape == "decode-1" and self.cold)
        return self.changes == 0


def decode_and_prefill(model: Model, peers: bool | None, threads: Sequence[int]) -> Iterator[Case]:
    """Yield decode and prefill in every shape and variant.

    peers, threads: see `catalog`.
    """
    variants = product(_DTYPE_ORDER, (True, False), (True, False), (False, True))
    for shape, values in product(SHAPES, list(variants)):
        yield _case(shape, Variant(*values), model, peers, threads)


def _case(
    shape: str, variant: Variant, model: Model, peers: bool | None, threads: Sequence[int]
) -> Case:
    _, tokens = SHAPES[shape]
    rope = model.own if variant.own_pairing else model.other
    ids = text_ids(rope, _position_ids(shape))
    workload = _with_copies(
        Workload(rope, ids, model.heads, model.kv_heads, variant.dtype, in_place=variant.in_place),
        variant.cold,
    )
    is_headline = variant.changes == 0 and shape in HEADLINE
    with_peers = not threads and (is_headline if peers is None else peers)
    names = [_PLAN]
    if not threads and tokens < _LONG:
        names += [_PLAN_NEW_ARRAYS, _CALL] if is_headline else [_CALL]
    installed_peers: list[str] = []
    if with_peers:
        names += peer_names(rope.interleaved)
        installed_peers = installed(peer_names(rope.interleaved))
    return Case(
        variant.case_name(shape, rope.interleaved),
        _description(shape, variant, model),
        partial(_contenders, workload, names, threads),
        default=variant.is_default(shape),
        cold=variant.cold,
        # Each contender, the baselines counting as one, has inputs and outputs.
        memory=2 * (1 + len(names)) * workload.copies * workload.packed_bytes,
        effort=_effort(with_peers, is_slow=variant.cold or tokens >= _LONG),
        first_calls=first_calls(installed_peers),
        overrun=len(installed_peers) * workload.packed_bytes / _BYTES_OF_PEERS,
    )


def _position_ids(shape: str) -> Array:
    batch, tokens = SHAPES[shape]
    if tokens > 1:
        return np.arange(tokens)
    return _CONTEXT + _CONTEXT_STEP * np.arange(batch)[:, None]


def _description(shape: str, variant: Variant, model: Model) -> str:
    details = [model.heads_text, "in place" if variant.in_place else "into other arrays"]
    if variant.cold:
        details.append("cold")
    return described(shape, *details)


def _effort(with_peers: bool, is_slow: bool) -> Effort:
    if with_peers:
        return Effort(budget=6.0)
    return Effort(budget=1.5) if is_slow else Effort(budget=1.0)


def _with_copies(workload: Workload, cold: bool = False) -> Workload:
    """Return a workload with enough copies to exceed the caches, or a few if it is warm.

    Warm arrays that exceed the caches have one copy: their address makes no difference.
    """
    cache = last_level_cache()
    size = workload.packed_bytes
    if cold:
        copies = max(2, min(_MOST_COLD_COPIES, _BEYOND_CACHE * cache // size))
    else:
        copies = _WARM_COPIES if size < cache else 1
    return replace(workload, copies=copies)


def _contenders(
    workload: Workload, names: Sequence[str], threads: Sequence[int]
) -> list[Contender]:
    """Return the named implementations, on each number of threads, and the baselines."""
    thread_counts = threads or (None,)
    rows = [rotation(name, workload, threads=count) for name in names for count in thread_counts]
    # Half of the accessed bytes are written.
    new_bytes = workload.bytes_accessed // 2 if _PLAN_NEW_ARRAYS in names else 0
    return rows + baselines(
        workload.bytes_accessed,
        workload.copies,
        threads,
        into_other=not workload.in_place,
        new_bytes=new_bytes,
    )


def other_kinds(threads: Sequence[int]) -> Iterator[Case]:
    """Yield the cases of other kinds of rotation."""
    kinds = [
        ("partial", _partial, "32 + 8 heads of 128"),
        ("axial-2d", _axial, "16 + 16 heads of 64"),
        ("mrope", _mrope, "28 + 4 heads of 128"),
    ]
    names = [_PLAN] if threads else [_PLAN, _CALL]
    for kind, workload, heads in kinds:
        for dtype in USUAL_DTYPES:
            contenders = partial(_kind_contenders, workload, dtype, names, threads)
            yield Case(f"{kind}/{dtype}", described(kind, heads), contenders)


def _kind_contenders(
    workload: Callable[[], Workload], dtype: str, names: Sequence[str], threads: Sequence[int]
) -> list[Contender]:
    return _contenders(_with_copies(replace(workload(), dtype=dtype)), names, threads)


def _partial() -> Workload:
    return Workload(RotaryEmbedding(128, rotary_dim=64, rope_theta=5e5), np.arange(512))


def _axial() -> Workload:
    patches = np.indices((64, 64)).reshape(2, -1).T
    return Workload(RotaryEmbedding.axial(64, 2), patches, 16, 16)


def _mrope() -> Workload:
    rope = RotaryEmbedding.mrope(128, [16, 24, 24], rope_theta=1e6)
    return Workload(rope, text_ids(rope, np.arange(512)), 28, 4)


def layouts(model: Model) -> Case:
    """Return the case of layouts: contiguous arrays and views of one packed buffer.

    Its ratios are per byte.
    """

    def contenders() -> list[Contender]:
        ids = text_ids(model.own, np.arange(512))
        contiguous = Workload(
            model.own, ids, model.heads, model.kv_heads, packed=False, copies=_WARM_COPIES
        )
        rows = [rotation(_PLAN, contiguous, "contiguous bshd float32")]
        for dtype, layout in product(("float32", "bfloat16"), ("bshd", "bhsd", "thd")):
            views = replace(contiguous, dtype=dtype, layout=layout, packed=True)
            rows.append(rotation(_PLAN, views, f"{layout} {dtype}"))
        return rows + baselines(contiguous.bytes_accessed, contiguous.copies)

    return Case("layouts", described("layouts", model.heads_text), contenders, overrun=2.0)
