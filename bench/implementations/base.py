"""A call that is ready to be made: what an implementation makes of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rope_cpu.array_types import Array

from ..workload import Pair


class UnavailableError(Exception):
    """An implementation cannot be timed here, for the reason that the message gives."""


def _unchanged(x: Any) -> Any:
    return x


@dataclass(frozen=True)
class Binding:
    """A function and the arguments of its calls.

    inputs: the q and k of the first call, as NumPy arrays. bshd: brings them and results to (batch, seq, heads,
    head_dim). results: makes NumPy arrays of what the function returns.
    """

    function: Callable[..., Any]
    sets: list[tuple[Any, ...]]
    inputs: Pair
    bshd: Callable[[Array], Array] = _unchanged
    results: Callable[[Any], Pair] = _unchanged
