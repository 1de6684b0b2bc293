"""From a scaling section, as config files and `scaling=` hold it, to a checked RopeSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.frequencies.rope_types import (
    ALIASES,
    MISSING,
    ROPE_TYPES,
    RopeSettings,
    ScalingRule,
)
from rope_cpu.frequencies.spec import ANGLE_DTYPES, RopeSpec, from_inv_freq

DEFAULT_THETA = 10000.0

# Keys allowed in a section of any rope type.
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")

# Keys that published sections contain whatever their type, without effect on frequencies.
INERT_KEYS = {
    "original_max_position_embeddings": "the length before scaling, for types that do not use it",
    "max_position_embeddings": "a copy of the config's own key",
    "llama_4_scaling_beta": "scales queries by their position (Ministral 3), after the rotation",
    "finetuned": "how the model was trained",
}

# Keys of rotations with several axes: here only rotations with one axis are built.
AXES_KEYS = (
    "mrope_section",
    "mrope_interleaved",
    "mrope_interleaved_glm",
    "video_rope",
    "xdrope_section",
)

# All keys of a section. A section by layer type has objects under other keys.
SECTION_KEYS = {
    *COMMON_KEYS,
    *INERT_KEYS,
    *AXES_KEYS,
    *(key for rope_type in ROPE_TYPES.values() for key in rope_type.parameters),
    *(key for rope_type in ROPE_TYPES.values() for key in rope_type.inert_values),
}

Check = Callable[[str, Any], object]


def _numbers(name: str, value: object) -> tuple[float, ...]:
    """Return `value` as a tuple; raise unless it is a list of numbers above 0."""
    if not isinstance(value, list | tuple):
        raise ArgumentTypeError(name, value, "be a list of numbers")
    scalars.check_length(name, value, limits.HEAD_DIM // 2)
    return tuple(scalars.real_number(name, entry) for entry in value)


_not_negative: Check = partial(scalars.real_number, zero=True)

# The check of each key's value, in sections of any type. Other keys are numbers above 0.
CHECKS: dict[str, Check] = {
    "original_max_position_embeddings": scalars.whole_number,
    "max_position_embeddings": scalars.whole_number,
    "short_factor": _numbers,
    "long_factor": _numbers,
    "truncate": scalars.boolean,
    "finetuned": scalars.boolean,
    "mscale": _not_negative,
    "mscale_all_dim": _not_negative,
    "mixed_b": _not_negative,
    "alpha": _not_negative,
    "partial_rotary_factor": _not_negative,
    "llama_4_scaling_beta": _not_negative,
}


def scaled(
    head_dim: int,
    rope_theta: float | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
    max_position_embeddings: int | None = None,
    angle_dtype: str = "float64",
) -> RopeSpec:
    """Describe the rotation of `RotaryEmbedding`, with a rule if it depends on the length."""
    head_dim = scalars.whole_number("head_dim", head_dim, 2, limits.HEAD_DIM)
    angle_dtype = scalars.choice("angle_dtype", angle_dtype, ANGLE_DTYPES)
    given = scaling_section(scaling)
    rope_type = rope_type_name(given)
    section = _checked_section(rope_type, given)
    theta = resolve_argument(
        "rope_theta", rope_theta, section.get("rope_theta"), scalars.real_number
    )
    length = resolve_argument(
        "max_position_embeddings",
        max_position_embeddings,
        section.get("max_position_embeddings"),
        scalars.whole_number,
    )
    width = _frequency_width(head_dim, rotary_dim, rope_type, section)
    settings = RopeSettings(theta or DEFAULT_THETA, width, head_dim, angle_dtype)
    if ROPE_TYPES[rope_type].rotated_pairs(settings, section) == 0:
        least = f"rotate at least one pair of head_dim {head_dim}"
        raise ArgumentError("partial_rotary_factor", section["partial_rotary_factor"], least)
    parameters = _type_parameters(rope_type, section, length)
    rule = ScalingRule(rope_type, settings, tuple(sorted(parameters.items())))
    inv_freq, factor = rule.frequencies(None)
    return from_inv_freq(
        inv_freq,
        head_dim=head_dim,
        attention_factor=factor,
        interleaved=interleaved,
        rope_type=rope_type,
        angle_dtype=angle_dtype,
        length_rule=rule if ROPE_TYPES[rope_type].depends_on_length(parameters) else None,
    )


def scaling_section(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the `scaling` argument as a dict without nulls; raise if it is not a dict."""
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ArgumentTypeError("scaling", scaling, "be None or a dict in Hugging Face form")
    return without_nulls(scaling or {})


def without_nulls(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section, or a config, without its nulls, which stand for missing keys."""
    return {key: value for key, value in section.items() if value is not None}


def resolve_argument(
    name: str, argument: Any, in_section: Any, check: Callable[[str, Any], Any]
) -> Any:
    """Return the checked value of an argument or of its key in the section; raise if they differ.

    None if neither has a value.
    """
    from_argument = None if argument is None else check(name, argument)
    from_section = None if in_section is None else check(name, in_section)
    if from_argument is None:
        return from_section
    if from_section is not None and from_section != from_argument:
        rule = f"be that of `scaling`, {shown(in_section)}"
        raise ArgumentError(name, argument, rule, "give it once")
    return from_argument


def rope_type_name(section: Mapping[str, Any]) -> str:
    """Return the rope type of a section, from `rope_type` or the older key `type`.

    Raises ValueError if the type is unknown, or if the two keys disagree.
    """
    names = {key: section[key] for key in ("rope_type", "type") if section.get(key) is not None}
    for key, name in names.items():
        if not isinstance(name, str) or ALIASES.get(name, name) not in ROPE_TYPES:
            known = sorted([*ROPE_TYPES, *ALIASES])
            raise ArgumentError(key, name, f"be a rope type, one of {', '.join(known)}")
    rope_types = {ALIASES.get(name, name) for name in names.values()}
    if len(rope_types) > 1:
        rule = f"agree with `type`, {shown(names['type'])}"
        raise ArgumentError("rope_type", names["rope_type"], rule)
    return next(iter(rope_types), "default")


def _checked_section(rope_type: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section as hashable Python objects.

    Raise for keys that the rope type does not know, and for values that are never allowed.
    """
    parameters = ROPE_TYPES[rope_type].parameters
    inert_values = ROPE_TYPES[rope_type].inert_values
    checked = {}
    for key, value in section.items():
        if key in AXES_KEYS:
            finding = Finding("in the scaling section describes several axes")
            remedy = "use RotaryEmbedding.mrope, or from_inv_freq with frequencies (axes, pairs)"
            raise ArgumentError(key, finding, "be left out", remedy)
        known = key in parameters or key in COMMON_KEYS or key in INERT_KEYS
        if key in inert_values:  # with another value implementations differ
            known = scalars.real_number(key, value) == inert_values[key]
        if not known:
            finding = Finding(
                f"is not a key of rope type {rope_type!r} with the value {shown(value)}"
            )
            rule = f"be one of {', '.join(dict.fromkeys([*parameters, *COMMON_KEYS]))}"
            named = "rope_type" in section or "type" in section
            remedy = "" if named else "add `rope_type`, such as 'linear' or 'yarn'"
            raise ArgumentError(cut(str(key)), finding, rule, remedy)
        if key not in ("rope_type", "type"):  # which `rope_type_name` has looked up
            check = CHECKS.get(key, scalars.real_number)
            checked[key] = check(key, value)
    return checked


def _type_parameters(
    rope_type: str, section: Mapping[str, Any], length: int | None
) -> dict[str, Any]:
    """Return the keyword arguments of the type's function; raise for missing keys.

    length: that of the config, which is also the original length unless the section has one.
    """
    lengths = {"max_position_embeddings": length, "original_max_position_embeddings": length}
    available = {**without_nulls(lengths), **section}
    parameters = {}
    for key, is_required in ROPE_TYPES[rope_type].parameters.items():
        if key in available:
            parameters[key] = available[key]
        elif is_required:
            rule = f"be a key of `scaling` for rope type {rope_type!r}"
            raise ArgumentError(key, MISSING, rule)
    return parameters


def _frequency_width(
    head_dim: int, rotary_dim: int | None, rope_type: str, section: Mapping[str, Any]
) -> int:
    """Return the width in elements for which frequencies are computed."""
    share = section.get("partial_rotary_factor", 1.0)
    whole_head = ROPE_TYPES[rope_type].pairs_whole_head
    if not 0 < share <= 1:
        raise ArgumentError("partial_rotary_factor", share, "be above 0 and at most 1")
    width = head_dim if whole_head else int(head_dim * share)
    if rotary_dim is None:
        if width == head_dim and width % 2:
            rule = "be even, as the whole head is rotated"
            remedy = "pass an even `rotary_dim` to rotate a part of it"
            raise ArgumentError("head_dim", width, rule, remedy)
        # An odd share has the frequencies of its own width, and one more element is rotated.
        return width
    rotary_dim = scalars.whole_number("rotary_dim", rotary_dim, 2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        rule = f"be even and at most head_dim {head_dim}"
        raise ArgumentError("rotary_dim", rotary_dim, rule)
    if (whole_head or "partial_rotary_factor" in section) and rotary_dim != width:
        rule = f"be {width}, as `partial_rotary_factor` is {share} for rope type {rope_type!r}"
        raise ArgumentError("rotary_dim", rotary_dim, rule)
    return rotary_dim
