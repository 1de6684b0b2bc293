"""Rope types: one table from a type's name to the pure function that computes its frequencies and attention factor.

The functions are written once for both angle dtypes. `Base.real` is float64, or float32 to repeat transformers, which
takes every step in float32; where an expression has an unusual order, that order is transformers'.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Real: TypeAlias = NDArray[np.floating[Any]]
Result: TypeAlias = tuple[Real, float]


@dataclass(frozen=True)
class Base:
    """What every rope type starts from: rope_theta, the widths in elements, and the sequence length in tokens."""

    rope_theta: float
    rotary_dim: int
    head_dim: int
    angle_dtype: str = "float64"
    length: int | None = None

    @property
    def real(self) -> type[np.floating[Any]]:
        """The dtype that every step is computed in."""
        return np.float32 if self.angle_dtype == "float32" else np.float64

    def wavelengths(self, rope_theta: float | None = None) -> Real:
        """Return base^(2i/d) for every pair i, the wavelengths over 2π, in `real`."""
        theta = self.rope_theta if rope_theta is None else rope_theta
        return self.power(
            theta, np.arange(0, self.rotary_dim, 2, dtype=self.real) / self.real(self.rotary_dim)
        )

    def power(self, base: float, exponent: Real) -> Real:
        """Return base^exponent, rounded once to `real`."""
        # float32 powers of NumPy, of C libraries and of torch differ in the last bit in every fifth frequency. Rounding
        # the float64 power is the same everywhere, and is what torch returns for 99 frequencies in 100.
        return np.power(np.float64(self.real(base)), exponent.astype(np.float64)).astype(self.real)


def default(base: Base) -> Result:
    """Unscaled: ω = b^(−2i/d), A = 1.

    Source: Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.
    """
    return 1 / base.wavelengths(), 1.0


def linear(base: Base, *, factor: float) -> Result:
    """Position interpolation: ω / s, A = 1.

    Source: Chen et al., "Extending context window … via positional interpolation", arXiv:2306.15595.
    """
    return 1 / base.wavelengths() / base.real(factor), 1.0


def dynamic(
    base: Base,
    *,
    max_position_embeddings: int | None = None,
    factor: float | None = None,
    alpha: float | None = None,
) -> Result:
    """NTK-aware change of base: b′ = b·(sL/L₀ − (s−1))^(d/(d−2)), L = max(length, L₀); with alpha: b′ = b·α^(d/(d−2)).

    With alpha (HunYuan) the frequencies are static. Without, they belong to a length; transformers takes it from
    the longest sequence of the batch, and what it computes depends on the calls before.

    Source: bloc97 and emozilla (2023), "NTK-aware scaled RoPE"; Peng et al., arXiv:2309.00071, section 3.3.
    """
    exponent = _base_exponent(base)
    if alpha:
        return 1 / base.wavelengths(base.rope_theta * alpha**exponent), 1.0
    if factor is None or max_position_embeddings is None:
        name = "factor" if factor is None else "max_position_embeddings"
        raise ValueError(f"rope_type 'dynamic' needs `{name}` (or `alpha`, for static frequencies)")
    if base.length is None or base.length <= max_position_embeddings:
        return 1 / base.wavelengths(), 1.0
    real = base.real
    stretch = real(factor) * real(base.length) / real(max_position_embeddings) - real(factor - 1)
    theta = real(base.rope_theta) * base.power(float(stretch), np.asarray(exponent))
    return 1 / base.wavelengths(float(theta)), 1.0


def powers(base: Base, *, max_position_embeddings: int) -> Result:
    """Qwen's dynamic NTK, a base for each doubling: b′ = b·α^(d/(d−2)), α = 2^⌈log₂(L/L₀) + 1⌉ − 1. A = 1.

    Source: `get_ntk_alpha` in modeling_qwen.py of Qwen/Qwen-7B, where L₀ is the config's `seq_length`.
    """
    exponent = _base_exponent(base)
    if base.length is None or base.length <= max_position_embeddings:
        return 1 / base.wavelengths(), 1.0
    alpha = 2 ** (_doublings(base.length, max_position_embeddings) + 1) - 1
    return 1 / base.wavelengths(base.rope_theta * alpha**exponent), 1.0


def yarn(
    base: Base,
    *,
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
) -> Result:
    """YaRN: ω′ = (ω/s)·γ + ω·(1−γ), γ ramps from 0 to 1 between pairs of beta_fast and beta_slow revolutions.

    A is attention_factor, else m(mscale) / m(mscale_all_dim) where both are given, else m(1), m(μ) = 0.1·μ·ln s + 1.
    s is factor, or max_position_embeddings / original_max_position_embeddings. beta_fast is 32 and beta_slow 1 unless
    given; truncate rounds the ends of the ramp outwards to whole pairs.

    Source: Peng et al., "YaRN", arXiv:2309.00071, sections 3.2 to 3.4; the m of two scales: DeepSeek-V2's code.
    """
    if base.rope_theta <= 1:
        raise ValueError(
            f"`rope_theta` is {base.rope_theta}; rope type 'yarn' divides by its logarithm, so it must be > 1"
        )
    scale = _ratio(factor, max_position_embeddings, original_max_position_embeddings)

    def pair_of(revolutions: float) -> float:
        """Return which pair, as a real number, makes so many revolutions over the original length."""
        ratio = original_max_position_embeddings / (revolutions * 2 * math.pi)
        if ratio == 0:  # of revolutions beyond every float
            raise OverflowError
        return base.rotary_dim * math.log(ratio) / (2 * math.log(base.rope_theta))

    low, high = pair_of(beta_fast or 32.0), pair_of(beta_slow or 1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, base.rotary_dim - 1)
    if low == high:
        high += 0.001
    real, wavelengths = base.real, base.wavelengths()
    ramp = (np.arange(len(wavelengths), dtype=real) - real(low)) / real(high - low)
    keep = 1 - np.clip(ramp, real(0), real(1))
    inv_freq = 1 / (real(scale) * wavelengths) * (1 - keep) + 1 / wavelengths * keep
    if attention_factor is not None:
        return inv_freq, float(attention_factor)
    if mscale and mscale_all_dim:
        return inv_freq, _mscale(scale, mscale) / _mscale(scale, mscale_all_dim)
    return inv_freq, _mscale(scale, 1.0)


def longrope(
    base: Base,
    *,
    short_factor: Sequence[float],
    long_factor: Sequence[float],
    original_max_position_embeddings: int,
    factor: float | None = None,
    max_position_embeddings: int | None = None,
    attention_factor: float | None = None,
    short_mscale: float | None = None,
    long_mscale: float | None = None,
) -> Result:
    """LongRoPE: ω = 1 / (extᵢ·b^(2i/d)), ext = long_factor where length > L₀, else short_factor.

    A is short_mscale or long_mscale (Phi-3.5-MoE) where given, else attention_factor, else √(1 + ln s / ln L₀), 1 where
    s ≤ 1; s is factor, or max_position_embeddings / L₀. transformers switches by the longest sequence of the batch.

    Source: Ding et al., "LongRoPE", arXiv:2402.13753; the code of Phi-3 and Phi-3.5-MoE.
    """
    is_long = base.length is not None and base.length > original_max_position_embeddings
    wavelengths = base.wavelengths()
    for name, entries in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(entries) != len(wavelengths):
            raise ValueError(
                f"`{name}` has {len(entries)} entries; it needs one for each of {len(wavelengths)} pairs"
            )
    inv_freq = 1 / (
        np.asarray(long_factor if is_long else short_factor, dtype=base.real) * wavelengths
    )
    factors = [short_mscale or attention_factor, long_mscale or attention_factor]
    if (
        None in factors
    ):  # at either length: what is missing for the long one shows when the short one is made
        scale = _ratio(factor, max_position_embeddings, original_max_position_embeddings)
        factors = [given or _stretch(scale, original_max_position_embeddings) for given in factors]
    return inv_freq, float(factors[is_long] or 1.0)


def llama3(
    base: Base,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Result:
    """Llama 3.1: wavelengths below L₀/h stay, those above L₀/l are divided by s, between them a linear blend. A = 1.

    Source: Grattafiori et al., "The Llama 3 herd of models", arXiv:2407.21783; `apply_scaling` in Meta's llama-models.
    """
    if high_freq_factor < low_freq_factor:
        raise ValueError(
            f"`high_freq_factor` is {high_freq_factor}, below `low_freq_factor` {low_freq_factor}"
        )
    real, original = base.real, original_max_position_embeddings
    inv_freq = 1 / base.wavelengths()
    # A number over an array is the array's reciprocal times the number in torch, one rounding more than a division.
    wavelength = (1 / inv_freq) * real(2 * math.pi)
    scaled = np.where(
        wavelength > real(original / low_freq_factor), inv_freq / real(factor), inv_freq
    )
    between = (wavelength >= real(original / high_freq_factor)) & (
        wavelength <= real(original / low_freq_factor)
    )
    if high_freq_factor == low_freq_factor:  # a step: nothing lies between
        return scaled, 1.0
    blend = ((1 / wavelength) * real(original) - real(low_freq_factor)) / real(
        high_freq_factor - low_freq_factor
    )
    blended = (1 - blend) * scaled / real(factor) + blend * scaled
    return np.where(between, blended, scaled), 1.0


def proportional(base: Base, *, factor: float = 1.0, partial_rotary_factor: float = 1.0) -> Result:
    """Gemma 4: of the D/2 pairs of a whole head, the first k have ω = b^(−2i/D)/s, the others 0. A = 1.

    k = int(partial_rotary_factor·D // 2). The pairing spans the head: this is not partial rotary.

    Source: `_compute_proportional_rope_parameters` in transformers' modeling_rope_utils.
    """
    inv_freq = 1 / base.wavelengths()
    inv_freq[_rotated_pairs(base, partial_rotary_factor) :] = 0
    return inv_freq / base.real(factor), 1.0


def _rotated_pairs(base: Base, partial_rotary_factor: float) -> int:
    """Return how many pairs of a whole head have a frequency other than 0."""
    return int(partial_rotary_factor * base.head_dim // 2)


def _base_exponent(base: Base) -> float:
    """Return d/(d−2), to which a stretch of the longest wavelength is raised where it changes the base."""
    if base.rotary_dim == 2:
        raise ValueError("`rotary_dim` is 2; rope types that change the base need at least 4")
    return base.rotary_dim / (base.rotary_dim - 2)


def _ratio(factor: float | None, reached: int | None, original: int) -> float:
    """Return the scale s: the factor, or how many times the original length is reached."""
    if factor is not None:
        return float(factor)
    if reached is None:
        raise ValueError(
            "`factor` is missing, and so is `max_position_embeddings`, from which it would follow"
        )
    return reached / original


def _stretch(scale: float, original: int) -> float:
    """Return LongRoPE's attention factor: √(1 + ln s / ln L₀), and 1 where nothing is stretched."""
    if scale <= 1:
        return 1.0
    if original == 1:
        raise ValueError(
            "`original_max_position_embeddings` is 1; rope type 'longrope' divides by its logarithm, so it must be > 1"
        )
    return math.sqrt(1 + math.log(scale) / math.log(original))


def _doublings(length: int, original: int) -> int:
    """Return how often the original length is doubled until it is no shorter."""
    return max(0, math.ceil(math.log2(length / original) + 1) - 1)


def _mscale(scale: float, mscale: float) -> float:
    """Return YaRN's m: 0.1·μ·ln s + 1, and 1 where nothing is stretched."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


@dataclass(frozen=True)
class RopeType:
    """A row of the table: the function, whether its result depends on the sequence length, and what it pairs.

    same_as: from a length and the original one, the length that stands for all of the same result.
    pairs_whole_head: partial_rotary_factor is the share of a whole head's pairs that rotate, not of a narrower part.
    """

    compute: Callable[..., Result]
    depends_on_length: Callable[[Mapping[str, Any]], bool] = lambda parameters: False
    same_as: Callable[[int, int], int] = lambda length, original: length
    pairs_whole_head: bool = False

    def rotated_pairs(self, base: Base, section: Mapping[str, Any]) -> int:
        """Return how many pairs have a frequency other than 0."""
        if self.pairs_whole_head:
            return _rotated_pairs(base, section.get("partial_rotary_factor", 1.0))
        return (base.rotary_dim + 1) // 2

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """The keys this type reads, and whether each is required: the function's own signature."""
        signature = list(inspect.signature(self.compute).parameters.values())
        return {parameter.name: parameter.default is parameter.empty for parameter in signature[1:]}


ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(default),
    "linear": RopeType(linear),
    "dynamic": RopeType(dynamic, lambda parameters: not parameters.get("alpha"), max),
    "dynamic_powers": RopeType(
        powers, lambda parameters: True, lambda length, L0: L0 << _doublings(length, L0)
    ),
    "yarn": RopeType(yarn),
    "longrope": RopeType(longrope, lambda parameters: True, lambda length, L0: L0 + (length > L0)),
    "llama3": RopeType(llama3),
    "proportional": RopeType(proportional, pairs_whole_head=True),
}
ALIASES = {"su": "longrope", "mrope": "default"}
