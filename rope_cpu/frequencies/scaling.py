"""A scaling section, as config files and `scaling=` hold it, checked and made into a spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.array_types import Float64
from rope_cpu.frequencies import spec as specs
from rope_cpu.frequencies.rope_types import ALIASES, ROPE_TYPES, Base
from rope_cpu.frequencies.spec import RopeSpec

DEFAULT_THETA = 10000.0

# Keys of a section that every rope type may hold.
COMMON_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")

# Keys that published sections hold whatever their type, and that do not change frequencies.
INERT_KEYS = {
    "original_max_position_embeddings": "the length before scaling, where a type has no use for it",
    "max_position_embeddings": "a copy of the config's own key",
    "llama_4_scaling_beta": "scales queries by their position (Ministral 3), after the rotation",
    "finetuned": "how the model was trained",
}

# Keys that mean several axes: they describe another rotation than the one-dimensional one built here.
AXES_KEYS = ("mrope_section", "mrope_interleaved", "xdrope_section")

# Every key that a section may hold. A section by layer type has objects under other keys.
SECTION_KEYS = {
    *(*COMMON_KEYS, *INERT_KEYS, *AXES_KEYS),
    *(key for rope_type in ROPE_TYPES.values() for key in rope_type.parameters),
}


def _numbers(name: str, value: object) -> None:
    """Raise unless `value` is a list of numbers above 0."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"`{name}` is {shown(value)}; it must be a list of numbers")
    scalars.check_length(name, value, limits.HEAD_DIM // 2)
    for entry in value:
        scalars.real_number(name, entry)


_not_negative = partial(scalars.real_number, zero=True)

# The check of each key's value, in sections of any type; other keys are numbers above 0.
CHECKS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(
        ("rope_type", "type"), lambda name, value: None
    ),  # looked up in the table of types
    **dict.fromkeys(
        ("original_max_position_embeddings", "max_position_embeddings"), scalars.whole_number
    ),
    **dict.fromkeys(("short_factor", "long_factor"), _numbers),
    **dict.fromkeys(("truncate", "finetuned"), scalars.boolean),
    **dict.fromkeys(
        ("mscale", "mscale_all_dim", "alpha", "partial_rotary_factor", "llama_4_scaling_beta"),
        _not_negative,
    ),
}


@dataclass(frozen=True)
class Scaled:
    """The frequencies of one rope type as a function of the sequence length: a spec's length rule."""

    rope_type: str
    base: Base
    parameters: tuple[tuple[str, Any], ...]

    @property
    def original_length(self) -> int:
        """The length that the type starts from; types without one do not depend on the length."""
        given = dict(self.parameters)
        return int(
            given.get("original_max_position_embeddings") or given["max_position_embeddings"]
        )

    def at_length(self, length: int) -> tuple[Float64, float]:
        """Return inv_freq (pairs,) and the attention factor for `length` tokens."""
        try:
            return _cached_frequencies(
                self, ROPE_TYPES[self.rope_type].same_as(length, self.original_length)
            )
        except (OverflowError, ValueError):
            return self.computed(length)  # whose error names this length

    def computed(self, length: int | None) -> tuple[Float64, float]:
        """Return what `at_length` does; None: for the original length."""
        row, parameters = ROPE_TYPES[self.rope_type], dict(self.parameters)
        try:
            with np.errstate(all="ignore"):
                inv_freq, factor = row.compute(replace(self.base, length=length), **parameters)
        except OverflowError:
            raise self._unusable(length, "values overflow") from None
        rotated = inv_freq[: row.rotated_pairs(self.base, parameters)]
        for extreme in (rotated.min(), rotated.max()):
            if not 0 < extreme <= specs.LARGEST_FREQUENCY:
                raise self._unusable(length, f"a frequency comes to {float(extreme)}")
        return inv_freq.astype(np.float64), float(factor)

    def _unusable(self, length: int | None, what: str) -> ValueError:
        """Return the error that names the numbers given, and what they lead to."""
        numbers = {"rope_theta": self.base.rope_theta, **dict(self.parameters), "seq_len": length}
        given = ", ".join(
            f"`{key}` {shown(value)}"
            for key, value in numbers.items()
            if isinstance(value, int | float)
        )
        return ValueError(
            f"{given}: {what} in {self.base.angle_dtype}; frequencies must be finite, above 0 and at most 2^40"
        )


@lru_cache(maxsize=256)
def _cached_frequencies(rule: Scaled, length: int) -> tuple[Float64, float]:
    """Compute frequencies for a length: a server needs the same ones at every step, for each of its sequences."""
    inv_freq, factor = rule.computed(length)
    inv_freq.setflags(write=False)
    return inv_freq, factor


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
    """Return the spec of a one-dimensional rotation with scaled frequencies; the arguments are `RotaryEmbedding`'s."""
    head_dim = scalars.whole_number("head_dim", head_dim, 2, limits.HEAD_DIM)
    angle_dtype = scalars.choice("angle_dtype", angle_dtype, specs.ANGLE_DTYPES)
    section = section_of(scaling)
    rope_type = type_of(section)
    _check_values(rope_type, section)
    theta = resolve_argument(
        "rope_theta", rope_theta, section.get("rope_theta"), scalars.real_number
    )
    in_section = section.get("max_position_embeddings")
    length = resolve_argument(
        "max_position_embeddings", max_position_embeddings, in_section, scalars.whole_number
    )
    width = _rotated(head_dim, rotary_dim, rope_type, section)
    base = Base(DEFAULT_THETA if theta is None else theta, width, head_dim, angle_dtype)
    if ROPE_TYPES[rope_type].rotated_pairs(base, section) == 0:
        share = section["partial_rotary_factor"]
        raise ValueError(
            f"`partial_rotary_factor` is {share}; of head_dim {head_dim} it rotates nothing"
        )
    parameters = _parameters(rope_type, section, length)
    return spec_of(
        Scaled(rope_type, base, tuple(sorted(parameters.items()))),
        head_dim=head_dim,
        interleaved=interleaved,
    )


def spec_of(rule: Scaled, *, head_dim: int, interleaved: bool) -> RopeSpec:
    """Return the spec of a rope type's frequencies for the original length, with the rule where length plays a part."""
    inv_freq, factor = rule.computed(None)
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


def section_of(scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a scaling section without its nulls; raise unless it is a dict or None."""
    if scaling is not None and not isinstance(scaling, Mapping):
        raise TypeError(
            f"`scaling` is {shown(scaling)}; it must be None or a dict in Hugging Face form"
        )
    return without_nulls(scaling or {})


def without_nulls(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section, or a config, without its nulls: they stand for keys that are not there."""
    return {key: value for key, value in section.items() if value is not None}


def resolve_argument(
    name: str, argument: Any, in_section: Any, check: Callable[[str, Any], Any]
) -> Any:
    """Return the value of an argument that the section may give as well, checked; raise where the two differ."""
    given, other = (
        None if value is None else check(name, value) for value in (argument, in_section)
    )
    if None not in (given, other) and given != other:
        raise ValueError(
            f"`{name}` is {shown(argument)}, but `scaling` has {shown(in_section)}; give it once"
        )
    return other if given is None else given


def type_of(section: Mapping[str, Any]) -> str:
    """Return the rope type that a section names, by `rope_type` or the older `type`.

    Raises ValueError where it is unknown, or where the two names disagree.
    """
    named = {key: section[key] for key in ("rope_type", "type") if section.get(key) is not None}
    types = {
        key: ALIASES.get(name, name) if isinstance(name, str) else "" for key, name in named.items()
    }
    for key, name in types.items():
        if name not in ROPE_TYPES:
            known = ", ".join(sorted([*ROPE_TYPES, *ALIASES]))
            raise ValueError(
                f"`{key}` is {shown(named[key])}, which is not a known rope type; known are {known}"
            )
    if len(set(types.values())) > 1:
        raise ValueError(
            f"`rope_type` is {shown(named['rope_type'])}, but `type` is {shown(named['type'])}; they must agree"
        )
    return next(iter(types.values()), "default")


def _check_values(rope_type: str, section: Mapping[str, Any]) -> None:
    """Raise for keys that the type does not know, and for values that no type could use."""
    known = ROPE_TYPES[rope_type].parameters
    listed = ", ".join(dict.fromkeys([*known, *COMMON_KEYS]))
    for key, value in section.items():
        if key in AXES_KEYS:
            raise ValueError(
                f"`{key}` in the scaling section describes several axes; use RotaryEmbedding.mrope"
            )
        # Published sections without scaling may hold a factor of 1, which changes nothing.
        unscaled = (rope_type, key) == ("default", "factor") and scalars.real_number(
            key, value
        ) == 1
        if not unscaled and key not in known and key not in COMMON_KEYS and key not in INERT_KEYS:
            raise ValueError(
                f"`{cut(str(key))}` is not a key of rope type {rope_type!r}; known are {listed}"
            )
        CHECKS.get(key, scalars.real_number)(key, value)


def _parameters(rope_type: str, section: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """Return the values that the type's function takes; raise for missing keys."""
    known = ROPE_TYPES[rope_type].parameters
    # The original length, where the section has none, is that of the config.
    lengths = {"max_position_embeddings": length, "original_max_position_embeddings": length}
    given = without_nulls(lengths) | dict(section)
    values = {key: given[key] for key in known if key in given}
    for key, required in known.items():
        if required and key not in values:
            raise ValueError(f"`{key}` is missing; rope type {rope_type!r} needs it")
    return {key: _plain(value) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """Return a value of a section as Python has it."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


def _rotated(
    head_dim: int, rotary_dim: int | None, rope_type: str, section: Mapping[str, Any]
) -> int:
    """Return the width that frequencies are computed for."""
    share, whole = section.get("partial_rotary_factor", 1.0), ROPE_TYPES[rope_type].pairs_whole_head
    if not 0 < share <= 1:
        raise ValueError(f"`partial_rotary_factor` is {share}; it must be above 0 and at most 1")
    width = head_dim if whole else int(head_dim * share)
    if rotary_dim is None:
        if width == head_dim and width % 2:
            raise ValueError(f"`rotary_dim` is {width}, that of the whole head; it must be even")
        return width  # frequencies of an odd share are computed for the share itself, and one more element is rotated
    rotary_dim = scalars.whole_number("rotary_dim", rotary_dim, 2)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(
            f"`rotary_dim` is {rotary_dim}; it must be even and at most head_dim {head_dim}"
        )
    if whole and rotary_dim != width:
        raise ValueError(
            f"`rotary_dim` is {rotary_dim}, but rope type {rope_type!r} pairs the whole head"
        )
    if "partial_rotary_factor" in section and rotary_dim != width:
        raise ValueError(
            f"`rotary_dim` is {rotary_dim}, but `partial_rotary_factor` {share} rotates {width} elements"
        )
    return rotary_dim
