"""From the metadata of a GGUF file to the rotation of full-attention and of windowed layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.gguf.architectures import Architecture, Windowed
from rope_cpu.configs.gguf.frequencies import Factors, Rotation, YarnRamp, mrope_pair_axis
from rope_cpu.configs.gguf.values import FREQS, LONG, SHORT, Metadata
from rope_cpu.frequencies.scaling import DEFAULT_THETA

SCALING_TYPES = ("none", "linear", "yarn", "longrope")

_ALPHA = "rope.scaling.alpha"
_SECTIONS = "rope.dimension_sections"
_YARN = "rope.scaling.yarn_"
_SLOWEST = 1.0  # yarn_beta_slow without a key

# Metadata are float32: numbers that agree to this relative difference are equal.
_EQUAL = 2.0**-20


def full_rotation(metadata: Metadata, facts: Architecture) -> Rotation:
    """Return the rotation of the layers without a window."""
    _refuse_unused_keys(metadata, facts)
    head_dim = _head_dim(metadata)
    rotary_dim = metadata.whole("rope.dimension_count", head_dim, 2, limits.HEAD_DIM)
    _check_width(metadata, "rope.dimension_count", rotary_dim, head_dim)
    scaling_type = scalars.choice(
        metadata.full_key("rope.scaling.type"),
        metadata.get("rope.scaling.type") or "linear",
        SCALING_TYPES,
    )
    factor = 1.0 if scaling_type == "none" else _factor(metadata)
    strength = _yarn_strength(metadata, facts, scaling_type)
    sections = _sections(metadata, facts)
    rotation = Rotation(
        head_dim=rotary_dim if facts.latent else head_dim,
        rotary_dim=rotary_dim,
        rope_theta=_theta(metadata, facts, head_dim),
        interleaved=facts.pairing == "norm" or (facts.pairing == "norm_or_mrope" and not sections),
        rope_type=_type_name(factor, strength),
        factor=factor,
        attention_factor=_attention_factor(metadata, facts, strength, factor),
        yarn=_yarn_ramp(metadata, facts, strength),
    )
    if sections:
        in_turn = facts.pairing == "imrope"
        pair_axis = mrope_pair_axis(rotary_dim // 2, sections, in_turn=in_turn)
        rotation = replace(rotation, pair_axis=pair_axis)
    return _with_factors(metadata, facts, rotation)


def windowed_rotation(metadata: Metadata, facts: Architecture, full: Rotation) -> Rotation:
    """Return the rotation of the layers with a sliding window."""
    windowed = facts.windowed or Windowed()
    rotation = full
    if not windowed.scaled:
        rotation = replace(full, factor=1.0, attention_factor=1.0, yarn=None, rope_type="default")
    if windowed.own_theta:
        theta = windowed.rope_theta or full.rope_theta
        theta = metadata.real("rope.freq_base_swa", theta)
        rotation = replace(rotation, rope_theta=theta)
    if facts.factors_of_full_attention:
        rotation = replace(rotation, freqs=None, rope_type="default")
    if not windowed.own_width:
        return rotation
    head_dim = metadata.whole("attention.key_length_swa", full.head_dim, 2, limits.HEAD_DIM)
    rotary_dim = metadata.whole("rope.dimension_count_swa", full.rotary_dim, 2, limits.HEAD_DIM)
    _check_width(metadata, "rope.dimension_count_swa", rotary_dim, head_dim)
    return replace(rotation, head_dim=head_dim, rotary_dim=rotary_dim)


def _head_dim(metadata: Metadata) -> int:
    """Return the width of a head: key_length, else embedding_length / head_count."""
    width = metadata.whole("attention.key_length", None, 2, limits.HEAD_DIM)
    if width is not None:
        return width
    embedding = metadata.whole("embedding_length", None, 1, limits.HIDDEN_SIZE)
    heads = metadata.get("attention.head_count")
    if embedding is None or heads is None:
        missing = "embedding_length" if embedding is None else "attention.head_count"
        raise ValueError(
            f"`{metadata.full_key(missing)}` is missing, and so is "
            f"`{metadata.full_key('attention.key_length')}`, which would follow from it"
        )
    if isinstance(heads, list) and heads:
        heads = heads[0]  # llama.cpp takes those of the first layer
    name = metadata.full_key("attention.head_count")
    width = embedding // scalars.whole_number(name, heads, 1, limits.HEADS)
    return scalars.whole_number(f"{metadata.full_key('embedding_length')} / head_count", width, 2)


def _check_width(metadata: Metadata, key: str, rotary_dim: int, head_dim: int) -> None:
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"`{metadata.full_key(key)}` is {rotary_dim}; it must be even and at most the width "
            f"{head_dim} of a head"
        )


def _theta(metadata: Metadata, facts: Architecture, head_dim: int) -> float:
    """Return the base, raised by the NTK-aware alpha of HunYuan."""
    theta = metadata.real("rope.freq_base", DEFAULT_THETA)
    alpha = metadata.real(_ALPHA, 0.0, zero=True)
    if not facts.alpha or alpha == 0:
        return theta
    if head_dim <= 2:
        raise ValueError(f"`{metadata.full_key(_ALPHA)}` is {alpha}, but heads are 2 wide")
    try:
        raised = theta * alpha ** (head_dim / (head_dim - 2))
    except OverflowError:
        raised = math.inf
    return scalars.real_number(f"{metadata.full_key('rope.freq_base')} with alpha", raised)


def _factor(metadata: Metadata) -> float:
    """Return the divisor of all frequencies; 0 stands for none."""
    key = "rope.scaling.factor"
    if metadata.get(key) is None:
        key = "rope.scale_linear"  # of older files
    return metadata.real(key, 1.0, zero=True) or 1.0


def _yarn_strength(metadata: Metadata, facts: Architecture, scaling_type: str) -> float:
    """Return yarn_ext_factor, 0 without YaRN."""
    default = 1.0 if scaling_type == "yarn" else 0.0
    if "ext_factor" not in facts.yarn.reads:
        return default
    value = metadata.get(f"{_YARN}ext_factor")
    if isinstance(value, int | float) and value < 0:
        return default
    return metadata.real(f"{_YARN}ext_factor", default, zero=True)


def _yarn_ramp(metadata: Metadata, facts: Architecture, strength: float) -> YarnRamp | None:
    if strength == 0:
        return None
    reads = facts.yarn.reads
    fast = facts.yarn.beta_fast
    slow = _SLOWEST
    if "beta_fast" in reads:
        fast = metadata.real(f"{_YARN}beta_fast", fast)
    if "beta_slow" in reads:
        slow = metadata.real(f"{_YARN}beta_slow", slow)
    return YarnRamp(
        strength=strength,
        beta_fast=fast,
        beta_slow=slow,
        original_length=_original_length(metadata),
    )


def _original_length(metadata: Metadata) -> int:
    """Return the original length in tokens; 0 stands for a missing key."""
    key = "rope.scaling.original_context_length"
    length = metadata.whole(key, 0, 0) or metadata.whole("context_length", 0, 0)
    if not length:
        raise ValueError(
            f"`{metadata.full_key(key)}` is missing, and so is "
            f"`{metadata.full_key('context_length')}`; the scaling needs one of them"
        )
    return length


def _attention_factor(
    metadata: Metadata, facts: Architecture, strength: float, factor: float
) -> float:
    """Return the factor on cos and sin."""
    common = metadata.real("rope.scaling.attn_factor", 1.0)
    reads_factor = "attn_factor" in facts.yarn.reads
    if strength == 0 and reads_factor:
        return common * metadata.real(f"{_YARN}attn_factor", 1.0)
    if strength > 0:
        common *= _yarn_factor(metadata, facts, factor)
    if not reads_factor:
        # Converters write a multiplier of 1, or the factor itself, which llama.cpp computes.
        _refuse_other_values(metadata, facts, f"{_YARN}attn_factor", (1, common))
    return common


def _yarn_factor(metadata: Metadata, facts: Architecture, factor: float) -> float:
    """Return m(mscale) / m(mscale_all_dim) of YaRN, with 1 for a missing mscale_all_dim."""
    all_dim = 0.0
    if "log_multiplier" in facts.yarn.reads:
        all_dim = metadata.real(f"{_YARN}log_multiplier", 0.0, zero=True) / facts.yarn.log_unit
    if all_dim == 0:
        return _mscale(factor, 1.0)
    if facts.yarn.equal_mscales:
        return 1.0
    return _mscale(factor, 1.0) / _mscale(factor, all_dim)


def _mscale(factor: float, mscale: float) -> float:
    """Return YaRN's m(μ) = 0.1·μ·ln s + 1, and 1 for a scale of at most 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _type_name(factor: float, strength: float) -> str:
    if strength > 0:
        return "yarn"
    return "default" if factor == 1 else "linear"


def _sections(metadata: Metadata, facts: Architecture) -> tuple[int, ...]:
    """Return the pairs of each axis without trailing zeros; empty for a rotation with one axis."""
    value = metadata.get(_SECTIONS)
    name = metadata.full_key(_SECTIONS)
    sections: list[int] = []
    if value is not None:
        sections = [*scalars.whole_numbers(name, value, 0, most=limits.HEAD_DIM, longest=4)]
    while sections and sections[-1] == 0:
        sections.pop()
    if facts.pairing in ("mrope", "imrope") and not sections:
        raise ValueError(f"`{name}` is {shown(value)}; {facts.name!r} needs the pairs of its axes")
    if facts.pairing.endswith("_or_mrope") and 0 in (*sections[:2], *[0] * (2 - len(sections))):
        return ()
    has_axes = facts.pairing not in ("norm", "neox")
    if not has_axes and sum(section > 0 for section in sections) > 1:
        raise ValueError(
            f"`{name}` is {shown(value)}, but llama.cpp rotates {facts.name!r} with one axis"
        )
    return tuple(sections) if has_axes else ()


def _with_factors(metadata: Metadata, facts: Architecture, rotation: Rotation) -> Rotation:
    """Return the rotation with the divisors in the file's tensors."""
    freqs = _factors(metadata, FREQS)
    short = _factors(metadata, SHORT)
    long = _factors(metadata, LONG)
    if freqs is None and short is None and long is None:
        return rotation
    if not (facts.factors or facts.factors_of_full_attention):
        names = ", ".join(metadata.tensors)
        raise ValueError(f"the file has {names}, which llama.cpp does not use for {facts.name!r}")
    if freqs is not None:
        return replace(rotation, freqs=freqs, rope_type="rope_freqs")
    if short is None or long is None:
        raise ValueError(f"the file has only one of {SHORT} and {LONG}; both are needed")
    rotation = replace(rotation, short_factors=short, long_factors=long)
    rotation = replace(rotation, original_length=_original_length(metadata), rope_type="longrope")
    replace(rotation, short_factors=long).spec()  # refuses wrong factors for long sequences
    return rotation


def _factors(metadata: Metadata, name: str) -> Factors | None:
    tensor = metadata.tensors.get(name)
    return None if tensor is None else tuple(tensor.tolist())


def _refuse_unused_keys(metadata: Metadata, facts: Architecture) -> None:
    """Raise for values that llama.cpp does not use for this architecture, and that matter."""
    windowed = facts.windowed
    theta = metadata.get("rope.freq_base")
    width = metadata.get("rope.dimension_count")
    unused: dict[str, Sequence[Any]] = {
        f"{_YARN}{name}": values
        for name, values in {
            "beta_fast": (facts.yarn.beta_fast,),
            "beta_slow": (_SLOWEST,),
            "ext_factor": (1, -1),
            "log_multiplier": (0,),
        }.items()
        if name not in facts.yarn.reads
    }
    if not facts.alpha:
        unused[_ALPHA] = (0,)
    if windowed is None or not windowed.own_theta:
        unused["rope.freq_base_swa"] = (theta or DEFAULT_THETA,)
    if windowed is None or not windowed.own_width:
        unused["rope.dimension_count_swa"] = (width,)
    for key, harmless in unused.items():
        _refuse_other_values(metadata, facts, key, harmless)


def _refuse_other_values(
    metadata: Metadata, facts: Architecture, key: str, harmless: Sequence[Any]
) -> None:
    """Raise for a value of an unused key that is none of the harmless ones."""
    value = metadata.get(key)
    if value is not None and not any(_is_close(value, number) for number in harmless):
        raise ValueError(
            f"`{metadata.full_key(key)}` is {shown(value)}, which llama.cpp does not use for "
            f"{facts.name!r}; read the model's config.json with `from_config`"
        )


def _is_close(value: Any, number: Any) -> bool:
    """Return True if two values are the same number, as float32."""
    if not all(isinstance(entry, int | float) for entry in (value, number)):
        return False
    try:
        return math.isclose(value, number, rel_tol=_EQUAL)
    except OverflowError:
        return False
