"""The steps from NumPy arrays to kernels that all kernels of rotations share.

A fast path passes arrays to the kernel without copying them. Where the kernel refuses them, a slow
path checks the arguments, which raises the precise error, and then passes contiguous copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import methodcaller
from typing import Any, NamedTuple

import numpy as np

from rope_cpu.arguments.arrays import check_inputs, check_outputs
from rope_cpu.array_types import BSHD_VIEWS, INTEGER_VIEWS, Array, CacheKind
from rope_cpu.launch.results import new_like


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
    subjects : pair of str
        Subjects of the error texts about the tokens and the batch rows of cos and sin.
    launches : dict
        The launches of the append kernel that were prepared for it, by dtype and kind of cache.
    """

    cos_sin: Array
    heads: HeadLayout
    layout: str
    subjects: tuple[str, str]
    launches: dict[tuple[np.dtype[Any], CacheKind], Any]

    def check(self, inputs: Mapping[str, object]) -> None:
        """Raise unless arrays, by argument name, fit cos and sin."""
        table_shape = self.cos_sin.shape[1:]
        check_inputs(inputs, self.layout, self.heads.head_dim, table_shape, *self.subjects)


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
        raise RuntimeError(
            f"arrays of shapes {[x.shape for x in copies]} passed their checks, but the kernel "
            "refused their copies; please report this as a fault of rope_cpu"
        )
    for result, rotated in zip(results, copies, strict=False):
        result[...] = rotated
