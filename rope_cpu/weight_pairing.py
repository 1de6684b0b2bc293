"""Conversion of weights between the pairings."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding

Pairing = Literal["half", "interleaved"]


def convert_weight(
    w: ArrayLike,
    num_heads: int,
    *,
    to: Pairing,
    rotary_dim: int | None = None,
    axis: int = 0,
    head_dim: int | None = None,
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
        Heads of `w`. With grouped queries k_proj has fewer than q_proj, and so has a shard.
    to : {"half", "interleaved"}
        "half": from pairs (2i, 2i+1) to pairs (i, i+n), as from Meta's LLaMA to transformers; also
        what DeepSeek-V3 does to queries and keys. "interleaved": the reverse.
    rotary_dim : int, optional
        Leading elements of each head that are rotated, by default all. The others keep their
        place.
    axis : int
        The axis of `w` that holds the heads.
    head_dim : int, optional
        Width of a head, which is checked. Without it, a shard with the number of heads of the whole
        model is taken for one of narrower heads.

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
    w = scalars.regular_array("w", w)
    if not w.ndim:
        raise ArgumentTypeError("w", Finding.type_of(w.item()), "be an array")
    scalars.choice("to", to, get_args(Pairing))
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ArgumentTypeError("axis", axis, "be an integer")
    if not -w.ndim <= axis < w.ndim:
        raise ArgumentError("axis", axis, f"be one of the {w.ndim} axes of `w`")
    scalars.check_table_size("w", w, w.shape[axis])
    num_heads = scalars.whole_number("num_heads", num_heads)
    width = _head_width(num_heads, head_dim, w.shape[axis], axis)
    rotated = width if rotary_dim is None else scalars.whole_number("rotary_dim", rotary_dim, 2)
    if rotated % 2 or rotated > width:
        rule = f"be even and at most head_dim {width}"
        raise ArgumentError("rotary_dim", rotated, rule)
    pair_shape = (-1, 2) if to == "half" else (2, -1)
    order = np.arange(width)
    order[:rotated] = order[:rotated].reshape(pair_shape).T.reshape(-1)
    elements = (np.arange(num_heads)[:, None] * width + order).reshape(-1)
    if axis == 0:
        return np.asarray(w[elements])  # for whole rows faster than `take`
    return np.asarray(np.take(w, elements, axis=axis))


def _head_width(num_heads: int, head_dim: int | None, elements: int, axis: int) -> int:
    """Return the width of a head; raise unless the elements of an axis are `num_heads` of them."""
    width = elements // num_heads
    if head_dim is not None:
        width = scalars.whole_number("head_dim", head_dim)
    if not width or num_heads * width != elements:
        finding = Finding(f"is {num_heads}, of head_dim {width}")
        rule = f"make the {elements} elements of axis {axis}"
        remedy = "of a shard give the number of its own heads"
        raise ArgumentError("num_heads", finding, rule, remedy)
    return width
