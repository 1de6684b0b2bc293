"""From a layer type or a layer to its rope parameters: layers may differ in type and base, or not be rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.texts import shown
from rope_cpu.configs.model_types import ModelFacts

Config = Mapping[str, Any]

_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")


class Layer(NamedTuple):
    """One layer. type: None where the config names none. base: 0 where it is not rotated, None: that of its section."""

    type: str | None
    base: float | None


def pick(
    found: Mapping[str, Config | None],
    values: Config,
    facts: ModelFacts,
    layer_type: str | None,
    layer: int | None,
) -> tuple[str | None, Config]:
    """Return the rope parameters of a layer type or a layer, with the type where there are several.

    found: the sections by layer type. values: the config with its defaults. layer_type, layer: at most one is given;
    neither: all layers that are rotated.
    """
    every = each(values, facts, found)
    layer = None if layer is None else scalars.whole_number("layer", layer, 0)
    if layer is None:
        unlisted = Layer(layer_type, 0 if found.get(str(layer_type), {}) is None else None)
        chosen = [one for one in every if layer_type in (None, one.type)] or [unlisted]
        question = f"`layer_type` is {shown(layer_type)}"
        refused = f"{question}; {'no layer is' if layer_type is None else 'layers of this type are not'} rotated"
    else:
        chosen = [_at(every, layer_type, layer, "" in found and len(found) == 1)]
        layer_type, question = chosen[0].type, f"`layer` is {layer}"
        refused = f"{question}; this layer is not rotated"
    bases = {one.base for one in chosen if one.base != 0}
    if not bases:
        raise ValueError(refused)
    if len(bases) > 1:
        raise ValueError(
            f"{question}, but such layers have bases {sorted(base or 0 for base in bases)}; give `layer`"
        )
    layer_type, section = _section(
        found, layer_type, {*(one.type for one in every), *(values.get("layer_types") or ())}
    )
    return layer_type, section if bases == {None} else {**section, "rope_theta": bases.pop()}


def each(values: Config, facts: ModelFacts, found: Mapping[str, Config | None]) -> list[Layer]:
    """Return every layer of a model; none where the config has no number of layers."""
    lists = [
        values[key]
        for key in ("layer_types", "no_rope_layers", "layer_rope_theta")
        if values.get(key)
    ]
    interval = values.get("no_rope_layer_interval")
    count_key = next((key for key in _COUNTS if key in values), None)
    if not lists and interval is None and (count_key is None or type(values[count_key]) is not int):
        return []  # all layers are alike, and their number is not known
    if count_key is None and not lists:
        raise ValueError(
            f"`{_COUNTS[0]}` is missing; `no_rope_layer_interval` {interval} says which of them to rotate"
        )
    if count_key is None:
        scalars.check_length("layer_types", lists[0], limits.LAYERS)
        count = len(lists[0])
    else:
        count = scalars.whole_number(count_key, values[count_key], 0, limits.LAYERS)
    types = [*(values.get("layer_types") or ()), *[None] * count][:count]
    bases = _bases(values, count)
    forced = _dense(values, count) if values.get(str(facts.rotated_dense)) == 1 else [False] * count
    return [
        Layer(kind, base if found.get(kind, {}) is not None or exempt else 0)
        for kind, base, exempt in zip(types, bases, forced, strict=True)
    ]


def _bases(values: Config, count: int) -> Sequence[float | None]:
    """Return the base of each layer, as `Layer` has it, from lists with a value for each layer or from an interval."""
    if rotated := _listed("no_rope_layers", values, count):
        return [None if one else 0 for one in rotated]
    if bases := _listed("layer_rope_theta", values, count):
        return [scalars.real_number("layer_rope_theta", base, zero=True) for base in bases]
    interval = values.get("no_rope_layer_interval")
    if interval is None:
        return [None] * count
    if type(interval) is not int or interval == 0:
        raise ValueError(
            f"`no_rope_layer_interval` is {shown(interval)}; it must be a whole number other than 0"
        )
    # Counted from the last layer, which is one, where the interval is negative.
    start = 1 if interval > 0 else 1 - count
    return [None if (index + start) % interval else 0 for index in range(count)]


def _dense(values: Config, count: int) -> list[bool]:
    """Return which layers are dense in a model with experts."""
    if kinds := _listed("mlp_layer_types", values, count):
        return [kind == "dense" for kind in kinds]
    first = scalars.whole_number("first_k_dense_replace", values.get("first_k_dense_replace", 0), 0)
    return [index < first for index in range(count)]


def _listed(key: str, values: Config, count: int) -> list[Any]:
    """Return the list under a key, one value for each layer; empty where there is none."""
    found = values.get(key) or []
    if not isinstance(found, list | tuple):
        raise TypeError(
            f"`{key}` is {shown(found)}; it must be a list with one value for each layer"
        )
    if found and len(found) < count:
        raise ValueError(f"`{key}` has {len(found)} values, but there are {count} layers")
    return list(found[:count])


def listed_for_type(key: str, values: Config, layer_type: str | None) -> Any:
    """Return the one value that a list by layer holds for the layers of a type; None where there is no list."""
    if values.get(key) in (None, [], ()):
        return None
    entries = scalars.whole_numbers(key, values[key], most=limits.HEADS, longest=limits.LAYERS)
    types = values.get("layer_types") or [layer_type] * len(entries)
    found = {one for kind, one in zip(types, entries, strict=False) if layer_type in (None, kind)}
    if len(found) != 1:
        rule = "the layers that are asked for must have the same"
        raise ValueError(
            f"`{key}` holds {shown(sorted(found))} for `layer_type` {shown(layer_type)}; {rule}"
        )
    return found.pop()


def _at(every: Sequence[Layer], layer_type: str | None, layer: int, alike: bool) -> Layer:
    """Return a layer by its index. alike: its type plays no part."""
    if layer_type is not None:
        raise ValueError(
            f"`layer` is {layer} and `layer_type` {shown(layer_type)}; give one of them"
        )
    if not every:
        raise ValueError(
            f"`layer` is {layer}, but the config does not say how many there are (`num_hidden_layers`)"
        )
    if layer >= len(every):
        raise ValueError(
            f"`layer` is {layer}, but there are {len(every)} layers, the first of which is 0"
        )
    if every[layer].type is None and not alike:
        raise ValueError(
            f"`layer` is {layer}, but the config has no `layer_types`; give `layer_type`"
        )
    return every[layer]


def _section(
    found: Mapping[str, Config | None], layer_type: str | None, declared: set[str | None]
) -> tuple[str | None, Config]:
    """Return the section of a layer type, with its name where there are several."""
    if "" in found:
        if layer_type not in declared | {None}:
            raise ValueError(
                f"`layer_type` is {shown(layer_type)}, but this config has one rotation for all rotated layers"
            )
        return layer_type, found[""] or {}
    if layer_type is None and len(found) == 1:
        layer_type = next(iter(found))
    if layer_type is None or layer_type not in found:
        raise ValueError(
            f"`layer_type` is {shown(layer_type)}; it must be one of {', '.join(map(repr, found))}"
        )
    return layer_type, found[layer_type] or {}
