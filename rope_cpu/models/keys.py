"""Keys of a raw config: types of containers, and keys of rotations that nothing reads.

The vocabulary, keys.json, has lists of keys, and patterns of names:

- `sections`: those of rope parameters, in the order in which they are looked for;
- `types`: keys that parsing descends into or looks up in a table, by the type of their values;
- `models`: keys of which every language model's config has one;
- `parts`: those of the language model in a multimodal config, in the order of trial;
- `nullable`: keys for which null is a value of its own and not the model type's default;
- `read`: keys that are read for every model type;
- `other_widths`: names that model types have for a width, each with the standard key; under another
  type's name alone it must not be passed over for a default;
- `asks`: keys and values that ask for a rotation, in types that are usually not rotated;
- `rotation`, `flags`, `asking`: keys of rotations; those that are flags, also as 0 and 1; and flags
  of which true is neutral and not false.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.models.model_types import UNKNOWN, Config, ModelFacts, data

KEYS: Config = data("keys.json")
SECTIONS: list[str] = KEYS["sections"]
SECTION = SECTIONS[-1]

_TYPES: Config = {"a string": str, "a list": list | tuple, "an object": Mapping}
_ROTATION = re.compile(KEYS["rotation"])
_ASKS = re.compile(KEYS["asking"])


def plain(config: Config) -> dict[str, Any]:
    """Return a config with numbers of Python for those of NumPy; raise TypeError for an array."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, np.ndarray):
            raise ArgumentTypeError(cut(str(key)), value, "be a JSON value, no array")
        number = value.item() if isinstance(value, np.generic) else value
        found[key] = plain(value) if isinstance(value, Mapping) else number
    return found


def check_containers(config: Config) -> None:
    """Raise for a container of the wrong type."""
    for name, keys in KEYS["types"].items():
        for key in keys:
            if not isinstance(config.get(key), _TYPES[name] | None):
                raise ArgumentTypeError(key, config[key], f"be {name}")
    layer_types = config.get("layer_types") or ()
    scalars.check_length("layer_types", layer_types, limits.LAYERS)
    if not all(isinstance(layer_type, str) for layer_type in layer_types):
        raise ArgumentTypeError("layer_types", layer_types, "hold strings")


def own_section(config: Config) -> tuple[str, Config]:
    """Return the key and the section of a config, in which rope types are under `rope_type`.

    `rope_scaling` goes first, as in transformers. Raises for two sections that differ, as one of
    them would be unread.
    """
    sections = {key: with_new_names(config[key]) for key in SECTIONS if config.get(key)}
    if len(sections) == len(SECTIONS):
        base = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
        first, second = (base | without_nulls(section) for section in sections.values())
        if first != second:
            finding = Finding("differs from `rope_parameters`")
            rule = "be left out, or equal; put its keys in `rope_parameters`, beside `rope_theta`"
            remedy = "transformers 5 reads `rope_scaling` alone, and loses the base of the other"
            raise ArgumentError("rope_scaling", finding, rule, remedy)
    return next(iter(sections.items()), (SECTIONS[-1], {}))


def with_new_names(section: Config) -> Config:
    """Return a section, and the sections in it, with the old key `type` as `rope_type`."""
    named = {
        key: with_new_names(part) if isinstance(part, Mapping) else part
        for key, part in section.items()
    }
    old = section.get("type")
    if isinstance(old, str) and section.get("rope_type") in (None, old):
        named["rope_type"] = named.pop("type")
    return named


def refuse_unread_part(raw: Config, names: Mapping[str, str]) -> None:
    """Raise if the language model seems to be in an object of a config that is not read.

    names: standard names of keys, with the model type's own. The hidden size of a language model
    may stand outside its object as well, for the sake of other parts.
    """
    width_keys = {"hidden_size", names.get("hidden_size")}
    model_keys = {*KEYS["models"], *names.values()} - width_keys
    if model_keys & raw.keys():
        return
    known_keys = model_keys if width_keys & raw.keys() else model_keys | width_keys
    read = {own.partition(".")[0] for own in names.values()}
    parts = [(path, part) for path, part in objects(raw) if path not in read]
    unread = [path for path, part in parts if known_keys & part.keys()]
    if unread:
        raise ValueError(
            f"`config` has keys of a language model under {shown(unread)} alone, where nothing "
            "reads them; pass the object of the language model, with its `model_type`"
        )


def objects(raw: Config) -> Iterator[tuple[str, Config]]:
    """Yield the objects in a config and in its objects, with their paths such as "a.b"."""
    for key, value in raw.items():
        if isinstance(value, Mapping):
            yield key, value
            for inner_key, inner in value.items():
                if isinstance(inner, Mapping):
                    yield f"{key}.{inner_key}", inner


def refuse_unread(text: Config, facts: ModelFacts) -> None:
    """Raise for a key of a rotation in a language model's config that its row does not read."""
    rule = f"be left out if the code of `model_type` {shown(text.get('model_type'))} ignores it"
    remedy = "nothing reads it here, so build a RotaryEmbedding from numbers otherwise"
    known = {*KEYS["read"], *facts.read_keys}
    copies = (facts.defaults, facts.mrope, facts.filled.get("", {}))
    refuse_unread_keys(text, known, copies, rule, remedy)
    if facts is UNKNOWN:
        return
    for name, key in KEYS["other_widths"].items():
        own = facts.names.get(key) or key
        if text.get(name) is not None and not {own, key} & text.keys():
            rule = f"be called `{own}`, as its `model_type` has it"
            raise ArgumentError(name, text[name], rule)


def check_part(whole: Config, part_key: str, ignored: Collection[str] = ()) -> None:
    """Check the object of the language model, which alone is read, and the keys beside it.

    Raises for a container of the wrong type in it, and for a key of a rotation beside it. A copy of
    a key of that object is no harm, nor one that the type of the whole ignores.
    """
    part = whole[part_key]
    copies = (part, *(section for _, section in objects(part)))
    rule = f"be in `{part_key}`, which is read without it, or be left out"
    refuse_unread_keys(whole, ignored, copies, rule)
    check_containers(part)


def refuse_unread_keys(
    config: Config, known: Collection[str], copies: Collection[Config], rule: str, remedy: str = ""
) -> None:
    """Raise for a key of a rotation that nothing reads."""
    unread = {key: config[key] for key in config if is_rotation_key(key) and key not in known}
    refuse_keys(unread, copies, rule, remedy)


def refuse_keys(config: Config, copies: Collection[Config], rule: str, remedy: str = "") -> None:
    """Raise for a key of which neither the value is neutral, nor a copy has the same one."""
    for key, value in config.items():
        is_copy = any(copy.get(key) == value for copy in copies)
        if not is_copy and not is_neutral(key, value):
            raise ArgumentError(cut(str(key)), value, rule, remedy)


@lru_cache
def is_rotation_key(key: Any) -> bool:
    """Return True for a key whose name belongs to rotations."""
    return isinstance(key, str) and _ROTATION.search(key) is not None


def is_neutral(key: str, value: Any) -> bool:
    """Return True for a value that leaves the rotation as it is without the key."""
    if isinstance(value, bool) or (value == 1 and re.search(KEYS["flags"], str(key))):
        return bool(value) is (_ASKS.fullmatch(str(key)) is not None)
    return value in (None, 1, "default", "rope", "rotary", "", {}, [], ())
