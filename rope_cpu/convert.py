"""From one pairing to the other: weights, biases, norms, activations and cached keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments.scalars import not_larger, one_of, regular_array, whole_number
from rope_cpu.arguments.texts import shown

PAIRINGS = ("half", "interleaved")


def convert_weight(
    w: ArrayLike, num_heads: int, *, to: str, rotary_dim: int | None = None, axis: int = 0
) -> NDArray[Any]:
    """Reorder the elements of each head, so that the other pairing rotates it to the same scores.

    Converting both q_proj and k_proj, and q_norm and k_norm where there are any, leaves every product of a query and a
    key as it was; values and the output projection stay. There and back is the identity.

    w: any array whose `axis` holds num_heads · head_dim elements, of any dtype: a projection's weight
        (num_heads·head_dim, hidden), axis 0, or its bias; the weight of a norm over a head (head_dim,), num_heads 1;
        activations or cached keys (…, head_dim), num_heads 1 and axis -1. With grouped queries k_proj has fewer heads.
    to: "half": from pairs (2i, 2i+1) to (i, i+n), as in Meta's LLaMA to transformers; also what DeepSeek-V3 does to
        queries and keys. "interleaved": the way back.
    rotary_dim: how many leading elements of a head are rotated, all by default; the others stay where they are.

    Returns a new array of w's shape and dtype.
    Raises TypeError or ValueError for another `to`, an axis that `w` lacks, and widths that do not fit.
    Source: the permutation is that of `permute` in transformers' convert_llama_weights_to_hf.
    """
    w = regular_array("w", w)
    one_of("to", to, PAIRINGS)
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"`axis` is {shown(axis)}; it must be an integer")
    if not -w.ndim <= axis < w.ndim:
        raise ValueError(f"`axis` is {shown(axis)}, but `w` has {w.ndim} axes")
    not_larger("`w` has shape", w.shape, w.shape[axis])
    num_heads = whole_number("num_heads", num_heads)
    head_dim, rest = divmod(w.shape[axis], num_heads)
    if rest or not head_dim:
        raise ValueError(
            f"`num_heads` is {num_heads}, which does not divide the {w.shape[axis]} elements of axis {axis}"
        )
    width = head_dim if rotary_dim is None else whole_number("rotary_dim", rotary_dim, 2)
    if width % 2 or width > head_dim:
        raise ValueError(
            f"`rotary_dim` is {width}; it must be even and at most head_dim {head_dim}"
        )
    order = np.arange(head_dim)
    order[:width] = order[:width].reshape((-1, 2) if to == "half" else (2, -1)).T.reshape(-1)
    elements = (np.arange(num_heads)[:, None] * head_dim + order).reshape(-1)
    return np.asarray(
        w[elements] if axis == 0 else np.take(w, elements, axis=axis)
    )  # whole rows go faster by index
