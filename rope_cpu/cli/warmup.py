"""`rope-cpu warmup`: compile the kernels into the cache on disk."""

from __future__ import annotations

import argparse

from rope_cpu.array_types import DTYPES
from rope_cpu.warmup import dtype_names, specialise


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
        print(
            f"{made.name:40}{'compiled' if made.compiled else 'cached':10}{made.seconds:7.2f} s",
            flush=True,
        )
        caches.add(made.cache)
        total += made.seconds
    places = sorted(str(folder) for folder in caches if folder)
    where = (
        f"cached in {', '.join(places)}"
        if places
        else "cached nowhere: NUMBA_CACHE_DIR may name a folder for them"
    )
    print(f"{total:.1f} s in all; {where}")
    return 0


def _argument(dtype: str) -> str:
    try:
        return dtype_names(dtype)[0]
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
