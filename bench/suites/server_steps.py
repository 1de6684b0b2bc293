"""The cases of a server's cache: new tokens into it, and cached keys moved in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

from ..implementations import caches
from ..implementations.cache_workload import HEAD_DIM, HEADS, KV_HEADS, Move, Step
from ..implementations.table import TORCH_COMPILED, first_calls
from ..measurement.case import Case, Contender
from ..measurement.rows import Row
from ..measurement.timing import Call, Effort
from .case_names import described
from .contenders import baselines

TOKENS = (1, 8, 32, 128, 512)


class Variant(NamedTuple):
    """What is done with float32 projections: the dtype of the cache, and whether they are normed.

    suffix: its part of the name of a case.
    """

    suffix: str
    cache_dtype: str
    normed: bool = False


VARIANTS = (
    Variant("", "float32"),
    Variant("/norm", "float32", normed=True),
    Variant("/to-bfloat16", "bfloat16"),
    Variant("/to-int8", "int8"),
)

# The tokens that a run without patterns times.
_DEFAULT_TOKENS = 32

# Name → (role, function that prepares a call).
Prepared = dict[str, tuple[str, Callable[[Any], Call]]]

_STEPS: Prepared = {
    "append": ("ours", caches.append),
    "plan alone, no cache": ("ours", caches.plan_alone),
    "plan and NumPy": ("peer", caches.plan_and_numpy),
}
_TORCH_STEPS: Prepared = {
    "torch eager": ("peer", caches.torch_eager),
    TORCH_COMPILED: ("peer", caches.torch_compiled),
}
_MOVES: Prepared = {
    "rotate_cached": ("ours", caches.rotate_cached),
    "contiguous keys, in place": ("ours", caches.rotate_contiguous),
    "NumPy, gather and scatter": ("peer", caches.gather_and_numpy),
}
_TORCH_MOVES: Prepared = {
    "torch eager": ("peer", caches.torch_move_eager),
    TORCH_COMPILED: ("peer", caches.torch_move_compiled),
}


def cases(peers: bool | None) -> Iterator[Case]:
    """Yield the cases. peers: False leaves other libraries out."""
    for tokens, variant in product(TOKENS, VARIANTS):
        yield _append_case(tokens, variant, peers is not False)
    for dtype in ("bfloat16", "float32"):
        yield _move_case(dtype, peers is not False)


def _append_case(tokens: int, variant: Variant, peers: bool) -> Case:
    family = f"serving-{tokens}"
    heads = f"{HEADS} + {KV_HEADS} heads of {HEAD_DIM}"
    step = Step(tokens, variant.cache_dtype, variant.normed)
    return Case(
        f"{family}/float32{variant.suffix}",
        described(family, heads, f"float32 into {variant.cache_dtype}"),
        partial(_contenders, step, _STEPS, _TORCH_STEPS, peers),
        default=tokens == _DEFAULT_TOKENS,
        effort=Effort(budget=3.0),
        first_calls=_first_calls(peers),
    )


def _move_case(dtype: str, peers: bool) -> Case:
    family = "serving-shift"
    return Case(
        f"{family}/{dtype}",
        described(family, f"{KV_HEADS} heads of {HEAD_DIM}, in place"),
        partial(_contenders, Move(dtype), _MOVES, _TORCH_MOVES, peers),
        effort=Effort(budget=3.0),
        first_calls=_first_calls(peers),
        overrun=1.0,
    )


def _first_calls(peers: bool) -> float:
    has_torch = peers and find_spec("torch") is not None
    return first_calls([TORCH_COMPILED]) if has_torch else 0.0


def _contenders(
    workload: Step | Move, prepared: Prepared, with_torch: Prepared, peers: bool
) -> list[Contender]:
    rows = {**prepared, **with_torch}
    contenders: list[Contender] = [
        (Row(name, role), partial(prepare, workload))
        for name, (role, prepare) in rows.items()
        if peers or role == "ours"
    ]
    return contenders + baselines(workload.bytes_accessed)
