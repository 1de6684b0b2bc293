"""Compiling kernels ahead of their first use: `rope_cpu.warmup` and `rope-cpu warmup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from rope_cpu._check import DTYPES, FORMAT_OF
from rope_cpu.kernels.angles import cos_sin
from rope_cpu.kernels.rotate import PAIRINGS, rotation
from rope_cpu.kernels.vectors import converts_float16

if TYPE_CHECKING:  # `import rope_cpu` comes by here and has no use for it
    import argparse


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
        pairings. A kernel that is not in the cache takes up to a second or two, one that is takes milliseconds.

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


def todo(dtypes: DTypeLike | Sequence[DTypeLike]) -> list[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Return the kernels that these dtypes need, each as the function that compiles it and the arguments for it."""
    names = _names(dtypes)
    rotated = ["float32" if name == "float16" and not converts_float16() else name for name in names]
    # Cos and sin of a plan are float32 until it rotates float64; tables of 16 bits are rounded from float64.
    return [
        *((cos_sin, (real,)) for real in ("float32", "float64")),
        *((rotation, key) for key in product(dict.fromkeys(rotated), PAIRINGS)),
    ]


def _names(dtypes: DTypeLike | Sequence[DTypeLike]) -> list[str]:
    many: Any = dtypes if isinstance(dtypes, list | tuple | set | frozenset) else [dtypes]
    names = []
    for dtype in many:
        try:
            name = FORMAT_OF[np.dtype(dtype if dtype is not None else "none")]  # NumPy takes None for float64
        except (KeyError, TypeError, ValueError):
            raise TypeError(f"`dtypes` holds {dtype!r}; each must be one of {', '.join(DTYPES)}") from None
        if name not in names:
            names.append(name)
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments of `rope-cpu warmup`."""
    parser.add_argument(
        "dtypes",
        nargs="*",
        type=_argument,
        metavar="DTYPE",
        default=list(DTYPES),
        help=f"some of {', '.join(DTYPES)} (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Fill the cache and print a line for each kernel."""
    caches, total = set(), 0.0
    for made in specialise(args.dtypes):
        print(f"{made.name:40}{'compiled' if made.compiled else 'cached':10}{made.seconds:7.2f} s", flush=True)
        caches.add(made.cache)
        total += made.seconds
    places = sorted(str(folder) for folder in caches if folder)
    where = f"cached in {', '.join(places)}" if places else "cached nowhere: NUMBA_CACHE_DIR may name a folder for them"
    print(f"{total:.1f} s in all; {where}")
    return 0


def _argument(dtype: str) -> str:
    import argparse

    try:
        return _names(dtype)[0]
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
