"""How contenders get ready: implementations of a rotation, and what tells a slow machine from slow code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import rope_cpu

from ..implementations import bandwidth
from ..implementations.registry import BY_NAME
from ..measurement.case import Contender, Ready
from ..measurement.timing import nothing
from ..workload import Workload

# Work of fewer bytes is timed on one thread, as small rotations are serial.
_SERIAL_BYTES = 2**18


def rotating(name: str, workload: Workload, label: str | None = None, threads: int | None = None) -> Contender | None:
    """Return an implementation of the table on a workload, checked against the float64 reference before it is timed.

    threads: how many ours may use; None: as many as now. None is returned for a form of the other pairing.
    """
    implementation = BY_NAME[name]
    if workload.rope.interleaved not in implementation.pairings:
        return None

    def bind() -> Ready:
        binding = implementation.bound(workload)

        def picked(x: Any) -> Any:
            return binding.bshd(x)[:, workload.checked].copy()

        given = [picked(x) for x in binding.inputs]

        def error(returned: Any) -> float:
            results = binding.results(returned)
            return max(
                workload.error(x, picked(y), implementation.arithmetic) for x, y in zip(given, results, strict=True)
            )

        enter = partial(rope_cpu.set_num_threads, threads) if threads else nothing
        return Ready(binding.function, binding.sets, workload.bytes_accessed, error, enter, implementation.new)

    return Contender((label or name) + _on(threads), implementation.role, bind)


def limits(bytes_accessed: int, copies: int = 1, threads: Sequence[int] = ()) -> list[Contender]:
    """Return the scaling of as many bytes in place, on one thread and on more: the fastest is the limit; and "core"."""
    shared: list[Any] = []

    def bind(count: int) -> Ready:
        if not shared:
            shared.extend(bandwidth.buffers(bytes_accessed, copies))
        enter, one = partial(rope_cpu.set_num_threads, count) if count > 1 else nothing, np.ones(1, np.float32)
        return Ready(bandwidth.scale, [(x, x, one, count > 1) for x in shared], bytes_accessed, enter=enter)

    counts = sorted({1, *(threads or (rope_cpu.get_num_threads(),))})
    rows = [Contender("limit" + _on(count), "limit", partial(bind, count)) for count in counts]
    return [*rows, Contender("scaled in the first cache", "core", partial(_in_cores, bytes_accessed))]


def _in_cores(bytes_accessed: int) -> Ready:
    parallel = rope_cpu.get_num_threads() > 1 and bytes_accessed > _SERIAL_BYTES
    return Ready(bandwidth.scale_in_cores, [(bandwidth.core_buffer(), np.ones(1, np.float32), parallel)])


def copy(bytes_accessed: int, copies: int = 1) -> Contender:
    """Return the scaling of as many bytes from one array to another, which takes twice the room in the caches."""
    parallel, one = rope_cpu.get_num_threads() > 1, np.ones(1, np.float32)

    def bind() -> Ready:
        pairs = zip(bandwidth.buffers(bytes_accessed, copies), bandwidth.buffers(bytes_accessed, copies), strict=True)
        return Ready(bandwidth.scale, [(x, out, one, parallel) for x, out in pairs], bytes_accessed)

    return Contender("scaled into another array", "copy", bind)


def memory(size: int) -> Contender:
    """Return the taking and touching of `size` bytes of new memory: what calls that return new arrays do besides."""
    parallel = rope_cpu.get_num_threads() > 1
    sets = [(size // 4, np.ones(1, np.float32), parallel)]
    return Contender("new memory", "memory", lambda: Ready(bandwidth.scale_new, sets, size))


def _on(threads: int | None) -> str:
    return "" if threads is None else f", {threads} thread{'s'[: threads > 1]}"
