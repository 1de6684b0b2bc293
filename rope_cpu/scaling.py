"""The section that scales frequencies, as config files and `scaling=` hold it: checked, and made into a spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rope_cpu import spec as specs
from rope_cpu.rope_types import ALIASES, ROPE_TYPES, Base
from rope_cpu.spec import Float64, RopeSpec

DEFAULT_THETA = 10000.0

# Keys of a section that every rope type may hold.
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")

# Keys that published sections hold whatever their type, and that say nothing about frequencies.
INERT_KEYS = {
    "original_max_position_embeddings": "the length before scaling, where a type has no use for it",
    "max_position_embeddings": "a copy of the config's own key",
    "llama_4_scaling_beta": "scales queries by their position (Ministral 3), after the rotation",
    "finetuned": "says how the model was trained",
}

# Keys that mean several axes: they describe another rotation than the one-dimensional one built here.
AXES_KEYS = ("mrope_section", "mrope_interleaved", "xdrope_section")

_INTEGERS = ("original_max_position_embeddings",)
_LISTS = ("short_factor", "long_factor")
_MAY_BE_ZERO = ("mscale", "mscale_all_dim", "alpha", "partial_rotary_factor")


@dataclass(frozen=True)
class Scaled:
    """The frequencies of one rope type as a function of the sequence length: a spec's length rule."""

    rope_type: str
    base: Base
    parameters: tuple[tuple[str, Any], ...]

    def at_length(self, length: int | None) -> tuple[Float64, float]:
        """Return inv_freq (pairs,) and the attention factor for `length` tokens; None: for the original length."""
        compute = ROPE_TYPES[self.rope_type].compute
        inv_freq, factor = compute(replace(self.base, length=length), **dict(self.parameters))
        return inv_freq.astype(np.float64), float(factor)


def scaled(
    head_dim: int,
    *,
    rope_theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    angle_dtype: str = "float64",
) -> RopeSpec:
    """Return the spec of a one-dimensional rotation with scaled frequencies.

    head_dim, rotary_dim: widths in elements; rotary_dim is head_dim times the section's partial_rotary_factor where it
        is not given. rope_theta: the base; it may stand in the section instead; 10000 where it stands nowhere.
    scaling: a section in Hugging Face form, {"rope_type": "llama3", "factor": 8.0, …}.
    max_position_embeddings: tokens; dynamic needs it, and others where the section leaves a value to follow from it.
    angle_dtype: "float64", or "float32" for the frequencies and angles that transformers computes.

    Raises ValueError or TypeError for unknown types, unknown or missing keys and values that make no rotation.
    """
    head_dim = specs.whole_number("head_dim", head_dim, 2)
    section = {key: value for key, value in dict(scaling or {}).items() if value is not None}
    rope_type = type_of(section)
    if rope_type == "default" and section.get("factor") == 1:
        section.pop("factor")  # published sections say so, and it changes nothing
    theta = _said_once("rope_theta", rope_theta, section.get("rope_theta"), DEFAULT_THETA)
    base = Base(_number("rope_theta", theta), _rotated(head_dim, rotary_dim, rope_type, section), head_dim, angle_dtype)
    if angle_dtype not in specs.ANGLE_DTYPES:
        raise ValueError(f"`angle_dtype` is {angle_dtype!r}; it must be one of {', '.join(specs.ANGLE_DTYPES)}")
    if max_position_embeddings is not None:
        max_position_embeddings = specs.whole_number("max_position_embeddings", max_position_embeddings)
    parameters = _parameters(rope_type, section, max_position_embeddings)
    _check_values(rope_type, base, parameters)
    return spec_of(
        Scaled(rope_type, base, tuple(sorted(parameters.items()))), head_dim=head_dim, interleaved=interleaved
    )


def spec_of(rule: Scaled, *, head_dim: int, interleaved: bool) -> RopeSpec:
    """Return the spec of a rope type's frequencies for the original length, with the rule where length plays a part."""
    inv_freq, factor = rule.at_length(None)
    depends = ROPE_TYPES[rule.rope_type].depends_on_length(dict(rule.parameters))
    return specs.from_inv_freq(
        inv_freq,
        head_dim=head_dim,
        attention_factor=factor,
        interleaved=interleaved,
        rope_type=rule.rope_type,
        angle_dtype=rule.base.angle_dtype,
        length_rule=rule if depends else None,
    )


def type_of(section: Mapping[str, Any]) -> str:
    """Return the rope type that a section names, by `rope_type` or the older `type`.

    Raises ValueError where it is unknown, or where the two names disagree.
    """
    named = {key: section[key] for key in ("rope_type", "type") if section.get(key) is not None}
    types = {key: ALIASES.get(str(name), str(name)) for key, name in named.items()}
    for key, name in types.items():
        if name not in ROPE_TYPES:
            known = ", ".join(sorted([*ROPE_TYPES, *ALIASES]))
            raise ValueError(f"`{key}` is {named[key]!r}, which is not a known rope type; known are {known}")
    if len(set(types.values())) > 1:
        raise ValueError(f"`rope_type` is {named['rope_type']!r}, but `type` is {named['type']!r}; they must agree")
    return next(iter(types.values()), "default")


def _parameters(rope_type: str, section: Mapping[str, Any], max_position_embeddings: int | None) -> dict[str, Any]:
    """Return the values that the type's function takes; raise for unknown and for missing keys."""
    known = ROPE_TYPES[rope_type].parameters
    for key in section:
        if key in AXES_KEYS:
            raise ValueError(f"`{key}` in the scaling section describes several axes; use RotaryEmbedding.mrope")
        if key not in known and key not in COMMON_KEYS and key not in INERT_KEYS:
            raise ValueError(f"`{key}` is not a key of rope type {rope_type!r}; known are {_listed(known)}")
    values = {key: section[key] for key in known if key in section}
    if max_position_embeddings is not None:
        length = {"max_position_embeddings": max_position_embeddings}
        original = {"original_max_position_embeddings": max_position_embeddings}
        values = {**{key: value for key, value in original.items() if key in known}, **values}
        values.update({key: value for key, value in length.items() if key in known})
    for key, required in known.items():
        if required and key not in values:
            raise ValueError(f"`{key}` is missing; rope type {rope_type!r} needs it")
    return {key: tuple(value) if isinstance(value, list | tuple) else value for key, value in values.items()}


def _rotated(head_dim: int, rotary_dim: int | None, rope_type: str, section: Mapping[str, Any]) -> int:
    """Return the width that frequencies are computed for."""
    partial = _number("partial_rotary_factor", section.get("partial_rotary_factor", 1.0))
    if rope_type == "proportional":
        if rotary_dim not in (None, head_dim):
            raise ValueError(f"`rotary_dim` is {rotary_dim}, but rope type 'proportional' pairs the whole head")
        return head_dim
    if not 0 < partial <= 1:
        raise ValueError(f"`partial_rotary_factor` is {partial}; it must be above 0 and at most 1")
    width = int(head_dim * partial)
    if rotary_dim is None:
        if width == 0:
            raise ValueError(f"`partial_rotary_factor` is {partial}; of head_dim {head_dim} it rotates nothing")
        return width  # an odd width has its exponents over itself, and one more element turns with it
    rotary_dim = specs.whole_number("rotary_dim", rotary_dim, 2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"`rotary_dim` is {rotary_dim}; it must be even and at most head_dim {head_dim}")
    if "partial_rotary_factor" in section and rotary_dim != width:
        raise ValueError(
            f"`rotary_dim` is {rotary_dim}, but `partial_rotary_factor` {partial} rotates {width} elements"
        )
    return rotary_dim


def _check_values(rope_type: str, base: Base, values: Mapping[str, Any]) -> None:
    """Raise unless every number is one that the type's formula is defined for."""
    for key, value in values.items():
        if key in _LISTS:
            if not isinstance(value, tuple):
                raise TypeError(f"`{key}` is {value!r}; it must be a list of numbers")
            for entry in value:
                _number(key, entry)
        elif key == "truncate":
            specs.boolean(key, value)
        elif key in _INTEGERS:
            specs.whole_number(key, value)
        else:
            _number(key, value)
    if rope_type.startswith("dynamic") and base.rotary_dim == 2:
        raise ValueError(f"`rotary_dim` is 2; rope type {rope_type!r} needs at least 4")
    if rope_type == "yarn" and base.rope_theta <= 1:
        raise ValueError(
            f"`rope_theta` is {base.rope_theta}; rope type 'yarn' divides by its logarithm, so it must be > 1"
        )
    if rope_type == "llama3" and values["high_freq_factor"] < values["low_freq_factor"]:
        raise ValueError(f"`high_freq_factor` {values['high_freq_factor']} is below `low_freq_factor`")


def _number(name: str, value: object) -> float:
    """Return `value` as a float; raise unless it is a finite positive number (some may be 0)."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"`{name}` is {value!r}; it must be a number")
    least = "at least 0" if name in _MAY_BE_ZERO else "above 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise ValueError(f"`{name}` is {value!r}; it must be finite and {least}")
    return float(value)


def _said_once(name: str, argument: Any, in_section: Any, default: Any) -> Any:
    """Return the value that was said; raise where it was said twice and differently."""
    if argument is not None and in_section is not None and argument != in_section:
        raise ValueError(f"`{name}` is {argument!r}, but `scaling` says {in_section!r}; say it once")
    said = in_section if argument is None else argument
    return default if said is None else said


def _listed(known: Mapping[str, bool]) -> str:
    return ", ".join([*known, *COMMON_KEYS])
