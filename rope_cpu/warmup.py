"""Compiling kernels ahead of their first use: `rope_cpu.warmup` and `rope-cpu warmup`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from rope_cpu.arguments.arrays import to_dtype
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import (
    CACHE_FORMATS,
    CACHE_KINDS,
    DTYPE_LIST,
    DTYPES,
    CacheDtype,
    CacheKind,
    Dtype,
    DtypeName,
)
from rope_cpu.kernels.angles import cos_sin_kernel, cos_sin_part
from rope_cpu.kernels.append import append_kernel, append_part
from rope_cpu.kernels.attention import (
    PARTS,
    attention_kernel,
    attention_part,
    transform_kernel,
)
from rope_cpu.kernels.rotate import PAIRINGS, rotation_kernel, rotation_part
from rope_cpu.kernels.rotate_cached import rotate_cached_kernel, rotate_cached_part

_ALL_DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)

# A function that compiles or loads a kernel, and its arguments.
Build = tuple[Callable[..., Any], tuple[str | CacheKind, ...]]


@dataclass(frozen=True)
class Specialisation:
    """One compiled kernel, as returned by `warmup`.

    Attributes
    ----------
    name : str
        Operation, dtype and pairing, such as ``rotate_part_float32_half``.
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


def warmup(
    dtypes: Dtype | Sequence[Dtype] = _ALL_DTYPES,
    cache_dtypes: CacheDtype | str | Sequence[CacheDtype | str] | None = None,
) -> list[Specialisation]:
    """Compile kernels into the cache on disk, for this process and later ones.

    A kernel takes some seconds to compile, and milliseconds to load from the cache.

    Parameters
    ----------
    dtypes : dtype-like or sequence of dtype-like, optional
        Dtypes of the arrays to be rotated: float32, float64, float16, bfloat16. All by default.
        Each is compiled for both pairings.
    cache_dtypes : dtype-like or sequence of dtype-like, optional
        Dtypes of the caches of a server: float32, float16, bfloat16, int8; where values have
        another dtype or keys are transformed, the name in the text of such a `KVCache`, as
        "int8-int4" or "int8-int4-hadamard". None by default: no kernels of caches. With a dtype,
        the kernels of `RotaryPlan.append` are compiled for every pair of an input dtype (float64
        has none) and a cache dtype, those of `RotaryPlan.rotate_cached` for every cache whose keys
        it rotates, and those of `attention` for every cache. Norms without a cache,
        ``plan(q, k, q_norm=…)``, need the kernel whose cache has the dtype of the input.

    Returns
    -------
    list of Specialisation
        The kernels, with the time that each took.

    Raises
    ------
    TypeError
        If `dtypes` or `cache_dtypes` holds any other dtype.
    ValueError
        If `cache_dtypes` is given and `dtypes` holds float64 alone.

    Examples
    --------
    >>> from rope_cpu.warmup import warmup
    >>> for kernel in warmup("float32", cache_dtypes="float32"):
    ...     print(kernel.name)
    cos_sin_float32
    cos_sin_float64
    cos_sin_part_float32
    cos_sin_part_float64
    rotate_float32
    rotate_part_float32_half
    rotate_part_float32_interleaved
    append_float32_float32
    append_part_float32_float32_half
    append_part_float32_float32_interleaved
    rotate_cached_float32
    rotate_cached_part_float32_half
    rotate_cached_part_float32_interleaved
    attention_float32
    attention_attend_float32
    attention_finish_float32
    """
    return list(compile_kernels(kernel_builds(dtypes, cache_dtypes)))


def compile_kernels(builds: Sequence[Build]) -> Iterator[Specialisation]:
    """Compile or load one kernel after the other."""
    for build, arguments in builds:
        start = time.perf_counter()
        kernel = build(*arguments)
        seconds = time.perf_counter() - start
        stats = kernel.stats
        folder = Path(stats.cache_path) if stats.cache_path else None
        yield Specialisation(kernel.__name__, seconds, not stats.cache_hits, folder)


def kernel_builds(dtypes: Any, cache_dtypes: Any = None) -> list[Build]:
    """Return how to build each kernel that these dtypes need."""
    names = _names("dtypes", dtypes, DTYPES, DTYPE_LIST)
    # The cos and sin of a plan are float32 until it rotates float64; 16-bit tables are rounded from
    # float64. So any dtype may need both.
    builds: list[Build] = [*product((cos_sin_kernel, cos_sin_part), [("float32",), ("float64",)])]
    for name in names:
        builds.append((rotation_kernel, (name,)))
        builds += [(rotation_part, (name, pairing)) for pairing in PAIRINGS]
    if cache_dtypes is not None:
        listed = f"{', '.join(CACHE_FORMATS)}, and names of caches such as int8-int4-hadamard"
        caches = _names("cache_dtypes", cache_dtypes, CACHE_KINDS, listed)
        inputs = [name for name in names if name != "float64"]
        if caches and not inputs:
            rule = "be left out, as `dtypes` holds float64 alone, which has no kernels of caches"
            raise ArgumentError("cache_dtypes", caches, rule)
        builds += _cache_builds(inputs, [CACHE_KINDS[name] for name in caches])
    return builds


def _cache_builds(dtypes: list[str], kinds: list[CacheKind]) -> list[Build]:
    """Return how to build the kernels of caches.

    dtypes: those of the inputs that have such kernels.
    """
    builds: list[Build] = []
    for dtype, kind in product(dtypes, kinds):
        builds.append((append_kernel, (dtype, kind)))
        builds += [(append_part, (dtype, kind, pairing)) for pairing in PAIRINGS]
    for kind in kinds:
        if kind.hadamard:
            builds.append((transform_kernel, ()))
        elif CACHE_FORMATS[kind.key].scale_dtype is None:
            builds.append((rotate_cached_kernel, (kind.key,)))
            builds += [(rotate_cached_part, (kind.key, pairing)) for pairing in PAIRINGS]
        plain = kind._replace(hadamard=False)
        builds.append((attention_kernel, (plain,)))
        builds += [(attention_part, (plain, name)) for name in PARTS]
    return list(dict.fromkeys(builds))


def _names(argument: str, dtypes: Any, known: Collection[str], listed: str) -> list[str]:
    """Return the names of dtypes, each once; listed: the known names, for the error."""
    names: dict[str, None] = {}
    for dtype in dtypes if isinstance(dtypes, list | tuple | set | frozenset) else [dtypes]:
        name = dtype if isinstance(dtype, str) and dtype in known else str(to_dtype(dtype))
        if name not in known:
            finding = Finding.holds(shown(dtype))
            raise ArgumentTypeError(argument, finding, f"hold none but {listed}")
        names[name] = None
    return list(names)
