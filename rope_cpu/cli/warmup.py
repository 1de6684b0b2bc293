"""`rope-cpu warmup`: compile the kernels into the cache on disk, or empty it."""

from __future__ import annotations

import argparse

from rope_cpu.array_types import CACHE_FORMATS, DTYPE_LIST, DTYPES
from rope_cpu.cli.command_line import UsageError, print_lines, usage_errors
from rope_cpu.kernels.compile import clear_cache
from rope_cpu.warmup import compile_kernels, kernel_builds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `rope-cpu warmup`."""
    dtypes = f"dtypes to compile for: {DTYPE_LIST} (default: all)"
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", help=dtypes)
    caches = (
        f"also compile the kernels for caches of a server of these: {', '.join(CACHE_FORMATS)}, "
        "or of a kind such as int8-int4-hadamard: keys, values, and whether keys are transformed"
    )
    parser.add_argument("--cache-dtypes", type=_names, metavar="DTYPE[,DTYPE…]", help=caches)
    clear = "delete the cached kernels of this installation; do so before `pip uninstall`"
    parser.add_argument("--clear", action="store_true", help=clear)


def _names(text: str) -> list[str]:
    return text.split(",")


def run(args: argparse.Namespace) -> int:
    """Fill the cache and print a line for each kernel, or empty it; return 0.

    Raises UsageError for dtypes without kernels, or if `--clear` comes with dtypes.
    """
    if args.clear:
        return _clear(args)
    with usage_errors():
        builds = kernel_builds(args.dtypes or list(DTYPES), args.cache_dtypes)
    kernels = []
    for kernel in compile_kernels(builds):
        origin = "compiled" if kernel.compiled else "cached"
        print_lines([f"{kernel.name:56}{origin:10}{kernel.seconds:7.2f} s"])
        kernels.append(kernel)
    seconds = sum(kernel.seconds for kernel in kernels)
    folders = sorted({str(kernel.cache) for kernel in kernels if kernel.cache is not None})
    place = "not cached: set NUMBA_CACHE_DIR to a writable folder"
    if folders:
        place = f"cached in {', '.join(folders)}"
    print_lines([f"{seconds:.1f} s in all; {place}"])
    return 0


def _clear(args: argparse.Namespace) -> int:
    if args.dtypes or args.cache_dtypes:
        raise UsageError("`--clear` deletes the kernels of all dtypes; leave the dtypes out")
    print_lines(
        f"{len(sizes)} files, {sum(sizes) / 1e6:.1f} MB deleted from {folder}"
        for folder, sizes in clear_cache().items()
    )
    return 0
