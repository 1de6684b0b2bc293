"""Calls that rotate a workload, and the workloads that an implementation supports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from rope_cpu.array_types import DTYPES, Array

from ..measurement.case import UnavailableError
from ..measurement.timing import Call
from ..workload import Pair, Workload


def require(
    workload: Workload,
    *,
    modules: Sequence[str] = (),
    dtypes: Sequence[str] = tuple(DTYPES),
    pairings: Sequence[bool] = (False, True),
    one_axis: bool = False,
) -> None:
    """Raise UnavailableError unless an implementation of whole head vectors supports a workload.

    modules: modules that it imports. dtypes, pairings (interleaved or not): those that it has.
    one_axis: whether it supports one position per token only.
    """
    rope = workload.rope
    for module in modules:
        if find_spec(module) is None:
            raise UnavailableError(f"{module} is not installed")
    if workload.dtype not in dtypes:
        raise UnavailableError(f"has no {workload.dtype}")
    if rope.interleaved not in pairings:
        raise UnavailableError("rotates the other pairing only")
    if rope.rotary_dim != rope.head_dim or len(rope.blocks) > 1:
        raise UnavailableError("rotates whole head vectors only")
    if one_axis and rope.axes > 1:
        raise UnavailableError("takes one position per token")


def as_returned(returned: Any) -> Pair:
    """Return q and k of a function that returns them as NumPy arrays in the input's layout."""
    q, k = returned
    return q, k


def bshd_axes(x: Array) -> Array:
    """Return an array that has the axes (batch, seq, heads, head_dim) already."""
    return x


def rotation_call(
    workload: Workload,
    function: Callable[..., Any],
    argument_sets: Sequence[tuple[Any, ...]],
    inputs: Pair,
    *,
    arithmetic: str = "float32",
    results: Callable[[Any], Pair] = as_returned,
    bshd: Callable[[Array], Array] = bshd_axes,
    allocates: bool = False,
) -> Call:
    """Return a call whose first result is checked against the exact rotation.

    inputs: q and k of the first set, as NumPy arrays; copied, since a call may overwrite them.
    arithmetic: see `Workload.error`. results: converts a returned value to NumPy arrays.
    bshd: converts inputs and results to axes (batch, seq, heads, head_dim).
    """

    def checked(x: Array) -> Array:
        return bshd(x)[:, workload.checked_tokens].copy()

    originals = [checked(x) for x in inputs]

    def error(returned: Any) -> float:
        pairs = zip(originals, results(returned), strict=True)
        return max(workload.error(x, checked(result), arithmetic) for x, result in pairs)

    return Call(
        function,
        argument_sets,
        bytes_accessed=workload.bytes_accessed,
        error=error,
        allocates=allocates,
    )
