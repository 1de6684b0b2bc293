"""From a config to the rope parameters of its layer types, and of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError, Finding
from rope_cpu.frequencies.scaling import DEFAULT_THETA, SECTION_KEYS, without_nulls
from rope_cpu.models import keys
from rope_cpu.models.layer import Layer
from rope_cpu.models.model_types import SHARE, Config, ModelFacts, data, value_at

RopeParameters = dict[str, Any]

# By layer type, or under None for all layers; a section None: layers of this type are not rotated.
Sections = Mapping[str | None, Config | None]

COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Keys with one entry for each layer.
LISTS_BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")


_LENGTH = "max_position_embeddings"
_ORIGINAL = "original_max_position_embeddings"


def rope_parameters_by_type(
    text: Config, facts: ModelFacts
) -> dict[str | None, RopeParameters | None]:
    """Return the section of each layer type, or the one of all layers under None.

    Each section has its base and its rotated share, from the file or from the model type. None
    stands for layer types that are not rotated.
    """
    key, section = keys.own_section(text)
    for name in SECTION_KEYS & section.keys():  # it would look like a layer type
        if isinstance(section[name], Mapping):
            raise ArgumentTypeError(name, section[name], "be no object")
    parts: dict[str | None, Any]
    if any(isinstance(value, Mapping) for value in section.values()):
        # Null: layers of this type are not rotated.
        parts = {label: part for label, part in section.items() if isinstance(part, Mapping | None)}
    elif facts.has_layer_sections:
        return _old_sections(key, section, text, facts)
    elif section or not facts.rope_parameters:
        parts = {None: section}
    else:
        parts = {None: _default_section(text, facts)}
    return {
        label: None if part is None else _completed(label, part, text, facts)
        for label, part in parts.items()
    }


def _default_section(text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the model type's section for a file without one; the file's length and base go first.

    A length in the file applies to the section as well.
    """
    section = dict(facts.rope_parameters or {})
    for name, key in ((_LENGTH, _LENGTH), ("rope_theta", facts.theta.get(None))):
        if _value(text, key) is not None:
            section.pop(name, None)
    return section


def _old_sections(
    key: str, section: Config, text: Config, facts: ModelFacts
) -> dict[str | None, RopeParameters | None]:
    """Return the sections of a model whose layer types differ, from a file of the old form.

    The file has at most one flat section, under `key`.
    """
    defaults: Config = facts.rope_parameters or {}
    if section and not set(facts.scaled) & set(defaults):
        rule = "hold a section for each layer type, {layer type: section}"
        raise ArgumentError(key, Finding("is one section"), rule)
    sections: dict[str | None, RopeParameters | None] = {}
    for label, default in defaults.items():
        if default is None:
            sections[label] = None
            continue
        own = without_nulls(section) if label in facts.scaled else {}
        sections[label] = {**default, **own, **_old_values(label, own, text, facts)}
    return sections


def _old_values(label: str, own: Config, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return the base and the rotated share of a layer type from top-level keys of an old file.

    A value for this layer type alone takes precedence over a value for the whole model.
    """
    layer_types = text.get("layer_types") or []
    values = {}
    for name, own_keys in (("rope_theta", facts.theta), (SHARE, facts.partial)):
        key = own_keys.get(label)
        value = _value(text, key)
        if isinstance(value, list):  # by layer
            index = layer_types.index(label) if label in layer_types else len(value)
            value = value[index] if index < len(value) else None
        if value is not None and (name not in own or key != name):
            values[name] = value
    return values


def _completed(label: str | None, part: Config, text: Config, facts: ModelFacts) -> RopeParameters:
    """Return a section with its base, its rotated share and its original length.

    Each is that of the first place which has it: the section, the file, the model type. A base of
    null alone is refused, since models of transformers with it cannot be built.
    """
    own = without_nulls(part)
    defaults = facts.defaults if label is None else facts.filled.get(label, {})
    key = facts.theta.get(label)
    # Own sections of a class have their bases.
    if not facts.theta and (any(map(text.get, keys.SECTIONS)) or not facts.rope_parameters):
        key = "rope_theta"
    theta = _first(own.get("rope_theta"), _value(text, key))
    if theta is None and "rope_theta" in part:
        remedy = "transformers 5 loses it where `config.rope_scaling` is assigned: take the model's"
        raise ArgumentError("rope_theta", None, "be a number, the base of the model", remedy)
    added = {"rope_theta": _first(theta, defaults.get("rope_theta"), DEFAULT_THETA)}
    if label is None:
        added[_ORIGINAL] = _first(text.get(_ORIGINAL), own.get(_ORIGINAL))
    key = facts.partial.get(label, None if label is None else SHARE)
    if SHARE not in own and key is not None and key.endswith("_dim"):
        added["rotary_dim"] = _first(text.get(key), facts.defaults.get(key))
        key = SHARE
    if SHARE not in own and added.get("rotary_dim") is None:
        added[SHARE] = _first(_value(text, key), defaults.get(SHARE))
    return without_nulls({**own, **added})


def _value(text: Config, key: str | None) -> Any:
    """Return the value of a key, None for a missing one, or without a key."""
    return None if key is None else text.get(key)


def _first(*values: Any) -> Any:
    """Return the first value that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)


def values_by_type(values: Config, facts: ModelFacts) -> dict[str | None, Config]:
    """Return the values in which layers of a type differ: widths and numbers of heads.

    They are those of other keys, or of `per_layer_config` (Gemma 4, in transformers 5).
    """
    found: dict[str | None, Config] = {
        layer_type: without_nulls({name: value_at(values, key) for name, key in own_keys.items()})
        for layer_type, own_keys in facts.by_layer_type.items()
    }
    by_index = values.get("per_layer_config") or {}
    first = {kind: index for index, kind in reversed([*enumerate(values.get("layer_types") or ())])}
    for layer_type, index in first.items() if by_index else ():
        entry = by_index.get(str(index), by_index.get(index)) or {}
        if not isinstance(entry, Mapping):
            raise ArgumentTypeError("per_layer_config", entry, "hold an object for each layer")
        found[layer_type] = {**found.get(layer_type, {}), **entry}
    return found


def layers_of(values: Config, sections: Sections) -> tuple[Layer, ...]:
    """Return every layer of a model with its rope parameters; equal ones are one object.

    Empty if the config does not determine their number.
    """
    count = _layer_count(values)
    if count is None:
        return ()
    layer_types = [*(values.get("layer_types") or ()), *[None] * count][:count]
    pairs = [*zip(layer_types, _own_bases(values, count), strict=True)]
    is_listed = bool(values.get("no_rope_layers"))  # which decides whatever the layer types
    made = {pair: layer_of(pair[0], sections, pair[1], is_listed) for pair in set(pairs)}
    return tuple(map(made.__getitem__, pairs))


def layer_of(
    layer_type: str | None, sections: Sections, theta: float | None = None, is_listed: bool = False
) -> Layer:
    """Return a layer of a type with the rope parameters of its section.

    theta: its own base, 0 without rotation. is_listed: the type does not decide the rotation.
    """
    section = sections.get(None, sections.get(layer_type, {}))
    if theta == 0 or (sections.get(layer_type, {}) is None and not is_listed):
        section = None
    elif section and theta is not None:
        section = {**section, "rope_theta": theta}
    return Layer(layer_type=layer_type, rope_parameters=section)


def derived_layer_types(model_types: Set[str | None], values: Config) -> dict[str, list[str]]:
    """Return `layer_types` by the rule of a model's code, for a file without them.

    model_types: its model type, and the one it inherits facts from. values: its config under
    standard names. Empty if the rule, or the number of layers, is not known.
    """
    count = next((values[key] for key in COUNT_KEYS if key in values), None)
    model_type = next((name for name in model_types if name in _RULES), None)
    if model_type is None or type(count) is not int or not 0 <= count <= limits.LAYERS:
        return {}
    kind = _RULES[model_type]
    key, default, other, chosen = _DATA[kind][model_type]
    parameter_type, selects = _KINDS[kind]
    parameter = values.get(key, default)
    if not isinstance(parameter, parameter_type) or parameter == 0:
        return {}
    layer_types = [chosen if selects(parameter, index) else other for index in range(count)]
    if kind == "window from" and window(values) is None:
        layer_types = [other] * count
    if count and model_type in _DATA["last"]:
        layer_types[-1] = chosen
    return {"layer_types": layer_types}


def rule_keys(model_types: Set[str | None]) -> set[str]:
    """Return the keys from which the code of some model types derives `layer_types`."""
    return {_DATA[_RULES[name]][name][0] for name in model_types if name in _RULES}


def window(values: Config) -> int | None:
    """Return the number of keys that a query attends to, None without a window."""
    if not values.get("use_sliding_window", True):
        return None
    size = values.get("sliding_window")
    return None if size is None else scalars.whole_number("sliding_window", size, 0)


# Rules of layer types by their name in layer_types.json, whose rows have the key that a rule reads,
# its default, and the types of other layers and of the selected ones: the type of the key's value,
# and whether it selects a layer.
_KINDS: dict[str, tuple[Any, Callable[[Any, int], bool]]] = {
    "every nth": (int, lambda n, layer: (layer + 1) % n == 0),
    "first of n": (int, lambda n, layer: layer % n == 0),
    "window from": (int, lambda first, layer: layer >= first),
    "listed": (list, lambda layers, layer: layer in layers),
    "not zero": (list, lambda codes, layer: layer < len(codes) and codes[layer] != 0),
}
_DATA = data("layer_types.json")
_RULES = {model_type: kind for kind in _KINDS for model_type in _DATA[kind]}


def _layer_count(values: Config) -> int | None:
    """Return the number of layers; None if the config lacks it, and all layers are alike."""
    lists = [values[key] for key in LISTS_BY_LAYER if values.get(key)]
    count = next((values[key] for key in COUNT_KEYS if key in values), None)
    if count is None and lists:
        scalars.check_length("layer_types", lists[0], limits.LAYERS)
        return len(lists[0])
    if not lists and values.get("no_rope_layer_interval") is None and type(count) is not int:
        return None  # the number is not needed, so it is not refused
    return scalars.whole_number(COUNT_KEYS[0], count, 0, limits.LAYERS)


def _own_bases(values: Config, count: int) -> list[float | None]:
    """Return the base of each layer alone: 0 without rotation, None for that of its section.

    A list by layer decides, or a list of bases, or an interval, which counts from the first layer
    if it is positive, and else from the last, as layer 1.
    """
    flags = _list_by_layer("no_rope_layers", values, count)
    if flags:
        return [None if flag else 0.0 for flag in flags]
    key = "layer_rope_theta"
    bases = _list_by_layer(key, values, count)
    if bases:
        return [scalars.real_number(key, base, zero=True) for base in bases]
    interval = values.get("no_rope_layer_interval")
    if interval is None:
        return [None] * count
    if type(interval) is not int or interval == 0:
        rule = "be a whole number other than 0"
        raise ArgumentError("no_rope_layer_interval", interval, rule)
    start = 1 if interval > 0 else 1 - count
    return [None if (index + start) % interval else 0.0 for index in range(count)]


def _list_by_layer(key: str, values: Config, count: int) -> list[Any]:
    """Return the list of a key with one value per layer; empty for a missing key."""
    entries = values.get(key) or []
    if not isinstance(entries, list | tuple):
        raise ArgumentTypeError(key, entries, "be a list with one value for each layer")
    scalars.check_length(key, entries, limits.LAYERS)
    if entries and len(entries) < count:
        raise ArgumentError(key, entries, f"have a value for each of {count} layers")
    return list(entries[:count])
