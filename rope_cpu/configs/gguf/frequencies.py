"""The frequencies of a GGUF file, as llama.cpp computes them from its metadata and factors.

References
----------
`rope_yarn`, `ggml_rope_cache_init` and `ggml_mrope_cache_init` in ggml's ops.cpp,
`ggml_rope_yarn_corr_dims` in ggml.c, and the constructor of `llama_context`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.axes import base_frequencies
from rope_cpu.frequencies.spec import RopeSpec, from_inv_freq, spread_over_axes

Factors = tuple[float, ...]

# Factors from here on stop a pair: llama.cpp's converter writes 1e30 for the pairs of Gemma 4 that
# do not rotate. No position below 2^53 rotates such a pair by more than 2^-46.
_STOPPED = 2.0**99

# ggml's least distance of the ends of YaRN's ramp, in pairs.
_LEAST_RAMP = 0.001


@dataclass(frozen=True, kw_only=True)
class YarnRamp:
    """The part of YaRN that depends on the pair.

    Parameters
    ----------
    strength : float
        Factor on the unscaled share of frequencies: yarn_ext_factor, 1 as a rule.
    beta_fast, beta_slow : float
        Revolutions over the original length at the ends of the ramp.
    original_length : int
        The original length in tokens.
    """

    strength: float
    beta_fast: float
    beta_slow: float
    original_length: int


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The rotation of the layers of one type, in the terms of llama.cpp.

    Parameters
    ----------
    head_dim, rotary_dim : int
        Width of a head, and of its leading part that is rotated, in elements.
    rope_theta : float
        The base.
    interleaved : bool
        True for pairs (2i, 2i+1).
    rope_type : str
        The name of the spec's type.
    factor : float
        The divisor of all frequencies.
    attention_factor : float
        The factor on cos and sin.
    yarn : YarnRamp, optional
        The ramp of YaRN.
    freqs : tuple of float, optional
        The tensor rope_freqs: a divisor for each pair.
    short_factors, long_factors : tuple of float, optional
        The same, for sequences up to the original length and for longer ones.
    original_length : int, optional
        The original length in tokens, for these factors.
    pair_axis : tuple of int, optional
        The axis of each pair, if there are several.
    """

    head_dim: int
    rotary_dim: int
    rope_theta: float
    interleaved: bool
    rope_type: str = "default"
    factor: float = 1.0
    attention_factor: float = 1.0
    yarn: YarnRamp | None = None
    freqs: Factors | None = None
    short_factors: Factors | None = None
    long_factors: Factors | None = None
    original_length: int | None = None
    pair_axis: tuple[int, ...] | None = None

    def spec(self) -> RopeSpec:
        """Return the spec; raise ValueError if the numbers define no rotation."""
        rule = None
        if self.freqs is None and self.short_factors is not None:
            rule = FactorsRule(self)
        divisors = self.short_factors if self.freqs is None else self.freqs
        inv_freq = inverse_frequencies(self, divisors)
        pair_axis = self.pair_axis
        if pair_axis is not None:
            inv_freq = spread_over_axes(inv_freq, pair_axis, max(pair_axis) + 1)
        return from_inv_freq(
            inv_freq,
            head_dim=self.head_dim,
            attention_factor=self.attention_factor,
            interleaved=self.interleaved,
            rope_type=self.rope_type,
            pair_axis=pair_axis,
            shared_id=pair_axis is not None,
            length_rule=rule,
        )


@dataclass(frozen=True)
class FactorsRule:
    """Frequencies with one list of factors up to the original length, one beyond: a LengthRule."""

    rotation: Rotation

    @property
    def original_length(self) -> int:
        """The original length in tokens."""
        return self.rotation.original_length or 0

    def at_length(self, length: int) -> tuple[Float64, float]:
        """Return inv_freq (pairs,) and the attention factor for `length` tokens."""
        is_long = length > self.original_length
        return _cached_frequencies(self.rotation, is_long), self.rotation.attention_factor

    def representatives(self, lengths: Sequence[int]) -> list[int]:
        """Return for each length the one that stands for all lengths of equal frequencies."""
        original = self.original_length
        return [original + 1 if length > original else original for length in lengths]


@lru_cache(maxsize=64)
def _cached_frequencies(rotation: Rotation, is_long: bool) -> Float64:
    """Compute frequencies: a server needs the same ones at every step of every sequence."""
    inv_freq = inverse_frequencies(
        rotation, rotation.long_factors if is_long else rotation.short_factors
    )
    inv_freq.setflags(write=False)
    return inv_freq


def inverse_frequencies(rotation: Rotation, divisors: Factors | None) -> Float64:
    """Return the frequencies in radians per position, shape (pairs,)."""
    unscaled = base_frequencies(rotation.rope_theta, rotation.rotary_dim)
    if divisors is not None:
        unscaled = _divided(unscaled, np.asarray(divisors))
    scaled = unscaled / rotation.factor
    if rotation.yarn is None:
        return scaled
    share = rotation.yarn.strength * _unscaled_share(rotation, rotation.yarn)
    return scaled * (1 - share) + unscaled * share


def _divided(frequencies: Float64, divisors: Float64) -> Float64:
    """Return frequencies divided by their factors, 0 for the factor of a pair that stands."""
    if divisors.size != frequencies.size:
        raise ValueError(
            f"the tensor of factors has {divisors.size} elements; it must have {frequencies.size}, "
            "one for each pair"
        )
    if not (divisors > 0).all():
        wrong = divisors[~(divisors > 0)][0]
        raise ValueError(f"the tensor of factors holds {wrong}; factors must be above 0")
    return np.where(divisors >= _STOPPED, 0.0, frequencies / divisors)


def _unscaled_share(rotation: Rotation, yarn: YarnRamp) -> Float64:
    """Return YaRN's share of the unscaled frequency, from 1 for fast pairs to 0 for slow ones."""
    if rotation.rope_theta <= 1:
        raise ValueError(
            f"`rope.freq_base` is {rotation.rope_theta}; scaling of type 'yarn' divides by its "
            "logarithm, so it must be > 1"
        )
    start = math.floor(_pair_of_revolutions(rotation, yarn.beta_fast, yarn.original_length))
    end = math.ceil(_pair_of_revolutions(rotation, yarn.beta_slow, yarn.original_length))
    low = max(start, 0)
    high = min(end, rotation.rotary_dim - 1)
    ramp = (np.arange(rotation.rotary_dim // 2) - low) / max(high - low, _LEAST_RAMP)
    return 1 - np.clip(ramp, 0, 1)


def _pair_of_revolutions(rotation: Rotation, revolutions: float, length: int) -> float:
    """Return the index of the pair, as a real number, with these revolutions over a length."""
    ratio = length / (revolutions * 2 * math.pi)
    if not 0 < ratio < math.inf:
        raise ValueError(
            f"`rope.scaling.yarn_beta_fast` or `yarn_beta_slow` is {revolutions}, which is no "
            f"number of revolutions over {length} tokens"
        )
    return rotation.rotary_dim * math.log(ratio) / (2 * math.log(rotation.rope_theta))


def mrope_pair_axis(pairs: int, sections: Sequence[int], *, in_turn: bool) -> tuple[int, ...]:
    """Return the axis of each pair, from the sections of a file without their trailing zeros.

    in_turn: the first three axes take pairs in turn (IMROPE) rather than in runs (MROPE). Pairs
    that no axis takes belong to the first one, as in Qwen3-VL; llama.cpp gives them the fourth
    position, which is 0 for text.
    """
    sector = np.arange(pairs) % sum(sections)
    if in_turn:
        axis = _axes_in_turn(sector, sections)
    else:
        axis = np.searchsorted(np.cumsum(sections), sector, side="right")
    return tuple(axis.tolist())


def _axes_in_turn(sector: NDArray[np.intp], sections: Sequence[int]) -> NDArray[np.intp]:
    if len(sections) > 3:
        raise ValueError(
            f"`rope.dimension_sections` is {shown(list(sections))}; three axes take pairs in turn, "
            "so the fourth number must be 0"
        )
    taken = 3 * np.array([*sections, 0, 0, 0])[sector % 3]
    return np.where(sector < taken, sector % 3, 0)


def same_rotation(first: Rotation, second: Rotation) -> bool:
    """Return True if two rotations are equal, whatever their names."""
    return replace(first, rope_type="") == replace(second, rope_type="")
