"""The launches of the rotation kernels: of arrays, and of keys in a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import DTYPE_NAMES, Array
from rope_cpu.caches.kv_cache import KVCache, check_writeable
from rope_cpu.caches.slots import check_none_twice, sorted_runs
from rope_cpu.kernels import threads
from rope_cpu.kernels.compile import address_of
from rope_cpu.kernels.rotate import rotation_kernel, rotation_part
from rope_cpu.kernels.rotate_cached import rotate_cached_kernel, rotate_cached_part
from rope_cpu.launch.arrays import (
    HeadLayout,
    Rotation,
    kernel_view,
    launch_copies,
    refuse,
    results_for,
)
from rope_cpu.machine import last_level_cache

# A launch passes arrays to one kernel without copying them:
#     launch(cos_sin, q, k, q_out, k_out, arrays) -> bool
# It rotates q, and k if arrays is 2; for one array, q and q_out are passed as k and k_out too. It
# returns False, with nothing written, if the kernel cannot take the arrays.
# cos_sin: (2, batch or 1, seq, frequency heads, pairs), of the compute dtype.
# The caller compares the dtypes of all arrays: Numba accepts an array of the other byte order as a
# native one if it is read-only or unaligned.
Launch = Callable[[Array, Array, Array, Array, Array, int], bool]


@lru_cache
def launcher(dtype: np.dtype[Any], heads: HeadLayout, layout: str) -> Launch:
    """Return the launch for a dtype, the pairs of head vectors, and a layout.

    It makes views of the arrays, calls the kernel, and copies the elements that are not rotated. It
    is built from the kernel outwards. A step that is not needed is left out, because each one costs
    a call some 0.1 µs.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None:
        return refuse
    launch = _kernel_launch(name, heads)
    rotary_dim = sum(heads.blocks)
    if rotary_dim < heads.head_dim:
        launch = _copying_unrotated(launch, rotary_dim)
    view = kernel_view(name, layout)
    return launch if view is None else _viewing(launch, view)


def _viewing(launch: Launch, view: Callable[[Array], Array]) -> Launch:
    """Return a launch that passes on views of arrays."""

    def launch_views(
        cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int
    ) -> bool:
        try:
            q_view = k_view = view(q)
            q_out_view = k_out_view = q_view if q_out is q else view(q_out)
            if arrays == 2:
                k_view = view(k)
                k_out_view = k_view if k_out is k else view(k_out)
        except ValueError:  # NumPy's, for arrays with another number of axes
            return False
        return launch(cos_sin, q_view, k_view, q_out_view, k_out_view, arrays)

    return launch_views


def _copying_unrotated(launch: Launch, rotary_dim: int) -> Launch:
    """Return a launch after which NumPy copies the elements past rotary_dim."""

    def launch_and_copy(
        cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int
    ) -> bool:
        if not launch(cos_sin, q, k, q_out, k_out, arrays):
            return False
        if q_out is not q:
            q_out[..., rotary_dim:] = q[..., rotary_dim:]
        if arrays == 2 and k_out is not k:
            k_out[..., rotary_dim:] = k[..., rotary_dim:]
        return True

    return launch_and_copy


def _kernel_launch(dtype_name: str, heads: HeadLayout) -> Launch:
    """Return the launch that calls the kernel, with views as arrays."""
    kernel = rotation_kernel(dtype_name)
    numbers = numbers_of(rotation_part(dtype_name, heads.pairing), heads)

    def launch(cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
        usable = 1 if threads.serial else threads.limit
        try:
            done: bool = kernel(numbers, q, k, q_out, k_out, cos_sin, arrays, usable)
        except TypeError:  # Numba's, for another number of axes and for read-only outputs
            return False
        return done

    return launch


@lru_cache
def numbers_of(part: Any, heads: HeadLayout) -> Array:
    """Return the numbers of a rotation, as kernels take them: `rope_cpu.kernels.rotate.BLOCKS`."""
    pairs = [width // 2 for width in heads.blocks]
    sizes = (heads.head_dim, sum(heads.blocks), last_level_cache())
    return np.array([address_of(part), *sizes, *pairs], np.int64)


def repeated(cos_sin: Array, tokens: int) -> Array:
    """Return cos and sin of one token as those of several, with stride 0 over the tokens."""
    shape = (*cos_sin.shape[:2], tokens, *cos_sin.shape[3:])
    strides = (*cos_sin.strides[:2], 0, *cos_sin.strides[3:])
    return np.ndarray(shape, cos_sin.dtype, cos_sin, strides=strides)


def rotate_copies(
    inputs: Mapping[str, Array],
    outs: Mapping[str, Any] | None,
    launch_for: Callable[[np.dtype[Any]], tuple[Launch, Array]],
) -> tuple[Array, ...]:
    """Rotate contiguous copies of checked arrays; raise for an invalid output, with none written.

    inputs, outs: in the same order, by argument name. launch_for: returns for a dtype its launch,
    and the cos and sin of that launch.
    """
    results = results_for(inputs, outs)

    def rotate(copies: list[Array]) -> bool:
        launch, cos_sin = launch_for(copies[0].dtype)
        return all(launch(cos_sin, x, x, x, x, 1) for x in copies if x.size)

    launch_copies(inputs.values(), results, rotate)
    return results


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
    dtype = cache._kind.key
    part = rotate_cached_part(dtype, rotation.heads.pairing)
    numbers = numbers_of(part, rotation.heads)
    # The kernel is loaded before `threads.serial` is read, as in `CosSin._compute`.
    kernel = rotate_cached_kernel(dtype)
    usable = 1 if threads.serial else threads.limit
    kernel(numbers, cache._kernel_arrays[0], runs, rotation.cos_sin, usable)


def _check_cached(rotation: Rotation, cache: KVCache, slots: Array) -> None:
    """Raise unless the plan is for the keys of these slots."""
    rows, tokens, frequency_heads, _ = rotation.cos_sin.shape[1:]
    if cache.head_dim != rotation.heads.head_dim:
        rule = f"have that of this rotary embedding, {rotation.heads.head_dim}"
        raise ArgumentError("cache", Finding(f"has keys of head_dim {cache.head_dim}"), rule)
    if cache.kv_heads % frequency_heads:
        rule = f"have a multiple of {frequency_heads}, the heads that cos and sin are for"
        raise ArgumentError("cache", Finding(f"has {cache.kv_heads} heads"), rule)
    subject, row_subject = rotation.subjects
    if tokens != slots.shape[1]:
        finding = Finding(f"has {slots.shape[1]} slots, but {subject} {tokens} tokens")
        raise ArgumentError("slot_mapping", finding, "have a slot for each token, or -1")
    if rows not in (1, slots.shape[0]):
        finding = Finding(f"has batch {slots.shape[0]}, but {row_subject} {rows}")
        raise ArgumentError("slot_mapping", finding, "have a row for each batch row")
    check_writeable(cache, ("key",))
