"""Keys of a raw config: types of containers, and keys of rotations that nothing reads.

The vocabulary, keys.json, has lists of keys, and patterns of names:

- `strings`, `lists`, `objects`: keys that parsing descends into or looks up in a table;
- `models`: keys of which every language model's config has one;
- `parts`: those of the language model in a multimodal config, in the order of trial;
- `nullable`: keys for which null is a value of its own and not the model type's default;
- `read`: keys that are read for every model type; `widths_of_slices`: those of rows with a default,
  and of unknown types;
- `widths`, `other_widths`: keys whose names elsewhere must not be passed over for a default;
- `asks`: keys and values that ask for a rotation, in types that are usually not rotated;
- `rotation`, `asking`: keys of rotations, and flags of which true is neutral and not false.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any

import numpy as np

from rope_cpu.arguments import limits
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.frequencies.scaling import without_nulls
from rope_cpu.models.model_types import UNKNOWN, Config, ModelFacts, data, table_rows

KEYS: Config = data("keys.json")
SECTIONS: list[str] = KEYS["sections"]

_REQUIRED_TYPES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(KEYS["strings"], (str, "a string")),
    **dict.fromkeys(KEYS["lists"], (list | tuple, "a list")),
    **dict.fromkeys(KEYS["objects"], (Mapping, "an object")),
}
_ROTATION = re.compile(KEYS["rotation"])
_ASKS = re.compile(KEYS["asking"])
_WIDTH_KEY = "hidden_size"


def check_containers(config: Config) -> None:
    """Raise for a container of the wrong type, or a NumPy array."""
    for key, (required, name) in _REQUIRED_TYPES.items():
        value = config.get(key)
        if value is not None and not isinstance(value, required):
            raise ArgumentTypeError(key, value, f"be {name}")
    for key, value in config.items():
        inner_values = value.values() if isinstance(value, Mapping) else ()
        if any(isinstance(entry, np.ndarray) for entry in (value, *inner_values)):
            raise ArgumentTypeError(cut(str(key)), value, "be a JSON value, no array")
    layer_types = config.get("layer_types") or ()
    if len(layer_types) > limits.LAYERS:
        raise ArgumentError("layer_types", layer_types, f"have at most {limits.LAYERS} entries")
    for layer, layer_type in enumerate(layer_types):
        if not isinstance(layer_type, str):
            raise TypeError(
                f"`layer_types` holds {shown(layer_type)} for layer {layer}; it must be a string"
            )


def own_section(config: Config) -> tuple[str, Config]:
    """Return the key and the section of a config, in which rope types are under `rope_type`.

    `rope_scaling` goes first, as in transformers. Raises for two sections that differ, as one of
    them would be unread.
    """
    sections = {key: _with_new_names(config[key]) for key in SECTIONS if config.get(key)}
    if len(sections) == len(SECTIONS):
        base = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
        first, second = (base | without_nulls(section) for section in sections.values())
        if first != second:
            finding = Finding("differs from `rope_parameters`")
            rule = "be left out, or equal; put its keys in `rope_parameters`, beside `rope_theta`"
            remedy = "transformers 5 reads `rope_scaling` alone, and loses the base of the other"
            raise ArgumentError("rope_scaling", finding, rule, remedy)
    return next(iter(sections.items()), (SECTIONS[-1], {}))


def _with_new_names(section: Config) -> Config:
    """Return a section, and the sections in it, with the old key `type` as `rope_type`."""
    named = {
        key: _with_new_names(part) if isinstance(part, Mapping) else part
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
    width_keys = {_WIDTH_KEY, names.get(_WIDTH_KEY, _WIDTH_KEY)}
    model_keys = {*KEYS["models"], *names.values()} - width_keys
    if model_keys & raw.keys():
        return
    known_keys = model_keys if width_keys & raw.keys() else model_keys | width_keys
    read = {own.partition(".")[0] for own in names.values()}
    parts = [(path, part) for path, part in objects(raw) if path not in read]
    unread = {path: found for path, part in parts if (found := known_keys & part.keys())}
    others = [path for path in unread if re.search(KEYS["other_parts"], str(path))]
    path = min(unread, key=lambda path: (path in others, -len(unread[path])), default=None)
    if path is not None:
        raise ValueError(
            f"`config` has `{min(unread[path])}` under {shown(path)} alone, which is not read; "
            "pass that object, with the `model_type` of the language model"
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
    is_known = facts is not UNKNOWN
    slices = () if is_known else KEYS["widths_of_slices"]
    known = {*KEYS["read"], *slices, *facts.read_keys}
    key = _unread_key(text, known, {**facts.defaults, **facts.mrope})
    if key is not None:
        model_type = shown(text.get("model_type"))
        rule = f"be left out if the code of `model_type` {model_type} ignores it"
        if not is_known:
            rule = f"be left out, as `model_type` {model_type} is not known, nor what it means"
        remedy = "nothing reads it here, so build a RotaryEmbedding from numbers otherwise"
        raise ArgumentError(cut(key), text[key], rule, remedy)
    if is_known:
        _refuse_other_widths(text, facts)


def check_part(whole: Config, part_key: str, ignored: Collection[str] = ()) -> None:
    """Check the object of the language model, which alone is read, and the keys beside it.

    Raises for a container of the wrong type in it, and for a key of a rotation beside it. A copy of
    a key of that object is no harm, nor one that the type of the whole ignores.
    """
    part = whole[part_key]
    key = _unread_key(whole, ignored, part, *(section for _, section in objects(part)))
    if key is not None:
        rule = f"be in `{part_key}`, which is read without it, or be left out"
        raise ArgumentError(cut(key), whole[key], rule)
    check_containers(part)


def _unread_key(config: Config, known: Collection[str], *copies: Config) -> str | None:
    """Return the first key of a rotation that nothing reads, None if there is none.

    copies: where the same value makes a key superfluous.
    """
    for key, value in config.items():
        is_read = key in known or any(copy.get(key) == value for copy in copies)
        if is_rotation_key(key) and not is_read and not is_neutral(key, value):
            return key
    return None


@lru_cache
def is_rotation_key(key: Any) -> bool:
    """Return True for a key whose name belongs to rotations."""
    return isinstance(key, str) and _ROTATION.search(key) is not None


def is_neutral(key: str, value: Any) -> bool:
    """Return True for a value that leaves the rotation as it is without the key."""
    if isinstance(value, bool) or (value == 1 and re.search(KEYS["flags"], str(key))):
        return bool(value) is (_ASKS.fullmatch(str(key)) is not None)
    if isinstance(value, int | float):
        return value == 1
    return value in (None, "default", "rope", "rotary", "") or value in ({}, [], ())


@cache
def _width_names() -> dict[str, str]:
    """Return the standard key of each name that a row of the model table has for a width."""
    names = dict(KEYS["other_widths"])
    for row in table_rows().values():
        own = row.get("names", {})
        names |= {own[key]: key for key in KEYS["widths"] if own.get(key)}
    return {name: key for name, key in names.items() if name not in KEYS["widths_of_slices"]}


def _refuse_other_widths(text: Config, facts: ModelFacts) -> None:
    """Raise for a width under a name of other model types alone."""
    for name, key in _width_names().items():
        own = facts.names.get(key) or key
        if text.get(name) is not None and not {own, key} & text.keys():
            rule = f"be called `{own}`, as its `model_type` has it"
            raise ArgumentError(name, text[name], rule)
