"""From a layer type or a layer index to its rope parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError, ArgumentTypeError
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.models.model_types import ALL_LAYERS, data

Config = Mapping[str, Any]
Sections = Mapping[str, Config | None]  # by layer type; None: layers of this type are not rotated

COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Keys with one entry for each layer.
LISTS_BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")

FULL = "full_attention"
SLIDING = "sliding_attention"


class Layer(NamedTuple):
    """One layer of a model.

    layer_type: None if the config does not name one. rotated: False for layers without rotation.
    rope_theta: the base of this layer alone, None for the base of its rope parameters.
    """

    layer_type: str | None
    rotated: bool
    rope_theta: float | None


@dataclass(frozen=True)
class ModelLayers:
    """All layers of a model, parsed once; a config may have thousands of layer types.

    entries: empty if the config does not determine the number of layers. by_type: the same by layer
    type. known_types: the layer types of the config and of the model's code.
    """

    entries: Sequence[Layer]
    by_type: Mapping[str | None, Sequence[Layer]]
    known_types: Set[str | None]

    @property
    def only_type(self) -> str | None:
        """The layer type of all rotated layers; None if they differ or have none."""
        types = {entry.layer_type for entry in self.entries if entry.rotated}
        return types.pop() if len(types) == 1 else None


def layer_parameters(
    layers: ModelLayers, sections: Sections, layer_type: str | None, layer: int | None
) -> tuple[str | None, Config]:
    """Return the layer type and the rope parameters of a layer type, or of a layer.

    layer_type, layer: at most one may be given; without both, all rotated layers are selected, and
    must be alike. The returned layer type is None if the model has one section for all layers and
    none was asked for.
    """
    asked: tuple[str, Any] = ("layer_type", layer_type)
    selected = _layers_of_type(layers, layer_type, sections)
    if layer is not None:
        asked = ("layer", layer)
        selected = [_layer_at(layers.entries, layer_type, layer, sections)]
        layer_type = selected[0].layer_type
    rotated = [entry for entry in selected if entry.rotated]
    if not rotated:
        remedy = f"those of type {shown(layer_type)} are not" if layer_type else ""
        raise ArgumentError(*asked, "select a layer that is rotated", remedy)
    thetas = {entry.rope_theta for entry in rotated}
    if len(thetas) > 1:
        listed = sorted(theta for theta in thetas if theta is not None)
        rule = f"select layers of one rope_theta, not of {shown(listed)}"
        raise ArgumentError(*asked, rule, "give `layer` or `layer_type`")
    if layer_type is None and layers.only_type in sections:
        layer_type = layers.only_type
    layer_type, section = _section_of_type(sections, layer_type, layers)
    theta = thetas.pop()
    return layer_type, section if theta is None else {**section, "rope_theta": theta}


def model_layers(values: Config, sections: Sections) -> ModelLayers:
    """Return the layers of a model; values: the config with its defaults."""
    entries = _entries(values, sections)
    by_type: dict[str | None, list[Layer]] = {}
    for entry in entries:
        by_type.setdefault(entry.layer_type, []).append(entry)
    return ModelLayers(entries, by_type, {*by_type, *(values.get("layer_types") or ())})


def _entries(values: Config, sections: Sections) -> list[Layer]:
    """Return every layer of a model; empty if the config does not determine their number."""
    count = _layer_count(values)
    if count is None:
        return []
    layer_types = [*(values.get("layer_types") or ()), *[None] * count][:count]
    is_listed = bool(values.get("no_rope_layers"))  # whatever the layer types
    return [
        Layer(kind, rotated and (is_listed or _is_rotated_type(kind, sections)), theta)
        for kind, (rotated, theta) in zip(layer_types, _rotations(values, count), strict=True)
    ]


def value_of_layers(
    key: str, values: Config, layer_type: str | None, layer: int | None = None
) -> Any:
    """Return the value of a key, or the one entry of a list by layer for a layer or a layer type.

    Raises ValueError if the entries differ; those of layers that are not rotated do not count.
    """
    value = values.get(key)
    if not isinstance(value, list | tuple):
        return value
    entries = scalars.whole_numbers(key, value, 0, most=limits.HEADS, longest=limits.LAYERS)
    if layer is not None and layer < len(entries):
        return entries[layer]
    types = values.get("layer_types") or [layer_type] * len(entries)
    rotated = values.get("no_rope_layers") or [1] * len(entries)
    distinct = {
        entry
        for entry, kind, flag in zip(entries, types, rotated, strict=False)
        if layer_type in (None, kind) and flag
    }
    if len(distinct) != 1:
        rule = f"be one number for the layers of `layer_type` {shown(layer_type)}"
        raise ArgumentError(key, sorted(distinct), rule, "give `layer`")
    return distinct.pop()


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
    interval = values.get("no_rope_layer_interval")
    count = next((values[key] for key in COUNT_KEYS if key in values), None)
    if count is None and lists:
        scalars.check_length("layer_types", lists[0], limits.LAYERS)
        return len(lists[0])
    if not lists and interval is None and type(count) is not int:
        return None  # the number is not needed, so it is not refused
    return scalars.whole_number(COUNT_KEYS[0], count, 0, limits.LAYERS)


def _rotations(values: Config, count: int) -> list[tuple[bool, float | None]]:
    """Return whether each layer is rotated, and its base alone; None for that of its section.

    A list by layer decides, or the bases, where 0 is none, or an interval.
    """
    flags = _list_by_layer("no_rope_layers", values, count)
    if flags:
        return [(bool(flag), None) for flag in flags]
    key = "layer_rope_theta"
    bases = _list_by_layer(key, values, count)
    if bases:
        thetas = [scalars.real_number(key, base, zero=True) for base in bases]
        return [(theta != 0, theta) for theta in thetas]
    interval = values.get("no_rope_layer_interval")
    if interval is None:
        return [(True, None)] * count
    if type(interval) is not int or interval == 0:
        rule = "be a whole number other than 0"
        raise ArgumentError("no_rope_layer_interval", interval, rule)
    # A positive interval counts from the first layer, a negative one from the last, as layer 1.
    start = 1 if interval > 0 else 1 - count
    return [((index + start) % interval != 0, None) for index in range(count)]


def _list_by_layer(key: str, values: Config, count: int) -> list[Any]:
    """Return the list of a key with one value per layer; empty for a missing key."""
    entries = values.get(key) or []
    if not isinstance(entries, list | tuple):
        raise ArgumentTypeError(key, entries, "be a list with one value for each layer")
    scalars.check_length(key, entries, limits.LAYERS)
    if entries and len(entries) < count:
        raise ArgumentError(key, entries, f"have a value for each of {count} layers")
    return list(entries[:count])


def _is_rotated_type(layer_type: str | None, sections: Sections) -> bool:
    """Return False for a layer type whose section is null."""
    return sections.get(str(layer_type), {}) is not None


def _layers_of_type(
    layers: ModelLayers, layer_type: str | None, sections: Sections
) -> Sequence[Layer]:
    """Return the layers of a type, all layers for None.

    A layer type that no layer has, or whose layers the config does not list, stands for one layer.
    """
    of_type = layers.entries if layer_type is None else layers.by_type.get(layer_type)
    return of_type or [Layer(layer_type, _is_rotated_type(layer_type, sections), None)]


def _layer_at(
    layers: Sequence[Layer], layer_type: str | None, layer: int, sections: Sections
) -> Layer:
    """Return a layer by its index."""
    index = scalars.whole_number("layer", layer, 0)
    all_alike = ALL_LAYERS in sections and len(sections) == 1
    rule = ""
    if layer_type is not None:
        rule = f"be left out, as `layer_type` is {shown(layer_type)}"
    elif not layers:
        rule = "be left out: the config does not say how many there are (`num_hidden_layers`)"
    elif index >= len(layers):
        rule = f"be below {len(layers)}, the number of layers"
    elif layers[index].layer_type is None and not all_alike:
        rule = "be left out, as the config has no `layer_types`; give `layer_type`"
    if rule:
        raise ArgumentError("layer", index, rule)
    return layers[index]


def _section_of_type(
    sections: Sections, layer_type: str | None, layers: ModelLayers
) -> tuple[str | None, Config]:
    """Return the section of a layer type, with its name if layer types have their own sections."""
    if ALL_LAYERS in sections:
        known = layers.known_types
        if layer_type not in (None, *known):
            names = cut(", ".join(sorted(repr(name) for name in known if name is not None)))
            rule = "be left out, as this config has one rotation for all rotated layers"
            remedy = f"or give one of {names}" if names else ""
            raise ArgumentError("layer_type", layer_type, rule, remedy)
        return layer_type, sections[ALL_LAYERS] or {}
    if layer_type is None and len(sections) == 1:
        layer_type = next(iter(sections))
    section = sections.get(str(layer_type))
    if section is None:
        rotated = [name for name in sections if sections[name] is not None]
        names = cut(", ".join(map(repr, rotated)))
        rule = f"be one of {names}" if names else "have rope parameters, which no rotated type has"
        remedy = ""
        if layer_type is None and not layers.by_type.keys().isdisjoint(rotated):
            remedy = "or give `layer`"
        raise ArgumentError("layer_type", layer_type, rule, remedy)
    return layer_type, section
