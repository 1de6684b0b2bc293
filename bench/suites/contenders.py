"""The contenders of cases: rotations, and baselines that tell a slow machine from slow code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import rope_cpu

from ..implementations import bandwidth
from ..implementations.table import OURS, PEERS
from ..measurement.case import Contender
from ..measurement.rows import Row
from ..measurement.timing import Call
from ..plurals import counted
from ..workload import Workload

# The first-cache baseline of fewer bytes runs on one thread, as small rotations are serial.
_SERIAL_BYTES = 2**18


def rotation(
    name: str, workload: Workload, label: str | None = None, threads: int | None = None
) -> Contender:
    """Return an implementation of a rotation on a workload.

    name: of OURS or PEERS. label: name of the row, by default that of the implementation.
    threads: number of threads to set, None for the current number.
    """
    implementation = OURS[name] if name in OURS else PEERS[name]

    def prepare() -> Call:
        call = implementation(workload)
        if threads is None:
            return call
        return replace(call, before_sample=partial(rope_cpu.set_num_threads, threads))

    title = label or name
    if threads is not None:
        title = f"{title}, {counted(threads, 'thread')}"
    return Row(title, "ours" if name in OURS else "peer"), prepare


def baselines(
    bytes_accessed: int,
    copies: int = 1,
    threads: Sequence[int] = (),
    into_other: bool = False,
    new_bytes: int = 0,
) -> list[Contender]:
    """Return the limit of the machine, and the other baselines for rows of rope_cpu.

    The limit is the scaling of as many bytes in place: the fastest on one thread and on more.
    threads: numbers of threads, by default the current number.
    into_other: results go to other arrays, which takes twice the space in the caches.
    new_bytes: bytes that a call allocates, to be allocated and touched.
    """
    current = rope_cpu.get_num_threads()
    arrays = bandwidth.arrays(bytes_accessed, copies)

    def limit(count: int) -> Call:
        return Call(bandwidth.scale, [(x, x, count) for x in arrays], bytes_accessed)

    def first_cache() -> Call:
        count = current if bytes_accessed > _SERIAL_BYTES else 1
        return Call(bandwidth.scale_in_first_cache, [(bandwidth.first_cache_array(count), count)])

    def copy() -> Call:
        outputs = bandwidth.arrays(bytes_accessed, copies)
        argument_sets = [(x, out, current) for x, out in zip(arrays, outputs, strict=True)]
        return Call(bandwidth.scale, argument_sets, bytes_accessed)

    def memory() -> Call:
        return Call(bandwidth.scale_new, [(new_bytes // 4, current)], new_bytes)

    contenders: list[Contender] = []
    for count in sorted({1, *(threads or (current,))}):
        row = Row(f"limit, {counted(count, 'thread')}", "limit")
        contenders.append((row, partial(limit, count)))
    contenders.append((Row("scaled in the first cache", "core"), first_cache))
    if into_other:
        contenders.append((Row("scaled into another array", "copy"), copy))
    if new_bytes:
        contenders.append((Row("new memory", "memory"), memory))
    return contenders
