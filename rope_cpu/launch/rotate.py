"""The launches of the rotation kernels, of arrays and of keys in a cache, and what launches share.

A fast path passes arrays to the kernel without copying them. Where the kernel refuses them, a slow
path checks the arguments, which raises the precise error, and then passes contiguous copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.arguments.arrays import (
    check_heads,
    check_inputs,
    check_outputs,
    check_tokens,
    serves_any_tokens,
)
from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.array_types import BSHD_VIEWS, DTYPE_NAMES, INTEGER_VIEWS, Array, CacheKind
from rope_cpu.caches.kv_cache import KVCache, check_writeable
from rope_cpu.caches.slots import check_none_twice, sorted_runs
from rope_cpu.kernels import threads
from rope_cpu.kernels.compile import address_of
from rope_cpu.kernels.rotate import rotation_kernel, rotation_part
from rope_cpu.kernels.rotate_cached import rotate_cached_kernel, rotate_cached_part
from rope_cpu.launch.results import new_like
from rope_cpu.machine import last_level_cache


class HeadLayout(NamedTuple):
    """The elements of a head vector that form pairs.

    Parameters
    ----------
    head_dim : int
        Width of a head vector in elements.
    interleaved : bool
        Whether pairs are (2i, 2i+1) rather than (i, i+n), n half the width of the block.
    blocks : tuple of int
        Widths in elements of the contiguous blocks that pairs are formed in.
    """

    head_dim: int
    interleaved: bool
    blocks: tuple[int, ...]

    @property
    def pairing(self) -> str:
        """The name of the pairing in `rope_cpu.kernels.rotate.PAIRINGS`."""
        return "interleaved" if self.interleaved else "half"


class Rotation(NamedTuple):
    """The rotation of a plan's tokens, for the kernels of caches.

    Parameters
    ----------
    cos_sin : array of float32, (2, batch or 1, tokens, frequency heads, pairs)
        Cos and sin.
    heads : HeadLayout
        The pairs of head vectors.
    layout : str
        Layout of q, k and v.
    launches : dict
        The launches of the append kernel that were prepared for it, by dtype and kind of cache.
    """

    cos_sin: Array
    heads: HeadLayout
    layout: str
    launches: dict[tuple[np.dtype[Any], CacheKind], Any]

    def check(self, inputs: Mapping[str, object]) -> None:
        """Raise unless arrays, by argument name, fit cos and sin."""
        check_inputs(inputs, self.layout, self.heads.head_dim, self.cos_sin)


def refuse(*arguments: Any) -> bool:
    """Refuse all arrays: the launch of a dtype without a kernel."""
    return False


@cache
def kernel_view(dtype: str, layout: str) -> Callable[[Array], Array] | None:
    """Return the function from an array to its view for kernels; None for the array itself.

    Kernels take (batch, seq, heads, head_dim), and 16-bit floats as integers of their bits.
    """
    integers = INTEGER_VIEWS.get(dtype)
    to_bshd = BSHD_VIEWS.get(layout)
    if integers is None:
        return to_bshd
    if to_bshd is None:
        return methodcaller("view", integers)
    if layout == "thd":  # written out, because a second call would cost each array 0.05 µs
        return lambda x: x.view(integers)[None]
    return lambda x: to_bshd(x.view(integers))


def results_for(inputs: Mapping[str, Array], outs: Mapping[str, Any] | None) -> tuple[Array, ...]:
    """Return the given outputs, checked, or new arrays like the inputs."""
    if outs is None:
        return tuple(new_like(x) for x in inputs.values())
    check_outputs(outs, inputs)
    return tuple(outs.values())


def launch_copies(
    inputs: Iterable[Array], results: Iterable[Array], launch: Callable[[list[Array]], bool]
) -> None:
    """Launch a kernel on contiguous copies of checked arrays, and write them to the results.

    launch: rotates the copies in place; False if the kernel refuses them. Results are those of the
    first inputs.
    """
    # All copies come before the first write: a lack of memory then leaves everything untouched.
    copies = [np.array(x, order="C") for x in inputs]
    if not launch(copies):
        raise RuntimeError("the kernel refused copies of checked arrays: a fault of rope_cpu")
    for result, rotated in zip(results, copies, strict=False):
        result[...] = rotated


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


def rotate_cached(rotation: Rotation, cache: KVCache, slots: Array) -> None:
    """Rotate the keys of slots in place; see `RotaryPlan.rotate_cached`.

    They are rotated in the order of their slots. In a random order of pages, two threads took up to
    twice as long: at the end of a page the processor loads the next one ahead, which the other
    thread may write.
    """
    cos_sin = rotation.cos_sin
    if serves_any_tokens(cos_sin):
        cos_sin = repeated(cos_sin, slots.shape[1])
    if cache.head_dim != rotation.heads.head_dim:
        rule = f"have that of this rotary embedding, {rotation.heads.head_dim}"
        raise ArgumentError("cache", Finding(f"has keys of head_dim {cache.head_dim}"), rule)
    check_heads("cache", cache.kv_heads, cos_sin)
    check_tokens("slot_mapping", len(slots), slots.shape[1], rotation.layout, cos_sin)
    check_writeable(cache, ("key",))
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
    kernel(numbers, cache._kernel_arrays[0], runs, cos_sin, usable)
