"""How contenders get ready: implementations of a rotation, and baselines that tell a slow machine from slow code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import rope_cpu

from ..implementations import bandwidth
from ..implementations.registry import BY_NAME
from ..measurement.case import Contender, Ready
from ..measurement.timing import nothing
from ..workload import Workload

# Work on fewer bytes is timed on one thread, as small rotations are serial.
_SERIAL_BYTES = 2**18


def rotating(
    name: str, workload: Workload, label: str | None = None, threads: int | None = None
) -> Contender:
    """Return an implementation of the table on a workload, checked against the exact reference before it is timed.

    threads: how many rope_cpu may use; None: as many as now.
    """
    implementation = BY_NAME[name]

    def bind() -> Ready:
        binding = implementation.bound(workload)

        def checked(x: Any) -> Any:
            return binding.bshd(x)[:, workload.checked].copy()

        given = [checked(x) for x in binding.inputs]

        def error(returned: Any) -> float:
            pairs = zip(given, binding.results(returned), strict=True)
            return max(workload.error(x, checked(y), implementation.arithmetic) for x, y in pairs)

        enter = partial(rope_cpu.set_num_threads, threads) if threads else nothing
        return Ready(
            binding.function,
            binding.sets,
            workload.bytes_accessed,
            error,
            enter,
            implementation.new,
        )

    return Contender((label or name) + (_on(threads) if threads else ""), implementation.role, bind)


def baselines(
    bytes_accessed: int,
    copies: int = 1,
    threads: Sequence[int] = (),
    into_other: bool = False,
    new_bytes: int = 0,
) -> list[Contender]:
    """Return the limit of the machine and the other baselines that rows of ours are compared with.

    The limit is the scaling of as many bytes in place: the fastest on one thread and on more (threads: on how many;
    none: on those in use). into_other: results go to other arrays, which takes twice the room in the caches. new_bytes:
    how much new memory calls return, to be taken and touched.
    """
    used = rope_cpu.get_num_threads()
    arrays = bandwidth.arrays(bytes_accessed, copies)

    def limit(count: int) -> Ready:
        return Ready(bandwidth.scale, [(x, x, count) for x in arrays], bytes_accessed)

    def core() -> Ready:
        count = used if bytes_accessed > _SERIAL_BYTES else 1
        return Ready(bandwidth.scale_in_first_cache, [(bandwidth.first_cache_array(count), count)])

    def copy() -> Ready:
        outs = bandwidth.arrays(bytes_accessed, copies)
        return Ready(
            bandwidth.scale,
            [(x, out, used) for x, out in zip(arrays, outs, strict=True)],
            bytes_accessed,
        )

    def memory() -> Ready:
        return Ready(bandwidth.scale_new, [(new_bytes // 4, used)], new_bytes)

    rows = [
        Contender("limit" + _on(n), "limit", partial(limit, n))
        for n in sorted({1, *(threads or (used,))})
    ]
    rows.append(Contender("scaled in the first cache", "core", core))
    if into_other:
        rows.append(Contender("scaled into another array", "copy", copy))
    if new_bytes:
        rows.append(Contender("new memory", "memory", memory))
    return rows


def _on(threads: int) -> str:
    return f", {threads} thread{'s'[: threads > 1]}"
