"""Conversion of weights, biases, activations and cached keys between the two pairings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments.arrays import not_an_array
from rope_cpu.arguments.scalars import (
    check_shape_size,
    choice,
    regular_array,
    whole_number,
)
from rope_cpu.arguments.texts import shown

TARGET_PAIRINGS = ("half", "interleaved")


def convert_weight(
    w: ArrayLike, num_heads: int, *, to: str, rotary_dim: int | None = None, axis: int = 0
) -> NDArray[Any]:
    """Reorder the elements of each head, so that the other pairing gives the same scores.

    Convert q_proj and k_proj, and q_norm and k_norm if the model has them: every product of a query
    and a key stays the same. Values and the output projection need no conversion. Converting
    there and back is the identity.

    Parameters
    ----------
    w : array_like, any dtype
        Its `axis` holds num_heads · head_dim elements: the weight of a projection
        (num_heads · head_dim, hidden) on axis 0, or its bias; the weight of a norm over a head
        (head_dim,) with num_heads 1; activations or cached keys (..., head_dim) with num_heads 1
        and axis -1.
    num_heads : int
        Heads of `w`. With grouped queries k_proj has fewer than q_proj.
    to : {"half", "interleaved"}
        "half": from pairs (2i, 2i+1) to pairs (i, i+n), as from Meta's LLaMA to transformers; also
        what DeepSeek-V3 does to queries and keys. "interleaved": the reverse.
    rotary_dim : int, optional
        Leading elements of each head that are rotated, by default all. The others keep their
        place.
    axis : int
        The axis of `w` that holds the heads.

    Returns
    -------
    ndarray
        A new array of the shape and dtype of `w`.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If `to` is unknown, `w` has no such axis, or a width does not divide as required.

    References
    ----------
    The permutation is that of `permute` in transformers' convert_llama_weights_to_hf.

    Examples
    --------
    >>> import rope_cpu
    >>> rope_cpu.convert_weight([0, 1, 2, 3, 10, 11, 12, 13], 2, to="half")
    array([ 0,  2,  1,  3, 10, 12, 11, 13])
    """
    array = regular_array("w", w)
    if array.dtype == object and not array.ndim:
        raise not_an_array("w", w)
    w = array
    choice("to", to, TARGET_PAIRINGS)
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"`axis` is {shown(axis)}; it must be an integer")
    if not -w.ndim <= axis < w.ndim:
        raise ValueError(f"`axis` is {shown(axis)}, but `w` has {w.ndim} axes")
    check_shape_size("w", w.shape, w.shape[axis])
    num_heads = whole_number("num_heads", num_heads)
    head_dim, remainder = divmod(w.shape[axis], num_heads)
    if remainder or not head_dim:
        raise ValueError(
            f"`num_heads` is {num_heads}, which does not divide the {w.shape[axis]} elements of "
            f"axis {axis}"
        )
    width = head_dim if rotary_dim is None else whole_number("rotary_dim", rotary_dim, 2)
    if width % 2 or width > head_dim:
        raise ValueError(
            f"`rotary_dim` is {width}; it must be even and at most head_dim {head_dim}"
        )
    pair_shape = (-1, 2) if to == "half" else (2, -1)
    order = np.arange(head_dim)
    order[:width] = order[:width].reshape(pair_shape).T.reshape(-1)
    elements = (np.arange(num_heads)[:, None] * head_dim + order).reshape(-1)
    if axis == 0:
        return np.asarray(w[elements])  # for whole rows faster than `take`
    return np.asarray(np.take(w, elements, axis=axis))
