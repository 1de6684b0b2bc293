"""Compiling kernels ahead of their first use: `rope_cpu.warmup` and `rope-cpu warmup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import DTypeLike

from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import DTYPE_LIST, DTYPE_NAMES, DTYPES
from rope_cpu.kernels.angles import cos_sin_kernel
from rope_cpu.kernels.rotate import PAIRINGS, rotation_kernel
from rope_cpu.kernels.vectors import converts_float16

# A function that compiles or loads a kernel, and its arguments.
_Build = tuple[Callable[..., Any], tuple[str, ...]]


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel, as returned by `warmup`.

    Attributes
    ----------
    name : str
        Operation, dtype and pairing, such as ``rotate_float32_half``.
    seconds : float
        Time of this compilation, or of loading the kernel from the cache, in seconds.
    compiled : bool
        True if the kernel was compiled now, False if it was in the cache.
    cache : pathlib.Path or None
        Folder that holds the kernel. None if no folder is writable: then every process compiles.
    """

    name: str
    seconds: float
    compiled: bool
    cache: Path | None


def warmup(dtypes: DTypeLike | Sequence[DTypeLike] = tuple(DTYPES)) -> list[Specialisation]:
    """Compile the rotation kernels into the cache on disk, for this process and later ones.

    A kernel takes about 3 seconds to compile, and milliseconds to load from the cache.

    Parameters
    ----------
    dtypes : dtype-like or sequence of dtype-like, optional
        Dtypes of the arrays to be rotated: float32, float64, float16, bfloat16. All by default.
        Each is compiled for both pairings.

    Returns
    -------
    list of Specialisation
        The kernels, with the time that each took.

    Raises
    ------
    TypeError
        If `dtypes` holds any other dtype.

    Examples
    --------
    >>> from rope_cpu.warmup import warmup
    >>> for kernel in warmup("float32"):
    ...     print(kernel.name)
    cos_sin_float32
    cos_sin_float64
    rotate_float32_half
    rotate_float32_interleaved
    """
    return list(compile_kernels(dtypes))


def compile_kernels(dtypes: DTypeLike | Sequence[DTypeLike]) -> Iterator[Specialisation]:
    """Compile or load one kernel after the other."""
    for build, arguments in kernel_builds(dtypes):
        start = time.perf_counter()
        kernel = build(*arguments)
        seconds = time.perf_counter() - start
        stats = kernel.stats
        folder = Path(stats.cache_path) if stats.cache_path else None
        yield Specialisation(kernel.__name__, seconds, not stats.cache_hits, folder)


def kernel_builds(dtypes: DTypeLike | Sequence[DTypeLike]) -> list[_Build]:
    """Return how to build each kernel that these dtypes need."""
    # The cos and sin of a plan are float32 until it rotates float64; 16-bit tables are rounded from
    # float64. So any dtype may need both.
    builds: list[_Build] = [(cos_sin_kernel, ("float32",)), (cos_sin_kernel, ("float64",))]
    rotated = []
    for name in dtype_names(dtypes):
        # Processors that do not convert float16 rotate it as float32.
        kernel_dtype = "float32" if name == "float16" and not converts_float16() else name
        if kernel_dtype not in rotated:
            rotated.append(kernel_dtype)
    for name in rotated:
        builds += [(rotation_kernel, (name, pairing)) for pairing in PAIRINGS]
    return builds


def dtype_names(dtypes: DTypeLike | Sequence[DTypeLike]) -> list[str]:
    """Return the names of dtypes, without duplicates; raise TypeError for one without a kernel."""
    listed: Any = dtypes if isinstance(dtypes, list | tuple | set | frozenset) else [dtypes]
    names: list[str] = []
    for dtype in listed:
        name = DTYPE_NAMES.get(to_dtype(dtype))
        if name is None:
            raise TypeError(f"`dtypes` holds {shown(dtype)}; each must be one of {DTYPE_LIST}")
        if name not in names:
            names.append(name)
    return names
