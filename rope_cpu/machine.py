"""Facts of the machine: the sizes of its caches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_DEFAULT_CACHE_BYTES = 32 * 2**20


@cache
def caches() -> dict[str, int]:
    """Return the sizes of the data caches of the first core in bytes: {"L1": …, "L2": …}."""
    sizes = {}
    for file in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        try:
            size = file.read_text().strip()
            kind = file.with_name("type").read_text().strip()
            level = file.with_name("level").read_text().strip()
        except OSError:
            continue
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in _UNITS:
            sizes[f"L{level}"] = int(size[:-1]) * _UNITS[size[-1]]
    return sizes


def last_level_cache() -> int:
    """Return the size of the last-level cache in bytes; 32 MiB if the system does not report it."""
    return max(caches().values(), default=_DEFAULT_CACHE_BYTES)
