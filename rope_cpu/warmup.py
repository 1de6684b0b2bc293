"""Compiling kernels ahead of their first use: `rope_cpu.warmup` and `rope-cpu warmup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import DTYPE_LIST, DTYPE_NAMES, DTYPES
from rope_cpu.kernels.angles import cos_sin
from rope_cpu.kernels.rotate import PAIRINGS, rotation
from rope_cpu.kernels.vectors import converts_float16


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel.

    name: what it does, in which dtype. seconds: how long it took to compile or load now.
    compiled: it was not in the cache before. cache: the folder that holds it, None where no folder is writable and
    every process compiles.
    """

    name: str
    seconds: float
    compiled: bool
    cache: Path | None


def warmup(dtypes: DTypeLike | Sequence[DTypeLike] = tuple(DTYPES)) -> list[Specialisation]:
    """Compile the kernels that rotate in these dtypes into the cache on disk, for later processes; return them.

    dtypes: one or several of float32, float64, float16 and bfloat16; all by default. Each comes in both
        pairings. A kernel that is not in the cache takes some 3 seconds, one that is takes milliseconds.

    Raises TypeError for any other dtype.
    """
    return list(specialise(dtypes))


def specialise(dtypes: DTypeLike | Sequence[DTypeLike]) -> Iterator[Specialisation]:
    """Compile or load one kernel after the other."""
    for kernel, arguments in todo(dtypes):
        start = time.perf_counter()
        made = kernel(*arguments)
        seconds, stats = time.perf_counter() - start, made.stats
        folder = Path(stats.cache_path) if stats.cache_path else None
        yield Specialisation(made.__name__, seconds, not stats.cache_hits, folder)


def todo(
    dtypes: DTypeLike | Sequence[DTypeLike],
) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Return the kernels that these dtypes need, each as the function that compiles it and the arguments for it."""
    names = dtype_names(dtypes)
    rotated = [
        "float32" if name == "float16" and not converts_float16() else name for name in names
    ]
    # Cos and sin of a plan are float32 until it rotates float64; tables of 16 bits are rounded from float64.
    return [
        *((cos_sin, (real,)) for real in ("float32", "float64")),
        *((rotation, key) for key in product(dict.fromkeys(rotated), PAIRINGS)),
    ]


def dtype_names(dtypes: DTypeLike | Sequence[DTypeLike]) -> list[str]:
    """Return the names of dtypes that can be rotated, each once; raise TypeError for any other."""
    many: Any = dtypes if isinstance(dtypes, list | tuple | set | frozenset) else [dtypes]
    names = []
    for dtype in many:
        name = DTYPE_NAMES.get(to_dtype(dtype))
        if name is None:
            raise TypeError(f"`dtypes` holds {shown(dtype)}; each must be one of {DTYPE_LIST}")
        if name not in names:
            names.append(name)
    return names
