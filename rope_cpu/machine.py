"""Facts about the processor."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_WHERE_UNKNOWN = 32 * 2**20


@cache
def caches() -> dict[str, int]:
    """Return the sizes of the data caches that the first core sees, in bytes: {"L1": …, "L2": …}."""
    found = {}
    for file in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        try:
            size, kind, level = (
                file.with_name(name).read_text().strip() for name in ("size", "type", "level")
            )
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in _UNITS:
            found[f"L{level}"] = int(size[:-1]) * _UNITS[size[-1]]
    return found


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def last_level_cache() -> int:
    """Return the size of the last-level cache in bytes; 32 MiB where the system does not report it."""
    return max(caches().values(), default=_WHERE_UNKNOWN)
