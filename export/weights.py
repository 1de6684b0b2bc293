"""Weights of projections and of norms, which an attention model holds as initializers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments.scalars import real_array
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

WEIGHTS = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")


def projection_weights(weights: Mapping[str, ArrayLike] | None) -> dict[str, Float64]:
    """Return projection weights (out, in) and biases (out,) in float64, checked.

    Names other than those of `WEIGHTS`, missing projections and other numbers of axes are refused.
    """
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"`weights` is a {type(weights).__name__}; it must be a mapping of names to arrays"
        )
    unknown = [name for name in weights if name not in WEIGHTS]
    missing = {"q", "k", "v"} - set(weights)
    unused_bias = "o_bias" in weights and "o" not in weights
    if unknown or missing or unused_bias:
        raise ValueError(
            f"`weights` holds {shown(list(weights))}; it must hold q, k and v, and may also hold "
            "q_bias, k_bias, v_bias, o and, together with o, o_bias"
        )
    arrays = {
        name: real_array(f"weights[{shown(name)}]", value).astype(np.float64, copy=False)
        for name, value in weights.items()
    }
    for name, array in arrays.items():
        axes = ("out",) if name.endswith("_bias") else ("out", "in")
        if array.ndim != len(axes):
            raise ValueError(
                f"`weights[{shown(name)}]` has shape {array.shape}; its axes must be "
                f"{', '.join(axes)}"
            )
    return arrays


def norm_weights(qk_norm: tuple[ArrayLike, ArrayLike] | None) -> dict[str, Float64]:
    """Return the weights of the norms of q and k, in float64, as `q_norm` and `k_norm`."""
    if qk_norm is None:
        return {}
    if not isinstance(qk_norm, tuple | list):
        raise TypeError(
            f"`qk_norm` is a {type(qk_norm).__name__}; it must be a pair of arrays, for q and for k"
        )
    if len(qk_norm) != 2:
        raise ValueError(
            f"`qk_norm` holds {len(qk_norm)} arrays; it must hold two, for q and for k"
        )
    return {
        f"{name}_norm": real_array(f"qk_norm of {name}", value).astype(np.float64, copy=False)
        for name, value in zip("qk", qk_norm, strict=True)
    }
