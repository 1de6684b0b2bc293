"""Rotating arrays by cos and sin: by the kernel as they stand, or, where it cannot take them, as copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.arguments.arrays import check_inputs, check_outputs
from rope_cpu.array_types import DTYPE_NAMES, Array
from rope_cpu.kernels import threads
from rope_cpu.kernels.rotate import DONE, rotation
from rope_cpu.kernels.vectors import converts_float16
from rope_cpu.machine import last_level_cache

# The integers that kernels take 16-bit floats as.
BITS = {"float16": np.dtype(np.int16), "bfloat16": np.dtype(np.uint16)}
# How kernels see other layouts than bshd: as that, (batch, tokens, heads, head_dim).
ARRANGED: dict[str, Callable[[Array], Array]] = {
    "bhsd": lambda x: x.transpose(0, 2, 1, 3),
    "sbhd": lambda x: x.transpose(1, 0, 2, 3),
    "thd": lambda x: x[None],
}

# launch(cos_sin, q, k, q_out, k_out, arrays) rotates q, and k if arrays is 2, without copying. It returns False, with
# nothing written, when the kernel cannot take the arrays. cos_sin: (2, batch or 1, seq, frequency heads, pairs),
# C-contiguous, of the compute dtype. The arrays must have the dtype that the call was made for, which the
# caller compares: Numba takes a read-only or unaligned array of the other byte order for a native one.
Launch = Callable[[Array, Array, Array, Array, Array, int], bool]


class Pairing(NamedTuple):
    """Which elements of a head vector rotate together; blocks: the width of each in elements."""

    head_dim: int
    interleaved: bool
    blocks: tuple[int, ...]


@lru_cache
def launcher(dtype: np.dtype[Any], pairing: Pairing, layout: str) -> Launch:
    """Return the call that rotates arrays of a dtype; the kernel checks shapes, strides and shared memory."""
    name = DTYPE_NAMES.get(dtype)
    if name is None or (name == "float16" and not converts_float16()):
        return lambda *arrays: False
    kernel, rotary_dim = (
        rotation(name, "interleaved" if pairing.interleaved else "half"),
        sum(pairing.blocks),
    )
    sizes = np.array(
        [pairing.head_dim, last_level_cache(), *(width // 2 for width in pairing.blocks)], np.int64
    )

    def as_they_stand(
        cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int
    ) -> bool:
        try:
            status: int = kernel(
                q, k, q_out, k_out, cos_sin, sizes, arrays, 1 if threads.serial else threads.limit
            )
        except TypeError:  # Numba's, of arrays of another rank, and of read-only outputs
            return False
        return status == DONE

    launch: Launch = as_they_stand
    if rotary_dim < pairing.head_dim:
        launch = _and_copied(launch, rotary_dim)
    if layout in ARRANGED:
        launch = _transposed(launch, ARRANGED[layout])
    return _viewed(launch, BITS[name]) if name in BITS else launch


def _and_copied(launch: Launch, rotary_dim: int) -> Launch:
    """Let NumPy copy the elements that are not rotated."""

    def copied(cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
        if not launch(cos_sin, q, k, q_out, k_out, arrays):
            return False
        for x, out in ((q, q_out), (k, k_out))[:arrays]:
            if out is not x:
                out[..., rotary_dim:] = x[..., rotary_dim:]
        return True

    return copied


def _transposed(launch: Launch, arranged: Callable[[Array], Array]) -> Launch:
    """Hand arrays on as (batch, tokens, heads, head_dim)."""

    def transposed(
        cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int
    ) -> bool:
        try:
            x = y = arranged(q)
            x_out = y_out = x if q_out is q else arranged(q_out)
            if arrays == 2:
                y = arranged(k)
                y_out = y if k_out is k else arranged(k_out)
        except ValueError:  # NumPy's, of arrays of another rank
            return False
        return launch(cos_sin, x, y, x_out, y_out, arrays)

    return transposed


def _viewed(launch: Launch, bits: np.dtype[Any]) -> Launch:
    """Hand arrays of 16-bit floats on as integers; like `_transposed`, but a function for each view takes too long."""

    def viewed(cos_sin: Array, q: Array, k: Array, q_out: Array, k_out: Array, arrays: int) -> bool:
        x = y = q.view(bits)
        x_out = y_out = x if q_out is q else q_out.view(bits)
        if arrays == 2:
            y = k.view(bits)
            y_out = y if k_out is k else k_out.view(bits)
        return launch(cos_sin, x, y, x_out, y_out, arrays)

    return viewed


def rotate_copies(
    xs: Mapping[str, Any],
    outs: Mapping[str, Any] | None,
    layout: str,
    head_dim: int,
    shape: tuple[int, ...],
    given_for: tuple[str, str],
    launch_of: Callable[[np.dtype[Any]], tuple[Launch, Array]],
) -> tuple[Array, ...]:
    """Validate what the kernel refused and find the words, or rotate copies where it is only how the arrays stand.

    xs, outs: by name. shape: of cos and sin. given_for: what there are cos and sin for, by token and by batch row, in
    error texts. launch_of: the call that rotates a dtype, and its cos and sin.

    Raises TypeError or ValueError, before anything is written.
    """
    check_inputs(xs, layout, head_dim, shape, *given_for)
    if outs is not None:
        check_outputs(outs, xs)
    results = tuple(np.empty_like(x) for x in xs.values()) if outs is None else tuple(outs.values())
    for x, result in zip([np.array(x, order="C") for x in xs.values()], results, strict=True):
        # Where float16 has no kernel, that of float32 and NumPy's rounding give the same bits.
        wide = x.astype(np.float32) if x.dtype == np.float16 and not converts_float16() else x
        launch, cos_sin = launch_of(wide.dtype)
        if wide.size and not launch(cos_sin, wide, wide, wide, wide, 1):
            raise RuntimeError(
                f"an array of shape {x.shape} passed its checks, but the kernel refused its copy"
            )
        with np.errstate(over="ignore", under="ignore"):
            result[...] = wide
    return results
