"""The factors on queries by their position, of models such as Llama 4 and Ministral 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.models.model_types import data

_Formula = Callable[..., Float64]
_FACTS = data("attention.json")


@dataclass(frozen=True)
class QueryFactors:
    """The function from positions to factors; equal for equal formulas and numbers."""

    formula: _Formula
    numbers: tuple[float, ...]

    def __call__(self, positions: ArrayLike) -> NDArray[np.float32]:
        """Return the factors at positions."""
        factors = self.formula(np.asarray(positions, np.float64), *self.numbers)
        return factors.astype(np.float32)


def query_factors(formula: str | None, values: Mapping[str, Any]) -> QueryFactors | None:
    """Return the function from positions to factors of a formula of `attention.json`.

    values: the config, with the rope parameters of its layers.
    """
    if formula is None:
        return None
    compute, keys = _FORMULAS[formula]
    return QueryFactors(compute, tuple(_number(key, values) for key in keys))


def _number(key: str, values: Mapping[str, Any]) -> float:
    if key not in values:
        raise ArgumentError(key, MISSING, "be in the config, which scales queries by position")
    return scalars.real_number(key, values[key])


def _by_log_of_length(
    positions: Float64, llama_4_scaling_beta: float, original_max_position_embeddings: float
) -> Float64:
    lengths = np.floor(positions / original_max_position_embeddings)
    return 1 + llama_4_scaling_beta * np.log1p(lengths)


def _log_of_position(positions: Float64, seq_length: float) -> Float64:
    factors: Float64 = np.maximum(1, np.log(positions + 1) / np.log(seq_length))
    return factors


def _temperature(positions: Float64, attn_scale: float, floor_scale: float) -> Float64:
    return 1 + attn_scale * np.log1p(np.floor((positions + 1) / floor_scale))


def _power(positions: Float64) -> Float64:
    return (1 + (positions + 1) / 2048) ** 0.1


# The function of each formula, and the keys of the config that are its arguments, in their order.
_FORMULAS: Mapping[str, tuple[_Formula, tuple[str, ...]]] = {
    _FACTS["query_scale"]["llama_4_scaling_beta"]: (
        _by_log_of_length,
        ("llama_4_scaling_beta", "original_max_position_embeddings"),
    ),
    _FACTS["query_scale"]["use_logn_attn"]: (_log_of_position, ("seq_length",)),
    _FACTS["unrotated_query_scale"]["llama4_text"][1]: (
        _temperature,
        ("attn_scale", "floor_scale"),
    ),
    _FACTS["unrotated_query_scale"]["beam"][1]: (_power, ()),
}
