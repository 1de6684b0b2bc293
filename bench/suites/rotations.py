"""The cases of rotation: decode and prefill in every variant, other kinds of rotation, other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.machine import last_level_cache

from ..implementations.registry import BY_NAME, PEERS
from ..measurement.case import Case, Contender
from ..measurement.timing import Effort
from ..models import Model
from ..workload import DTYPES, Workload, text_ids
from .contenders import baselines, rotating

# Name of a shape → (batch, tokens).
SHAPES = {f"decode-{n}": (n, 1) for n in (1, 8, 64)} | {
    f"prefill-{n}": (1, n) for n in (128, 512, 4096, 32768)
}
HEADLINE = ("decode-1", "prefill-512", "prefill-4096")
# A decode step comes after this many tokens; from so many tokens on only the plan is timed.
_CONTEXT, _LONG = 4096, 16384
# Cold copies together take this many times the last-level cache; warm ones are for different places in memory.
_BEYOND_CACHE, _MOST_COPIES, _PLACES = 3, 4096, 5


@dataclass(frozen=True)
class Variant:
    """What distinguishes the cases of one shape. usual: the pairing is the model's own."""

    dtype: str
    usual: bool
    in_place: bool
    cold: bool

    @property
    def changes(self) -> int:
        """In how many ways it differs from the headline: its own pairing, in place, warm, bfloat16 or float32."""
        return (
            (not self.usual)
            + (not self.in_place)
            + self.cold
            + (self.dtype not in ("bfloat16", "float32"))
        )

    def name(self, shape: str, interleaved: bool) -> str:
        """Return the name of the case of this variant."""
        pairing = "" if self.usual else "interleaved" if interleaved else "half"
        parts = (
            shape,
            self.dtype,
            pairing,
            "" if self.in_place else "out",
            "cold" if self.cold else "",
        )
        return "/".join(part for part in parts if part)

    def in_plain_run(self, shape: str) -> bool:
        """Return True if a plain run has it: one change at a time, of 512 tokens and, cold, of a decode step."""
        one_change = shape == "prefill-512" or (shape == "decode-1" and self.cold)
        return self.changes == 0 or (self.changes == 1 and one_change)


def decode_and_prefill(model: Model, peers: bool | None, threads: Sequence[int]) -> Iterator[Case]:
    """Yield decode and prefill in every shape and variant.

    peers: with other implementations, without, or (None) with them in the headline. threads: several numbers of
    threads to time the plan at, instead; none: that in use.
    """
    for shape, *values in product(SHAPES, DTYPES, (True, False), (True, False), (False, True)):
        yield _case(shape, Variant(*values), model, peers, threads)


def _case(
    shape: str, variant: Variant, model: Model, peers: bool | None, threads: Sequence[int]
) -> Case:
    (batch, tokens), rope = SHAPES[shape], model.own if variant.usual else model.other
    ids = np.arange(tokens) if tokens > 1 else _CONTEXT + 17 * np.arange(batch)[:, None]
    workload = Workload(rope, text_ids(rope, ids), model.heads, model.kv_heads, variant.dtype)
    workload = _with_copies(replace(workload, in_place=variant.in_place), variant.cold)
    headline = variant.changes == 0 and shape in HEADLINE
    compared = not threads and (headline if peers is None else peers)
    names = ["plan"]
    if not threads and tokens < _LONG:
        names += ["plan, new arrays", "call"] if headline else ["call"]
    names += PEERS if compared else ()
    amount = f"{tokens} tokens" if tokens > 1 else f"a token of {batch} sequence{'s'[: batch > 1]}"
    result = ("in place" if variant.in_place else "into other arrays") + ", cold" * variant.cold
    slow = variant.cold or tokens >= _LONG
    return Case(
        variant.name(shape, rope.interleaved),
        f"{amount}, {model.heads} + {model.kv_heads} heads of {rope.head_dim}, {result}",
        partial(_rows, workload, names, threads),
        default=variant.in_plain_run(shape),
        cold=variant.cold,
        memory=2 * (1 + len(names)) * workload.copies * workload.packed_bytes,
        effort=Effort(budget=6.0 if compared else 1.5 if slow else 1.0),
    )


def _with_copies(workload: Workload, cold: bool = False) -> Workload:
    """Return a workload with copies beyond the caches or, warm, several where they fit and their places matter."""
    cache, size = last_level_cache(), workload.packed_bytes
    if cold:
        return replace(workload, copies=max(2, min(_MOST_COPIES, _BEYOND_CACHE * cache // size)))
    return replace(workload, copies=_PLACES if size < cache else 1)


def _rows(workload: Workload, names: Sequence[str], threads: Sequence[int]) -> list[Contender]:
    fitting = [name for name in names if workload.rope.interleaved in BY_NAME[name].pairings]
    rows = [rotating(name, workload, threads=n) for name in fitting for n in threads or (None,)]
    size = workload.bytes_accessed
    new_bytes = size // 2 if any(BY_NAME[name].new for name in names) else 0
    return rows + baselines(size, workload.copies, threads, not workload.in_place, new_bytes)


def other_kinds(threads: Sequence[int]) -> Iterator[Case]:
    """Yield rotations of other kinds."""
    ids, grid = np.arange(512), np.indices((64, 64)).reshape(2, -1).T

    def partially() -> Workload:
        return Workload(RotaryEmbedding(128, rotary_dim=64, rope_theta=5e5), ids)

    def axial() -> Workload:
        return Workload(RotaryEmbedding.axial(64, 2), grid, 16, 16)

    def mrope() -> Workload:
        rope = RotaryEmbedding.mrope(128, [16, 24, 24], rope_theta=1e6)
        return Workload(rope, text_ids(rope, ids), 28, 4)

    kinds: dict[str, tuple[Callable[[], Workload], str]] = {
        "partial": (partially, "512 tokens, 32 + 8 heads of 128, of which 64 are rotated"),
        "axial-2d": (axial, "an image of 64 by 64 patches, 16 + 16 heads of 64"),
        "mrope": (mrope, "512 tokens at three coordinates each, 28 + 4 heads of 128"),
    }
    for name, (make, what) in kinds.items():
        for dtype in ("bfloat16", "float32"):
            yield Case(f"{name}/{dtype}", what, partial(_other_kind, make, dtype, threads))


def _other_kind(
    make: Callable[[], Workload], dtype: str, threads: Sequence[int]
) -> list[Contender]:
    workload = _with_copies(replace(make(), dtype=dtype))
    return _rows(workload, ["plan"] if threads else ["plan", "call"], threads)


def layouts(model: Model) -> Case:
    """Return strided views of one packed buffer against contiguous arrays; its ratios are per byte."""

    def contenders() -> list[Contender]:
        ids = text_ids(model.own, np.arange(512))
        plain = Workload(model.own, ids, model.heads, model.kv_heads, packed=False, copies=_PLACES)
        rows = [rotating("plan", plain, "contiguous bshd float32")]
        for dtype, layout in product(("float32", "bfloat16"), ("bshd", "bhsd", "thd")):
            views = replace(plain, dtype=dtype, layout=layout, packed=True)
            rows.append(rotating("plan", views, f"{layout} {dtype}"))
        return rows + baselines(plain.bytes_accessed, plain.copies)

    return Case(
        "layouts",
        "512 tokens: views of a packed QKV buffer against contiguous arrays, per byte",
        contenders,
    )
