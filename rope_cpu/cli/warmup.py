"""`rope-cpu warmup`: compile the kernels into the cache on disk."""

from __future__ import annotations

import argparse

from rope_cpu.array_types import DTYPE_LIST, DTYPES
from rope_cpu.warmup import compile_kernels, dtype_names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu warmup`."""
    parser.add_argument(
        "dtypes",
        nargs="*",
        type=_dtype_name,
        metavar="DTYPE",
        default=list(DTYPES),
        help=f"dtypes to compile for: {DTYPE_LIST} (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Fill the cache, print a line for each kernel, and return 0."""
    folders = set()
    total_seconds = 0.0
    for kernel in compile_kernels(args.dtypes):
        origin = "compiled" if kernel.compiled else "cached"
        print(f"{kernel.name:40}{origin:10}{kernel.seconds:7.2f} s", flush=True)
        if kernel.cache is not None:
            folders.add(str(kernel.cache))
        total_seconds += kernel.seconds
    print(f"{total_seconds:.1f} s in all; {_cache_text(folders)}")
    return 0


def _cache_text(folders: set[str]) -> str:
    if folders:
        return f"cached in {', '.join(sorted(folders))}"
    return "not cached: set NUMBA_CACHE_DIR to a writable folder"


def _dtype_name(dtype: str) -> str:
    try:
        (name,) = dtype_names(dtype)
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name
