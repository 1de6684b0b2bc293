"""`Layer`: one layer of a model as plain data, and the layers of a config."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rope_cpu.arguments import limits, scalars
from rope_cpu.arguments.errors import ArgumentError
from rope_cpu.arguments.texts import cut
from rope_cpu.array_types import Float64
from rope_cpu.frequencies.rope_types import MISSING
from rope_cpu.frequencies.spec import RopeSpec
from rope_cpu.models.model_types import Config, data

_FACTS = data("attention.json")


@dataclass(frozen=True)
class QueryFactors:
    """The function from positions to factors; equal for equal formulas and numbers."""

    formula: str
    numbers: tuple[float, ...]

    def __call__(self, positions: ArrayLike) -> NDArray[np.float32]:
        """Return the factors at positions."""
        _, compute = _FORMULAS[self.formula]
        factors = compute(np.asarray(positions, np.float64), *self.numbers)
        return factors.astype(np.float32)


def query_factors(formula: str | None, values: Config) -> QueryFactors | None:
    """Return the function from positions to factors of a formula of `attention.json`.

    values: the config, with the rope parameters of its layers.
    """
    if formula is None:
        return None
    keys, _ = _FORMULAS[formula]
    numbers = (scalars.real_number(key, values.get(key, MISSING)) for key in keys)
    return QueryFactors(formula, tuple(numbers))


# The function of each formula from positions, and the keys of the config that are its numbers.
_FORMULAS: Mapping[str, tuple[Sequence[str], Callable[..., Float64]]] = {
    _FACTS["query_scale"]["llama_4_scaling_beta"]: (
        ("llama_4_scaling_beta", "original_max_position_embeddings"),
        lambda positions, beta, length: 1 + beta * np.log1p(np.floor(positions / length)),
    ),
    _FACTS["query_scale"]["use_logn_attn"]: (
        ("seq_length",),
        lambda positions, length: np.maximum(1, np.log(positions + 1) / np.log(length)),
    ),
    _FACTS["types"]["llama4_text"]["unrotated_query_scale"]: (
        ("attn_scale", "floor_scale"),
        lambda positions, scale, floor: 1 + scale * np.log1p(np.floor((positions + 1) / floor)),
    ),
    _FACTS["types"]["beam"]["unrotated_query_scale"]: (
        (),
        lambda positions: (1 + (positions + 1) / 2048) ** 0.1,
    ),
}

FULL = "full_attention"
SLIDING = "sliding_attention"
# Names of layer types whose queries attend to all keys, or to those of a window.
FULL_LAYERS = (FULL, "attention")
WINDOW_LAYERS = (SLIDING, "local_attention")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of a model: its rotation, and the rest of its attention.

    `Model.layers` have their rope parameters, of which `from_config` selects some.
    `Model.attention` has the facts that all layers share; `Model.layer` completes them.

    Parameters
    ----------
    model_type : str, optional
        The model type, which decides the order of rows in fused projections.
    index : int, optional
        The index of the layer, from 0; None for layers that are alike.
    layer_type : str, optional
        The layer type; None if the config names none.
    rope_parameters : mapping, optional
        Its rope parameters in Hugging Face form, empty if the config has none for its type; None
        for a layer without rotation.
    spec : RopeSpec, optional
        The rotation that follows from them; None for a layer without one.
    num_heads, num_kv_heads : int
        Numbers of query heads, and of heads of keys and values.
    head_dim, value_dim : int
        Widths of a head vector of queries and keys, and of values.
    causal : bool
        A query attends only to keys up to its own position.
    latent : bool
        Keys and values are compressed (MLA), and only a part of each head is rotated.
    has_sinks : bool
        The softmax has a learned term besides the scores.
    qk_norm : {"before", "after", None}
        Queries and keys are normed before or after the rotation, or not at all.
    norm_offset : float
        Added to the weights of the norms of queries and keys.
    norm_weighted : bool
        The norms of queries and keys have weights.
    norm_epsilon : float, optional
        Added to the mean square in these norms; None: not known.
    norm_other : str, optional
        Difference of these norms from an RMS norm over each head vector.
    v_norm : bool
        Values are normed.
    chunk : int, optional
        Number of tokens in a chunk; tokens attend only to their own chunk.
    window : int, optional
        Number of keys that a query attends to; of the facts of all layers, in those with a window.
    window_in_all_layers : bool
        Every layer has the window; otherwise the layer type decides.
    softcap : float, optional
        The c of c·tanh(score/c).
    scale : float, optional
        Factor on the scores; None for head_dim^-½.
    query_weights : str, optional
        Formula of factors on the elements of queries, after their norm, from a tensor.
    query_scale : str, optional
        Formula of a scale of queries by their position.
    unrotated_query_scale : str, optional
        The same, in the layers without rotation.
    query_factors : callable, optional
        The function from positions to that scale.
    bidirectional_tokens : str, optional
        Tokens among which attention is bidirectional, in a causal model.
    shared_layers : int
        Number of last layers that reuse keys and values of an earlier layer.
    own_cache : str, optional
        Reason why the cache does not hold a key and a value for each key head.
    other : str, optional
        Description of what else it has, or of what is not known.
    """

    model_type: str | None = None
    index: int | None = None
    layer_type: str | None = None
    rope_parameters: Config | None = field(default_factory=dict)
    spec: RopeSpec | None = None
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    causal: bool = True
    latent: bool = False
    has_sinks: bool = False
    qk_norm: str | None = None
    norm_offset: float = 0.0
    norm_weighted: bool = True
    norm_epsilon: float | None = 1e-6
    norm_other: str | None = None
    v_norm: bool = False
    chunk: int | None = None
    window: int | None = None
    window_in_all_layers: bool = False
    softcap: float | None = None
    scale: float | None = None
    query_weights: str | None = None
    query_scale: str | None = None
    unrotated_query_scale: str | None = None
    query_factors: QueryFactors | None = None
    bidirectional_tokens: str | None = None
    shared_layers: int = 0
    own_cache: str | None = None
    other: str | None = None

    @property
    def weighted_norms(self) -> str | None:
        """The factors on queries of norms after the rotation, which no norm before it can have."""
        if self.qk_norm != "after" or not self.norm_weighted:
            return None
        factors = filter(None, ("the weights of both norms", self.query_weights))
        return " · ".join(factors) + ("" if self.scale is None else f", and scale={self.scale:g}")

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raise ValueError for the first fact that a caller does not know.

        known: the names of the fields that the caller takes, whatever their values are.
        """
        idle = [] if self.causal else ["bidirectional_tokens"]
        idle += [] if self.qk_norm else ["norm_other", "query_weights"]
        for name in (*PARTS, *vars(self)):
            value = getattr(self, name)
            if value != _DEFAULTS.get(name) and name not in (*known, *idle):
                part = PARTS.get(name, f"the fact {name} {{}}").format(value)
                end = "the export cannot write" if name in SERVED else "is not supported"
                raise ValueError(f"model type {cut(str(self.model_type))} has {part}, which {end}")

    def without_rotation(self) -> Layer:
        """Return the facts of layers without rotation, which have no chunks in Llama 4.

        Norms after the rotation are those of the layers that have one.
        """
        qk_norm = None if self.qk_norm == "after" else self.qk_norm
        query_scale = self.unrotated_query_scale or self.query_scale
        return replace(self, chunk=None, qk_norm=qk_norm, query_scale=query_scale)


_DEFAULTS: Config = vars(Layer())

# Facts that the calls of a server express, and operators of a graph, or that decide these; others
# are refused. Callers have rules of their own for the last two.
EXPRESSED = (
    *("model_type", "causal", "window", "window_in_all_layers", "softcap", "scale", "has_sinks"),
    *("qk_norm", "norm_weighted", "norm_offset", "norm_epsilon"),
    *("unrotated_query_scale", "shared_layers"),
)

# Facts that few callers know, in words, in the order in which they are named.
PARTS: Mapping[str, str] = _FACTS["parts"]
# Those that a server's calls express, but no operators of a graph.
SERVED = ("v_norm", "query_scale")

# By layer type, or under None for all layers; a section None: layers of this type are not rotated.
Sections = Mapping[str | None, Config | None]

COUNT_KEYS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")

# Keys with one entry for each layer.
LISTS_BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta")


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
    model_type = next((name for name in model_types if name in _RULES), None)
    count = None if model_type is None else _layer_count(values)
    if model_type is None or count is None:
        return {}
    kind = _RULES[model_type]
    key, default, other, chosen = _DATA[kind][model_type]
    parameter_type, selects = _KINDS[kind]
    parameter = values.get(key, default)
    if not isinstance(parameter, parameter_type) or (parameter == 0 and kind != "window from"):
        return {}
    if kind == "window from" and window(values) is None:
        return {"layer_types": [other] * count}
    chosen_layers = [selects(parameter, index, count) for index in range(count)]
    return {"layer_types": [chosen if flag else other for flag in chosen_layers]}


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
_KINDS: dict[str, tuple[Any, Callable[[Any, int, int], bool]]] = {
    "every nth": (int, lambda n, layer, count: (layer + 1) % n == 0),
    "every nth and last": (int, lambda n, layer, count: (layer + 1) % n == 0 or layer + 1 == count),
    "first of n": (int, lambda n, layer, count: layer % n == 0),
    "window from": (int, lambda first, layer, count: layer >= first),
    "listed": (list | tuple, lambda layers, layer, count: layer in layers),
    "not zero": (list | tuple, lambda codes, layer, count: any(codes[layer : layer + 1])),
}
_DATA = data("layer_types.json")
_RULES = {model_type: kind for kind in _KINDS for model_type in _DATA[kind]}


def _layer_count(values: Config) -> int | None:
    """Return the number of layers; None if the config lacks it, and all layers are alike."""
    lists = [values[key] for key in LISTS_BY_LAYER if values.get(key)]
    default = len(lists[0]) if lists else None
    count = next((values[key] for key in COUNT_KEYS if key in values), default)
    is_needed = lists or values.get("no_rope_layer_interval") is not None
    if not is_needed and not isinstance(count, int | np.integer):
        return None  # so it is not refused
    return scalars.whole_number(COUNT_KEYS[0], count, 0, limits.LAYERS)


def _own_bases(values: Config, count: int) -> list[float | None]:
    """Return the base of each layer alone: 0 without rotation, None for that of its section."""
    key = "layer_rope_theta"
    bases: list[float | None] = [None] * count
    for index, base in enumerate(_list_by_layer(key, values, count)):
        bases[index] = scalars.real_number(key, base, zero=True)
    flags = _list_by_layer("no_rope_layers", values, count) or _by_interval(values, count)
    if not flags:
        return bases
    return [base if flag else 0.0 for base, flag in zip(bases, flags, strict=True)]


def _by_interval(values: Config, count: int) -> list[int]:
    """Return whether each layer is rotated, all but every nth; empty if all are.

    They are counted from the first layer by a positive interval, else from the last, as layer 1.
    """
    interval = values.get("no_rope_layer_interval")
    if interval is None:
        return []
    if type(interval) is not int or interval == 0:
        rule = "be a whole number other than 0"
        raise ArgumentError("no_rope_layer_interval", interval, rule)
    start = 1 if interval > 0 else 1 - count
    return [(index + start) % interval for index in range(count)]


def _list_by_layer(key: str, values: Config, count: int) -> list[Any]:
    """Return the list of a key with one value per layer; empty for a missing key."""
    entries = values.get(key)
    if not entries:
        return []
    scalars.check_length(key, entries, limits.LAYERS)
    if len(entries) < count:
        raise ArgumentError(key, entries, f"have a value for each of {count} layers")
    return list(entries[:count])
