"""Conversions of the values of options of `rope-cpu bench`."""

from __future__ import annotations

import argparse
import math

from rope_cpu.arguments.texts import shown


def thread_counts(text: str) -> tuple[int, ...]:
    """Convert the value of --threads."""
    try:
        counts = {int(part) for part in text.split(",")}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a number of threads, nor several such as 1,2,4"
        ) from None
    return tuple(sorted(counts))


def percentage(text: str) -> float:
    """Convert the value of --fail-slower to a fraction."""
    try:
        value = float(text.removesuffix("%")) / 100
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a percentage above 0, such as 10%")
    return value
