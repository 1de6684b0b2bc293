"""Facts about the processor that kernels are told."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_WHERE_UNKNOWN = 32 * 2**20


@cache
def last_level_cache() -> int:
    """Return the size of the last-level cache in bytes; 32 MiB where the system does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in _UNITS:
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
    return max(sizes, default=_WHERE_UNKNOWN)


def seconds(call: Callable[[], object], times: int) -> float:
    """Return what the fastest of some calls took, in seconds, at least a billionth of one."""
    taken = []
    for _ in range(times):
        start = perf_counter()
        call()
        taken.append(perf_counter() - start)
    return max(min(taken), 1e-9)
