"""The cases of rotation: decode and prefill in every form, other kinds of rotation, other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from rope_cpu import RotaryEmbedding
from rope_cpu.machine import last_level_cache

from ..implementations.registry import BY_NAME, PEERS
from ..measurement.case import Case, Contender
from ..measurement.timing import Effort
from ..models import Model
from ..workload import DTYPES, Workload
from .contenders import copy, limits, memory, rotating

DECODE = (1, 8, 64)
PREFILL = (128, 512, 4096, 32768)
HEADLINE = ("decode-1", "prefill-512", "prefill-4096")
# A decode step comes after this many tokens; from so many tokens on only the plan is timed.
_CONTEXT, _LONG = 4096, 16384
# Cold copies together take this many times the last-level cache; warm ones are for different places in memory.
_BEYOND_CACHE, _MOST_COPIES, _PLACES = 3, 4096, 5


@dataclass(frozen=True)
class Form:
    """What distinguishes the cases of one shape. usual: the pairing is the model's own."""

    dtype: str
    usual: bool = True
    in_place: bool = True
    cold: bool = False

    @property
    def changes(self) -> int:
        """In how many ways it differs from the headline: its own pairing, in place, warm, bfloat16 or float32."""
        return (not self.usual) + (not self.in_place) + self.cold + (self.dtype not in ("bfloat16", "float32"))

    def name(self, shape: str, interleaved: bool) -> str:
        """Return the name of the case of this form."""
        pairing = "" if self.usual else "interleaved" if interleaved else "half"
        parts = shape, self.dtype, pairing, "" if self.in_place else "out", "cold" if self.cold else ""
        return "/".join(part for part in parts if part)


def decode_and_prefill(model: Model, peers: bool | None, threads: Sequence[int]) -> Iterator[Case]:
    """Yield decode and prefill in every shape and form.

    peers: with other implementations, without, or (None) with them in the headline. threads: several numbers of
    threads to time ours at, instead; none: that in use.
    """
    ropes = {True: model.own, False: model.other}
    shapes = [f"decode-{n}" for n in DECODE] + [f"prefill-{n}" for n in PREFILL]
    forms = [Form(*values) for values in product(DTYPES, (True, False), (True, False))]
    for shape in shapes:
        for form in [Form(f.dtype, f.usual, f.in_place, cold) for f in forms for cold in (False, True)]:
            yield _case(shape, form, ropes[form.usual], model, peers, threads)


def _case(
    shape: str, form: Form, rope: RotaryEmbedding, model: Model, peers: bool | None, threads: Sequence[int]
) -> Case:
    kind, n = shape.split("-")[0], int(shape.split("-")[1])
    batch, tokens = (n, 1) if kind == "decode" else (1, n)
    ids = _CONTEXT + 17 * np.arange(batch)[:, None] if kind == "decode" else np.arange(tokens)
    if rope.axes > 1:  # text, in a model of several axes
        ids = np.repeat(ids[..., None], rope.axes, axis=-1)
    workload = Workload(rope, ids, batch, tokens, model.heads, model.kv_heads, form.dtype, in_place=form.in_place)
    enough = _BEYOND_CACHE * last_level_cache() // workload.packed_bytes
    workload = workload.but(copies=max(2, min(_MOST_COPIES, enough)) if form.cold else _places(workload))
    headline = form.changes == 0 and shape in HEADLINE
    compared = not threads and (headline if peers is None else peers)
    names = ["plan"]
    if not threads and tokens < _LONG:
        names += ["plan, new arrays"] if headline else []
        names += ["call"]
        names += ["bare kernel"] if shape == "decode-1" else []
    names += PEERS if compared else []
    amount = f"a token of {n} sequence{'s'[: n > 1]}" if kind == "decode" else f"{n} tokens"
    result = "in place" if form.in_place else "into other arrays"
    return Case(
        form.name(shape, rope.interleaved),
        f"{amount}, {model.heads} + {model.kv_heads} heads of {rope.head_dim}, {result}{', cold' * form.cold}",
        partial(_rows, workload, names, threads),
        default=_in_plain_run(shape, form),
        cold=form.cold,
        memory=workload.copies * workload.packed_bytes * (4 + 4 * len(names)) // 2,
        effort=_effort(compared, form.cold or tokens >= _LONG),
    )


def _places(workload: Workload) -> int:
    """Return how many copies a warm case has: several where they fit the caches, and it matters where they lie."""
    return _PLACES if workload.packed_bytes < last_level_cache() else 1


def _in_plain_run(shape: str, form: Form) -> bool:
    """Return True if a plain run has it: one thing varied at a time, of 512 tokens and, cold, of a decode step."""
    return form.changes == 0 or (form.changes == 1 and (shape == "prefill-512" or (shape == "decode-1" and form.cold)))


def _effort(compared: bool, slow: bool) -> Effort:
    return Effort(budget=6.0) if compared else Effort(budget=1.5 if slow else 1.0)


def _rows(workload: Workload, names: Sequence[str], threads: Sequence[int] = ()) -> list[Contender]:
    rows = [rotating(name, workload, threads=n) for name in names for n in threads or (None,)]
    # Those for the other pairing are no news to anybody.
    baselines = limits(workload.bytes_accessed, workload.copies, threads)
    baselines += [] if workload.in_place else [copy(workload.bytes_accessed, workload.copies)]
    baselines += [memory(workload.bytes_accessed // 2)] if any(BY_NAME[name].new for name in names) else []
    return [row for row in rows if row is not None] + baselines


def inv_freq(dim: int, base: float = 500000.0) -> Any:
    """Return base^(−2i/dim), float64 (dim/2,)."""
    return base ** (-np.arange(0, dim, 2) / dim)


def other_kinds(threads: Sequence[int]) -> Iterator[Case]:
    """Yield rotations of other kinds."""
    ids, patches = np.arange(512), np.arange(64)
    grid = np.stack(np.meshgrid(patches, patches, indexing="ij"), -1).reshape(-1, 2)

    def partially() -> Workload:
        return Workload(RotaryEmbedding.from_inv_freq(inv_freq(64), head_dim=128), ids, 1, 512)

    def axial() -> Workload:
        return Workload(RotaryEmbedding.axial(64, 2), grid, 1, 4096, 16, 16)

    def mrope() -> Workload:
        rope = RotaryEmbedding.mrope(128, [16, 24, 24], rope_theta=1e6)
        return Workload(rope, np.stack([ids] * 3, -1), 1, 512, 28, 4)

    kinds: dict[str, tuple[Callable[[], Workload], str]] = {
        "partial": (partially, "512 tokens, 32 + 8 heads of 128, of which 64 are rotated"),
        "axial-2d": (axial, "an image of 64 by 64 patches, 16 + 16 heads of 64"),
        "mrope": (mrope, "512 tokens at three coordinates each, 28 + 4 heads of 128"),
    }
    for name, (make, what) in kinds.items():
        for dtype in ("bfloat16", "float32"):
            yield Case(f"{name}/{dtype}", what, partial(_other_kind, make, dtype, threads))


def _other_kind(make: Callable[[], Workload], dtype: str, threads: Sequence[int]) -> list[Contender]:
    workload = make().but(dtype=dtype)
    return _rows(workload.but(copies=_places(workload)), ["plan"] if threads else ["plan", "call"], threads)


def layouts(model: Model) -> Case:
    """Return strided views of one packed buffer against contiguous arrays; its ratios are per byte."""

    def contenders() -> list[Contender]:
        rope, ids = model.own, np.arange(512)
        plain = Workload(
            rope, ids, 1, 512, model.heads, model.kv_heads, "float32", storage="contiguous", copies=_PLACES
        )
        rows = [rotating("plan", plain, "contiguous bshd float32")]
        for dtype, layout in product(("float32", "bfloat16"), ("bshd", "bhsd", "thd")):
            rows.append(rotating("plan", plain.but(dtype=dtype, layout=layout, storage="packed"), f"{layout} {dtype}"))
        return [row for row in rows if row is not None] + limits(plain.bytes_accessed, plain.copies)

    return Case("layouts", "512 tokens: views of a packed QKV buffer against contiguous arrays, per byte", contenders)
