"""What each export target can express; everything else is refused here, before a graph is begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from rope_cpu.validation.scalars import one_of, whole_number

FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)
HALF = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclass(frozen=True)
class Target:
    """One way to write a rotation in ONNX.

    op: the operator that rotates; opsets: the first and the last opset it is written in; default_opset: what is
    written unless asked otherwise; dtypes: types of queries and keys; per_head: heads may have their own frequencies.
    """

    name: str
    op: str
    opsets: tuple[int, int]
    default_opset: int
    dtypes: tuple[np.dtype[Any], ...]
    per_head: bool = False


TARGETS = {
    target.name: target
    for target in (
        Target("primitive", "ops of opset 13", (13, 24), 13, (FLOAT32, FLOAT64, *HALF), per_head=True),
        Target("onnx", "ai.onnx RotaryEmbedding", (23, 24), 23, (FLOAT32, *HALF)),
        Target("ort", "com.microsoft RotaryEmbedding", (13, 24), 13, (FLOAT32, *HALF)),
    )
}


def target_of(name: object) -> Target:
    """Return the target of a name; raise unless there is one."""
    return TARGETS[one_of("target", name, tuple(TARGETS))]


def known_dtype(name: str, value: DTypeLike, known: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return `value` as a dtype; raise unless it is one of the known ones."""
    try:  # NumPy takes None for float64
        wanted = None if value is None else np.dtype(value)
    except TypeError:
        wanted = None
    if wanted is None or wanted not in known:
        raise TypeError(f"`{name}` is {wanted or repr(value)}; it must be one of {', '.join(map(str, known))}")
    return wanted


def dtype_of(dtype: DTypeLike, target: Target) -> np.dtype[Any]:
    """Return `dtype` if the target can express it."""
    wanted = known_dtype("dtype", dtype, TARGETS["primitive"].dtypes)
    if wanted not in target.dtypes:
        able = " or ".join(repr(name) for name, other in TARGETS.items() if wanted in other.dtypes)
        raise ValueError(f"`dtype` is {wanted}, which {target.op} has no kernel for; target {able} can express it")
    return wanted


def opset_of(opset: int | None, target: Target) -> int:
    """Return the opset to write, the target's own where `opset` is None."""
    if opset is None:
        return target.default_opset
    wanted, (first, last) = whole_number("opset", opset), target.opsets
    if not first <= wanted <= last:
        raise ValueError(f"`opset` is {wanted}; target {target.name!r} is written in opsets {first} to {last}")
    return wanted


def core_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that a rotation of `dtype` is computed in."""
    return FLOAT64 if dtype == FLOAT64 else FLOAT32
