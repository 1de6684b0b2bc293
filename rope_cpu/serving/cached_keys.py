"""From the keys of a cache to the kernel that rotates them in place."""

from __future__ import annotations

import numpy as np

from rope_cpu.array_types import Array
from rope_cpu.kernels import threads
from rope_cpu.kernels.compile import address_of
from rope_cpu.kernels.rotate_cached import rotate_cached_kernel, rotate_cached_part
from rope_cpu.kernels.vectors import converts_float16
from rope_cpu.serving.kv_cache import KVCache, check_writeable
from rope_cpu.serving.launches import Rotation
from rope_cpu.serving.slots import check_none_twice, round_slots, sorted_runs


def rotate_cached(rotation: Rotation, cache: KVCache, slots: Array) -> None:
    """Rotate the keys of slots in place; see `RotaryPlan.rotate_cached`.

    They are rotated in the order of their slots. In a random order of pages, two threads took up to
    twice as long: at the end of a page the processor loads the next one ahead, which the other
    thread may write.
    """
    _check_cached(rotation, cache, slots)
    runs = sorted_runs(slots)
    check_none_twice(runs)
    if not len(runs):
        return
    name = cache._dtype_name
    keys = cache._arrays[0]
    through_float32 = name == "float16" and not converts_float16()
    if through_float32:
        name = "float32"
        keys = keys.view(np.float16).astype(np.float32)
    part = rotate_cached_part(name, "interleaved" if rotation.interleaved else "half")
    # The kernel is loaded before `threads.serial` is read, as in `CosSin._compute`.
    kernel = rotate_cached_kernel(name)
    block_pairs = np.array(rotation.blocks, np.int64) // 2
    usable = 1 if threads.serial else threads.limit
    kernel(address_of(part), keys, runs, rotation.cos_sin, block_pairs, usable)
    if through_float32:
        round_slots(cache._arrays[0].view(np.float16), keys, slots)


def _check_cached(rotation: Rotation, cache: KVCache, slots: Array) -> None:
    """Raise unless the plan is for the keys of these slots."""
    rows, tokens, frequency_heads, _ = rotation.cos_sin.shape[1:]
    if cache.head_dim != rotation.head_dim:
        raise ValueError(
            f"`cache` has keys of head_dim {cache.head_dim}, but this rotary embedding has "
            f"head_dim {rotation.head_dim}"
        )
    if cache.kv_heads % frequency_heads:
        raise ValueError(
            f"`cache` has {cache.kv_heads} heads, but cos and sin differ by head and are for "
            f"{frequency_heads} heads; the number must be a multiple of {frequency_heads}"
        )
    subject, row_subject = rotation.subjects
    if tokens != slots.shape[1]:
        raise ValueError(
            f"`slot_mapping` has {slots.shape[1]} slots, but {subject} {tokens} tokens"
        )
    if rows not in (1, slots.shape[0]):
        raise ValueError(f"`slot_mapping` has batch {slots.shape[0]}, but {row_subject} {rows}")
    check_writeable(cache, ("key",))
