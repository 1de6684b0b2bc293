"""Weights of projections and of norms, which an attention model holds as initializers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from rope_cpu.arguments.scalars import finite_array, real_array
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

WEIGHTS = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias", "o_bias")

# The value of an argument that makes its array an input of the graph.
INPUT = "input"
# Where weights of norms, and sinks, come from.
SOURCES = ("none", "initializer", INPUT)
# The inputs that hold the scales of an int8 cache, one for each head and element of a vector.
SCALES = ("k_scale", "v_scale")


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


def source_of(argument: object) -> str:
    """Return the source of an array, one of `SOURCES`: no array, an array, or "input"."""
    if argument is None:
        return "none"
    return INPUT if isinstance(argument, str) and argument == INPUT else "initializer"


def norm_weights(qk_norm: tuple[ArrayLike, ArrayLike] | str | None) -> dict[str, Float64]:
    """Return the weights of the norms of q and k, in float64, as `q_norm` and `k_norm`.

    Nothing is returned for weights that are inputs of the graph.
    """
    if source_of(qk_norm) != "initializer":
        return {}
    if not isinstance(qk_norm, tuple | list):
        raise TypeError(
            f"`qk_norm` is a {type(qk_norm).__name__}; it must be a pair of arrays, for q "
            "and for k, or 'input'"
        )
    if len(qk_norm) != 2:
        raise ValueError(
            f"`qk_norm` holds {len(qk_norm)} arrays; it must hold two, for q and for k"
        )
    return {
        f"{name}_norm": real_array(f"qk_norm of {name}", value).astype(np.float64, copy=False)
        for name, value in zip("qk", qk_norm, strict=True)
    }


def sink_values(sinks: ArrayLike | str | None) -> dict[str, Float64]:
    """Return the sinks in float64, as `sinks`; nothing where they are none or an input."""
    if sinks is None or source_of(sinks) == INPUT:
        return {}
    if isinstance(sinks, str):
        raise TypeError(f"`sinks` is {shown(sinks)}; it must be an array, or 'input'")
    return {"sinks": finite_array("sinks", sinks)}
