"""From NumPy arrays to the rotation kernel.

The fast path, `launcher`, passes arrays to the kernel without copying them. The slow path,
`rotate_copies`, raises the precise error if an argument is invalid, and rotates contiguous copies
if only the memory layout is unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.arguments.arrays import check_inputs, check_outputs
from rope_cpu.array_types import BSHD_VIEWS, DTYPE_NAMES, INTEGER_VIEWS, Array
from rope_cpu.kernels import threads
from rope_cpu.kernels.rotate import DONE, rotation_kernel
from rope_cpu.kernels.vectors import converts_float16
from rope_cpu.machine import last_level_cache

# A launch function passes arrays to one kernel without copying them:
#     launch(cos_sin, q, k, q_out, k_out, arrays) -> bool
# It rotates q, and k if arrays is 2; for one array, q and q_out are passed as k and k_out too. It
# returns False, with nothing written, if the kernel cannot take the arrays.
# cos_sin: (2, batch or 1, seq, frequency heads, pairs), C-contiguous, of the compute dtype.
# The caller compares the dtypes of all arrays: Numba accepts an array of the other byte order as a
# native one if it is read-only or unaligned.
Launch = Callable[[Array, Array, Array, Array, Array, int], bool]


class Pairing(NamedTuple):
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


@lru_cache
def launcher(dtype: np.dtype[Any], pairing: Pairing, layout: str) -> Launch:
    """Return the launch of a dtype, pairing and layout.

    The launch takes integer views of 16-bit floats, then bshd views, calls the kernel, and copies
    the elements that are not rotated. It is built from the kernel outwards. A step that the dtype,
    layout or pairing does not need is left out, because each one costs a call some 0.1 µs.
    """
    name = DTYPE_NAMES.get(dtype)
    if name is None or (name == "float16" and not converts_float16()):
        return _refuse
    launch = _kernel_launch(name, pairing)
    rotary_dim = sum(pairing.blocks)
    if rotary_dim < pairing.head_dim:
        launch = _copying_unrotated(launch, rotary_dim)
    if layout in BSHD_VIEWS:
        launch = _viewing_as_bshd(launch, BSHD_VIEWS[layout])
    if name in INTEGER_VIEWS:
        launch = _viewing_as_integers(launch, INTEGER_VIEWS[name])
    return launch


def _refuse(cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
    """Refuse all arrays: the launch of a dtype without a kernel."""
    return False


def _viewing_as_integers(launch: Launch, integers: np.dtype[Any]) -> Launch:
    """Return a launch that passes on arrays of 16-bit floats as integers of their bits."""

    # The views of each array are written out, here and in `_viewing_as_bshd`: a helper for them
    # costs some 0.1 µs for each array.
    def launch_integers(
        cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int
    ) -> bool:
        q_view = k_view = q.view(integers)
        q_out_view = k_out_view = q_view if q_out is q else q_out.view(integers)
        if arrays == 2:
            k_view = k.view(integers)
            k_out_view = k_view if k_out is k else k_out.view(integers)
        return launch(cos_sin, q_view, k_view, q_out_view, k_out_view, arrays)

    return launch_integers


def _viewing_as_bshd(launch: Launch, view: Callable[[Array], Array]) -> Launch:
    """Return a launch that passes on arrays of another layout as (batch, seq, heads, head_dim)."""

    def launch_bshd(
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

    return launch_bshd


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


def _kernel_launch(dtype_name: str, pairing: Pairing) -> Launch:
    """Return the launch that calls the kernel.

    Its arrays are (batch, seq, heads, head_dim), 16-bit floats as integers.
    """
    kernel = rotation_kernel(dtype_name, "interleaved" if pairing.interleaved else "half")
    block_pairs = np.array(pairing.blocks, np.int64) // 2
    head_dim = pairing.head_dim
    cache_bytes = last_level_cache()

    def launch(cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
        usable = 1 if threads.serial else threads.limit
        try:
            status: int = kernel(
                q, k, q_out, k_out, cos_sin, block_pairs, head_dim, cache_bytes, arrays, usable
            )
        except TypeError:  # Numba's, for another number of axes and for read-only outputs
            return False
        return status == DONE

    return launch


def rotate_copies(
    xs: Mapping[str, Any],
    outs: Mapping[str, Any] | None,
    layout: str,
    head_dim: int,
    table_shape: tuple[int, ...],
    subjects: tuple[str, str],
    launch_for: Callable[[np.dtype[Any]], tuple[Launch, Array]],
) -> tuple[Array, ...]:
    """Validate arrays that the fast path refused, and rotate contiguous copies of them.

    Parameters
    ----------
    xs, outs : mapping of str to array
        The inputs, and the outputs in the same order if there are any, by argument name.
    layout : str
        Layout of the arrays.
    head_dim : int
        Width of a head vector in elements.
    table_shape : tuple of int
        (batch or 1, seq, frequency heads, pairs), the shape of cos and of sin.
    subjects : pair of str
        Subjects of the error texts about the tokens and about the batch rows of cos and sin, for
        example "positions are given for".
    launch_for : callable
        From a dtype to its launch, and to the cos and sin of that launch.

    Raises
    ------
    TypeError, ValueError
        If an argument is invalid. Nothing is written then.
    """
    check_inputs(xs, layout, head_dim, table_shape, *subjects)
    if outs is None:
        results = tuple(np.empty_like(x) for x in xs.values())
    else:
        check_outputs(outs, xs)
        results = tuple(outs.values())
    # All copies come before the first write to an output: a lack of memory then leaves the outputs
    # untouched.
    copies = [np.array(x, order="C") for x in xs.values()]
    for copy, result in zip(copies, results, strict=True):
        rotated = _rotated_in_place(copy, launch_for)
        with np.errstate(over="ignore", under="ignore"):
            result[...] = rotated
    return results


def _rotated_in_place(
    x: Array, launch_for: Callable[[np.dtype[Any]], tuple[Launch, Array]]
) -> Array:
    """Rotate a contiguous array in place and return it; as float32 if float16 has no kernel.

    The float32 kernel and NumPy's rounding to float16 give the same bits as the float16 kernel.
    """
    if x.dtype == np.float16 and not converts_float16():
        x = x.astype(np.float32)
    launch, cos_sin = launch_for(x.dtype)
    if x.size and not launch(cos_sin, x, x, x, x, 1):
        raise RuntimeError(
            f"an array of shape {x.shape} passed its checks, but the kernel refused its copy; "
            "please report this as a fault of rope_cpu"
        )
    return x
