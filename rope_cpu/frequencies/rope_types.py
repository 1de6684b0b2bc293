"""Rope types: a table from the name of a type to the function for its frequencies and factor.

`ScalingRule` evaluates the function for a sequence length.

A new type is a function and a row of `ROPE_TYPES`. A function takes the settings and, as keyword
arguments, the keys of the scaling section that it reads. It returns inv_freq, shape (pairs,), in
radians per unit of position, and the attention factor.

The functions serve both angle dtypes: `RopeSettings.compute_dtype` is float64, or float32 to repeat
transformers, which rounds every step to float32. Where an expression has an unusual order, the
order is that of transformers.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rope_cpu.arguments.errors import ArgumentError, Finding
from rope_cpu.arguments.texts import shown
from rope_cpu.array_types import Float64

Real: TypeAlias = NDArray[np.floating[Any]]
Result: TypeAlias = tuple[Real, float]

MISSING = Finding("is missing")

# Radians per unit of position. Beyond this bound, positions of some thousands would already lose
# digits, as angles beyond 2^53 radians do.
LARGEST_FREQUENCY = 2.0**40


@dataclass(frozen=True)
class RopeSettings:
    """The inputs of every rope type.

    Parameters
    ----------
    rope_theta : float
        Base b of the frequencies.
    rotary_dim : int
        Rotated width d in elements.
    head_dim : int
        Width of a head vector in elements.
    angle_dtype : str
        "float64" or "float32".
    length : int, optional
        Sequence length in tokens; None for the original length.
    """

    rope_theta: float
    rotary_dim: int
    head_dim: int
    angle_dtype: str = "float64"
    length: int | None = None

    @property
    def compute_dtype(self) -> type[np.floating[Any]]:
        """The dtype of every step."""
        return np.float32 if self.angle_dtype == "float32" else np.float64

    def wavelengths(self, rope_theta: float | None = None) -> Real:
        """Return b^(2i/d) for every pair i: the wavelengths divided by 2π."""
        theta = self.rope_theta if rope_theta is None else rope_theta
        dtype = self.compute_dtype
        exponents = np.arange(0, self.rotary_dim, 2, dtype=dtype) / dtype(self.rotary_dim)
        return self.power(theta, exponents)

    def power(self, base: float, exponent: Real) -> Real:
        """Return base^exponent, rounded once to the compute dtype."""
        # float32 powers of NumPy, of C libraries and of torch differ in the last bit in every fifth
        # frequency. Rounding the float64 power is the same everywhere, and equals the result of
        # torch for 99 frequencies in 100.
        dtype = self.compute_dtype
        exact = np.power(np.float64(dtype(base)), exponent.astype(np.float64))
        return exact.astype(dtype)


def default(settings: RopeSettings) -> Result:
    """Unscaled: ω = b^(−2i/d), A = 1.

    References
    ----------
    Su et al., "RoFormer", arXiv:2104.09864, section 3.2.2.
    """
    return 1 / settings.wavelengths(), 1.0


def linear(settings: RopeSettings, *, factor: float) -> Result:
    """Position interpolation: ω / s, A = 1.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    factor : float
        The scale s.

    References
    ----------
    Chen et al., "Extending context window … via positional interpolation", arXiv:2306.15595.
    """
    return 1 / settings.wavelengths() / settings.compute_dtype(factor), 1.0


def dynamic(
    settings: RopeSettings,
    *,
    max_position_embeddings: int | None = None,
    factor: float | None = None,
    alpha: float | None = None,
) -> Result:
    """NTK-aware change of base: b′ = b·(s·L/L₀ − (s−1))^(d/(d−2)), L = max(length, L₀), A = 1.

    With alpha (HunYuan), b′ = b·α^(d/(d−2)) and the frequencies are static. Without it, they belong
    to a length. transformers takes the longest sequence of the batch as the length, and its result
    depends on earlier calls.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    max_position_embeddings : int
        The original length L₀ in tokens; required without alpha.
    factor : float
        The scale s; required without alpha.
    alpha : float, optional
        The stretch α.

    References
    ----------
    bloc97 and emozilla (2023), "NTK-aware scaled RoPE"; Peng et al., arXiv:2309.00071, section 3.3.
    """
    exponent = _base_exponent(settings)
    if alpha:
        return 1 / settings.wavelengths(settings.rope_theta * alpha**exponent), 1.0
    if factor is None or max_position_embeddings is None:
        name = "factor" if factor is None else "max_position_embeddings"
        remedy = "give `alpha` instead, for frequencies that depend on no length"
        raise ArgumentError(name, MISSING, "be given for rope type 'dynamic'", remedy)
    if settings.length is None or settings.length <= max_position_embeddings:
        return 1 / settings.wavelengths(), 1.0
    dtype = settings.compute_dtype
    ratio = dtype(factor) * dtype(settings.length) / dtype(max_position_embeddings)
    stretch = ratio - dtype(factor - 1)
    theta = dtype(settings.rope_theta) * settings.power(float(stretch), np.asarray(exponent))
    return 1 / settings.wavelengths(float(theta)), 1.0


def powers(settings: RopeSettings, *, max_position_embeddings: int) -> Result:
    """Qwen's dynamic NTK with one base per doubling: b′ = b·α^(d/(d−2)), A = 1.

    α = 2^⌈log₂(L/L₀) + 1⌉ − 1, with the sequence length L.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    max_position_embeddings : int
        The original length L₀ in tokens.

    References
    ----------
    `get_ntk_alpha` in modeling_qwen.py of Qwen/Qwen-7B, where L₀ is the config's `seq_length`.
    """
    exponent = _base_exponent(settings)
    if settings.length is None or settings.length <= max_position_embeddings:
        return 1 / settings.wavelengths(), 1.0
    alpha = 2 ** (_doublings(settings.length, max_position_embeddings) + 1) - 1
    return 1 / settings.wavelengths(settings.rope_theta * alpha**exponent), 1.0


def yarn(
    settings: RopeSettings,
    original_max_position_embeddings: int,
    factor: float | None = None,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    *,
    max_position_embeddings: int | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
    truncate: bool = True,
    ext_factor: float | None = None,
) -> Result:
    """YaRN: ω′ = (ω/s)·γ + ω·(1−γ), A = m(1), with m(μ) = 0.1·μ·ln s + 1.

    γ rises from 0 to 1 between the pairs that make beta_fast and beta_slow revolutions over the
    original length.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    original_max_position_embeddings : int
        The original length L₀ in tokens.
    factor : float, optional
        The scale s; max_position_embeddings / L₀ by default.
    max_position_embeddings : int, optional
        The length in tokens after scaling.
    beta_fast, beta_slow : float, optional
        Revolutions at the ends of the ramp, 32 and 1 by default.
    mscale, mscale_all_dim : float, optional
        A is m(mscale) / m(mscale_all_dim) if both are given.
    attention_factor : float, optional
        A itself; it takes precedence.
    truncate : bool
        True rounds the ends of the ramp outwards to whole pairs.
    ext_factor : float, optional
        YaRN of llama.cpp: 1−γ is multiplied by this factor, 1 as a rule, and γ is a step where the
        ramp would end before it starts.

    References
    ----------
    Peng et al., "YaRN", arXiv:2309.00071, sections 3.2 to 3.4; the m of two scales: DeepSeek-V2's
    code; ext_factor: `rope_yarn` in ggml's ops.cpp.
    """
    if settings.rope_theta <= 1:
        rule = "be above 1, as rope type 'yarn' divides by its logarithm"
        raise ArgumentError("rope_theta", settings.rope_theta, rule)
    scale = _scale(factor, max_position_embeddings, original_max_position_embeddings)
    low = _pair_of_revolutions(beta_fast or 32.0, settings, original_max_position_embeddings)
    high = _pair_of_revolutions(beta_slow or 1.0, settings, original_max_position_embeddings)
    if truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, settings.rotary_dim - 1)
    if ext_factor is not None:
        high = max(low, high)
    if low == high:
        high += 0.001
    dtype = settings.compute_dtype
    wavelengths = settings.wavelengths()
    ramp = (np.arange(len(wavelengths), dtype=dtype) - dtype(low)) / dtype(high - low)
    unscaled_share = 1 - np.clip(ramp, dtype(0), dtype(1))
    if ext_factor is not None:
        unscaled_share *= ext_factor
    scaled = 1 / (dtype(scale) * wavelengths)
    inv_freq = scaled * (1 - unscaled_share) + 1 / wavelengths * unscaled_share
    if attention_factor is not None:
        return inv_freq, float(attention_factor)
    if mscale and mscale_all_dim:
        return inv_freq, _yarn_mscale(scale, mscale) / _yarn_mscale(scale, mscale_all_dim)
    return inv_freq, _yarn_mscale(scale, 1.0)


def deepseek_yarn(
    settings: RopeSettings,
    original_max_position_embeddings: int,
    factor: float,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
    mscale: float = 1.0,
    mscale_all_dim: float = 0.0,
) -> Result:
    """YaRN as DeepSeek's code has it: A = m(mscale) / m(mscale_all_dim), each with a default.

    The frequencies are those of `yarn`. The factor differs from that of `yarn` only if a section
    has one mscale without the other.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    original_max_position_embeddings : int
        The original length L₀ in tokens.
    factor : float
        The scale s.
    beta_fast, beta_slow : float, optional
        Revolutions at the ends of the ramp, 32 and 1 by default.
    mscale, mscale_all_dim : float
        The μ of the numerator and of the denominator, with m(μ) = 0.1·μ·ln s + 1.

    References
    ----------
    `DeepseekScalingRotaryEmbedding` in vLLM (rotary_embedding/deepseek_scaling_rope.py) and SGLang.
    """
    inv_freq, _ = yarn(settings, original_max_position_embeddings, factor, beta_fast, beta_slow)
    return inv_freq, _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)


def telechat3_yarn(
    settings: RopeSettings,
    original_max_position_embeddings: int,
    factor: float,
    beta_fast: float | None = None,
    beta_slow: float | None = None,
) -> Result:
    """TeleChat3's YaRN: the frequencies of `yarn`, with A = 0.07·ln s + 1.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    original_max_position_embeddings : int
        The original length L₀ in tokens.
    factor : float
        The scale s.
    beta_fast, beta_slow : float, optional
        Revolutions at the ends of the ramp, 32 and 1 by default.

    References
    ----------
    `_yarn_get_mscale` in mindformers/modules/layers.py of Tele-AI/TeleChat3;
    `TeleChat3RoPEScaledRotaryEmbedding` in vLLM (rotary_embedding/telechat3_scaling_rope.py).
    """
    length = original_max_position_embeddings
    return deepseek_yarn(settings, length, factor, beta_fast, beta_slow, mscale=0.7)


def ntk(settings: RopeSettings, *, factor: float, mixed_b: float | None = None) -> Result:
    """NTK-aware change of base at every length: ω′ = (s·b)^(−2i/d) / s^(2/d), A = 1.

    With mixed_b β, ω′ = b^(−2i/d) / exp(a·(i+1)^β), where a = ln s / (d/2)^β. In both forms the
    last frequency is divided by s.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    factor : float
        The scale s.
    mixed_b : float, optional
        The exponent β of the mixed form.

    References
    ----------
    Su, kexue.fm/archives/9706, equations 6 and 10 to 13; `NTKScalingRotaryEmbedding` in vLLM
    (rotary_embedding/ntk_scaling_rope.py) and in GTE's modeling.py (Alibaba-NLP/new-impl).
    """
    dtype = settings.compute_dtype
    if mixed_b is None:
        inv_freq = 1 / settings.wavelengths(settings.rope_theta * factor)
        return inv_freq / dtype(factor ** (2 / settings.rotary_dim)), 1.0
    inv_freq = 1 / settings.wavelengths()
    numbers = np.arange(1, len(inv_freq) + 1, dtype=np.float64)
    rate = dtype(math.log(factor)) / dtype((settings.rotary_dim / 2) ** mixed_b)
    return inv_freq / np.exp(rate * (numbers**mixed_b).astype(dtype)), 1.0


def longrope(
    settings: RopeSettings,
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
    """LongRoPE: ω = 1 / (extᵢ·b^(2i/d)), with one list of factors ext up to L₀ and one beyond.

    A is √(1 + ln s / ln L₀), and 1 for s ≤ 1. transformers chooses the list by the longest sequence
    of the batch.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    short_factor, long_factor : sequence of float, shape (pairs,)
        The factors ext for lengths up to L₀, and for longer ones.
    original_max_position_embeddings : int
        The original length L₀ in tokens.
    factor : float, optional
        The scale s; max_position_embeddings / L₀ by default.
    max_position_embeddings : int, optional
        The length in tokens after scaling.
    attention_factor : float, optional
        A itself, at both lengths.
    short_mscale, long_mscale : float, optional
        A up to L₀ and beyond (Phi-3.5-MoE); they take precedence over attention_factor.

    References
    ----------
    Ding et al., "LongRoPE", arXiv:2402.13753; the code of Phi-3 and Phi-3.5-MoE.
    """
    wavelengths = settings.wavelengths()
    for name, entries in (("short_factor", short_factor), ("long_factor", long_factor)):
        if len(entries) != len(wavelengths):
            finding = Finding(f"has {len(entries)} entries")
            raise ArgumentError(name, finding, f"have one for each of {len(wavelengths)} pairs")
    original = original_max_position_embeddings
    is_long = settings.length is not None and settings.length > original
    extensions = long_factor if is_long else short_factor
    inv_freq = 1 / (np.asarray(extensions, dtype=settings.compute_dtype) * wavelengths)
    short = short_mscale or attention_factor
    long = long_mscale or attention_factor
    if short is None or long is None:
        # Computed for both lengths, so that a missing key is refused before a long sequence comes.
        common = _longrope_factor(_scale(factor, max_position_embeddings, original), original)
        short = short or common
        long = long or common
    attention = long if is_long else short
    return inv_freq, float(attention or 1.0)


def llama3(
    settings: RopeSettings,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> Result:
    """Llama 3.1: short wavelengths keep ω, long ones get ω / s, a linear blend in between; A = 1.

    Short means below L₀ / high_freq_factor, long means above L₀ / low_freq_factor.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    factor : float
        The scale s.
    low_freq_factor, high_freq_factor : float
        Divisors of L₀ at the ends of the blend.
    original_max_position_embeddings : int
        The original length L₀ in tokens.

    References
    ----------
    Grattafiori et al., "The Llama 3 herd of models", arXiv:2407.21783; `apply_scaling` in Meta's
    llama-models.
    """
    if high_freq_factor < low_freq_factor:
        rule = f"be at least `low_freq_factor`, {low_freq_factor}"
        raise ArgumentError("high_freq_factor", high_freq_factor, rule)
    dtype = settings.compute_dtype
    original = original_max_position_embeddings
    longest_kept = dtype(original / high_freq_factor)
    shortest_scaled = dtype(original / low_freq_factor)
    inv_freq = 1 / settings.wavelengths()
    # torch divides a number by an array as reciprocal times number: one rounding more than a
    # division.
    wavelength = (1 / inv_freq) * dtype(2 * math.pi)
    scaled = np.where(wavelength > shortest_scaled, inv_freq / dtype(factor), inv_freq)
    if high_freq_factor == low_freq_factor:  # a step without a blend
        return scaled, 1.0
    between = (wavelength >= longest_kept) & (wavelength <= shortest_scaled)
    distance = (1 / wavelength) * dtype(original) - dtype(low_freq_factor)
    blend = distance / dtype(high_freq_factor - low_freq_factor)
    blended = (1 - blend) * scaled / dtype(factor) + blend * scaled
    return np.where(between, blended, scaled), 1.0


def proportional(
    settings: RopeSettings, *, factor: float = 1.0, partial_rotary_factor: float = 1.0
) -> Result:
    """Gemma 4: the first k of the D/2 pairs of a head have ω = b^(−2i/D) / s, the others 0; A = 1.

    k = int(partial_rotary_factor·D // 2), with the head_dim D. Pairs span the whole head, unlike in
    partial rotary embeddings.

    Parameters
    ----------
    settings : RopeSettings
        The base, the widths and the length.
    factor : float
        The scale s.
    partial_rotary_factor : float
        Share of the pairs that rotate.

    References
    ----------
    `_compute_proportional_rope_parameters` in transformers' modeling_rope_utils.
    """
    inv_freq = 1 / settings.wavelengths()
    inv_freq[_rotated_pairs(settings, partial_rotary_factor) :] = 0
    return inv_freq / settings.compute_dtype(factor), 1.0


def _rotated_pairs(settings: RopeSettings, partial_rotary_factor: float) -> int:
    """Return the number of pairs of a whole head with a frequency other than 0."""
    return int(partial_rotary_factor * settings.head_dim // 2)


def _base_exponent(settings: RopeSettings) -> float:
    """Return d/(d−2): the longest wavelength grows by a stretch if the base grows by its power."""
    if settings.rotary_dim == 2:
        raise ArgumentError("rotary_dim", 2, "be at least 4 for rope types that change the base")
    return settings.rotary_dim / (settings.rotary_dim - 2)


def _scale(factor: float | None, length: int | None, original: int) -> float:
    """Return the scale s: the factor, or the ratio of the length to the original length."""
    if factor is not None:
        return float(factor)
    if length is None:
        rule = "be given, or follow from `max_position_embeddings`"
        raise ArgumentError("factor", MISSING, rule)
    return length / original


def _pair_of_revolutions(revolutions: float, settings: RopeSettings, original: int) -> float:
    """Return the index of the pair, as a real number, with these revolutions over the length."""
    ratio = original / (revolutions * 2 * math.pi)
    if ratio == 0:  # more revolutions than a float can hold
        raise OverflowError
    return settings.rotary_dim * math.log(ratio) / (2 * math.log(settings.rope_theta))


def _yarn_mscale(scale: float, mscale: float) -> float:
    """Return YaRN's m(μ) = 0.1·μ·ln s + 1, and 1 for a scale of at most 1."""
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _longrope_factor(scale: float, original: int) -> float:
    """Return LongRoPE's attention factor √(1 + ln s / ln L₀), and 1 for a scale of at most 1."""
    if scale <= 1:
        return 1.0
    if original == 1:
        rule = "be above 1, as rope type 'longrope' divides by its logarithm"
        raise ArgumentError("original_max_position_embeddings", 1, rule)
    return math.sqrt(1 + math.log(scale) / math.log(original))


def _doublings(length: int, original: int) -> int:
    """Return how many doublings of the original length reach this length."""
    return math.ceil(math.log2(max(length, original) / original) + 1) - 1


@dataclass(frozen=True)
class RopeType:
    """A row of the table.

    Parameters
    ----------
    compute : callable
        The function for the frequencies and the attention factor.
    depends_on_length : callable
        From the parameters of a section to whether the result depends on the sequence length.
    cache_length : callable
        From (length, original length) to the representative of all lengths with equal frequencies.
    ranges : str
        The frequencies of shorter and longer sequences, for texts. {original} stands for the
        original length, {longer} for the next one.
    inert_values : mapping
        Keys that the type does not read, with the values at which they have no effect. Other
        values are refused: YaRN's first code, SGLang and transformers differ in their meaning.
    pairs_whole_head : bool
        True if `partial_rotary_factor` is the share of the pairs of a whole head that rotate,
        rather than the share of the head in which pairs are formed.
    """

    compute: Callable[..., Result]
    depends_on_length: Callable[[Mapping[str, Any]], bool] = lambda parameters: False
    cache_length: Callable[[int, int], int] = lambda length, original: length
    ranges: str = "others at every token"
    inert_values: Mapping[str, float] = field(default_factory=dict)
    pairs_whole_head: bool = False

    def rotated_pairs(self, settings: RopeSettings, section: Mapping[str, Any]) -> int:
        """Return the number of pairs with a frequency other than 0."""
        if self.pairs_whole_head:
            return _rotated_pairs(settings, section.get("partial_rotary_factor", 1.0))
        return (settings.rotary_dim + 1) // 2

    @cached_property
    def parameters(self) -> dict[str, bool]:
        """The keys this type reads, each with whether it is required, from the signature."""
        signature = list(inspect.signature(self.compute).parameters.values())
        return {parameter.name: parameter.default is parameter.empty for parameter in signature[1:]}

    @property
    def has_mscales(self) -> bool:
        """True if the attention factor follows from `mscale` and `mscale_all_dim`, if given."""
        return "mscale_all_dim" in self.parameters


_YARN_DEFAULTS = {"attn_factor": 1, "extrapolation_factor": 1}

ROPE_TYPES: dict[str, RopeType] = {
    "default": RopeType(default, inert_values={"factor": 1}),
    "linear": RopeType(linear),
    "dynamic": RopeType(
        dynamic,
        depends_on_length=lambda parameters: not parameters.get("alpha"),
        cache_length=max,
        ranges="up to {original} one base, from {longer} another at every token",
    ),
    "dynamic_powers": RopeType(
        powers,
        depends_on_length=lambda parameters: True,
        cache_length=lambda length, original: original << _doublings(length, original),
        ranges="up to {original} one base, from {longer} another at each doubling",
    ),
    "yarn": RopeType(yarn, inert_values=_YARN_DEFAULTS),
    "deepseek_yarn": RopeType(deepseek_yarn, inert_values=_YARN_DEFAULTS),
    "telechat3-yarn": RopeType(telechat3_yarn, inert_values=_YARN_DEFAULTS | {"mscale": 1}),
    "ntk": RopeType(ntk),
    "longrope": RopeType(
        longrope,
        depends_on_length=lambda parameters: True,
        cache_length=lambda length, original: original + (length > original),
        ranges="up to {original} the short factors, from {longer} the long ones",
    ),
    "llama3": RopeType(llama3),
    "proportional": RopeType(proportional, pairs_whole_head=True),
}
ALIASES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class ScalingRule:
    """The frequencies of one rope type as a function of the sequence length.

    It is immutable and hashable, compares by value and can be pickled.

    Parameters
    ----------
    rope_type : str
        A name in `ROPE_TYPES`.
    settings : RopeSettings
        The base and the widths.
    parameters : tuple of (str, value)
        Keyword arguments of the type's function, sorted by name.
    """

    rope_type: str
    settings: RopeSettings
    parameters: tuple[tuple[str, Any], ...]

    @property
    def original_length(self) -> int:
        """The original length in tokens, for types that depend on the sequence length."""
        parameters = dict(self.parameters)
        original = parameters.get("original_max_position_embeddings")
        return int(original or parameters["max_position_embeddings"])

    @property
    def ranges(self) -> str:
        """The frequencies of shorter and longer sequences, for texts."""
        original = self.original_length
        return ROPE_TYPES[self.rope_type].ranges.format(original=original, longer=original + 1)

    def representatives(self, lengths: Sequence[int]) -> list[int]:
        """Return for each length the one that stands for all lengths of equal frequencies."""
        representative = ROPE_TYPES[self.rope_type].cache_length
        original = self.original_length
        return [representative(length, original) for length in lengths]

    def frequencies(self, length: int | None) -> tuple[Float64, float]:
        """Compute inv_freq (pairs,) and the attention factor; None: for the original length."""
        row = ROPE_TYPES[self.rope_type]
        parameters = dict(self.parameters)
        settings = replace(self.settings, length=length)
        try:
            with np.errstate(all="ignore"):
                inv_freq, factor = row.compute(settings, **parameters)
        except OverflowError:
            raise self._error(length, "values overflow") from None
        rotated = inv_freq[: row.rotated_pairs(self.settings, parameters)]
        for extreme in (rotated.min(), rotated.max()):
            if not 0 < extreme <= LARGEST_FREQUENCY:
                raise self._error(length, f"a frequency comes to {float(extreme)}")
        return inv_freq.astype(np.float64), float(factor)

    def _error(self, length: int | None, problem: str) -> ValueError:
        """Return the error for unusable frequencies, with the numbers that lead to them."""
        theta = ("rope_theta", self.settings.rope_theta)
        inputs = [theta, *self.parameters, ("seq_len", length)]
        numbers = [f"`{name}` {shown(x)}" for name, x in inputs if isinstance(x, int | float)]
        rule = "frequencies must be finite, above 0 and at most 2^40"
        found = f"{problem} in {self.settings.angle_dtype}"
        return ValueError(f"{', '.join(numbers)}: {found}; {rule}")
