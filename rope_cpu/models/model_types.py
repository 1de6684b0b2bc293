"""The model table: defaults of each model type's config, and facts of its code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import resources
from typing import Any

# An object of a config file.
Config = Mapping[str, Any]

# The first is written by tools/make_model_table.py from the classes of transformers, the
# second by hand from the models' own code.
TABLES = ("models.json", "other_models.json")

# Model types whose names are plain words, so that a class of that name may be anybody's.
_PLAIN_WORDS = {"new", "transformer"}

# The key by which a file says how an indexer pairs, in the code of vLLM and SGLang.
PAIRING_KEY = "indexer_rope_interleave"

SHARE = "partial_rotary_factor"


@dataclass(frozen=True)
class ModelFacts:
    """One row of the model table, transcribed from the model's own code.

    A label is a layer type, or "" for all layers. A section is a dict of rope parameters.
    Differences of a single model's code stand in `quirks`.

    Parameters
    ----------
    like : str, optional
        The model type whose row this row extends.
    interleaved : bool or str, optional
        Pairing in the model's code, or the config key that decides it. None: unknown.
    names : {standard key: own key}
        This type's names of standard keys; "part.key" for a key inside a part, "" for a standard
        key that the code does not read.
    defaults : {standard key: value}
        Values of standard keys that are missing in a file.
    rope_parameters : {label: section}
        The sections for a file without one. A section None: the layers are not rotated.
    filled : {label: section}
        Defaults of missing keys in a section of the file; those of all layers apply to the sections
        of layer types, too. A base None: the file must have one, as the default is not known.
    top_level : {label: {rope parameter: key}}
        The top-level keys that fill a section, or change one of `rope_parameters`; "" for none. By
        default the base and the rotated share have their usual names, and fill those of a file.
    rope_types : {name: section}
        Rope types that the code means by another name, or that have defaults of their own.
    mrope : section
        `mrope_section`, for a section without it, and keys of the arrangement of the axes, such as
        `mrope_interleaved`: whether they take turns among the pairs.
    scaled : sequence of str
        Layer types that an old flat `rope_scaling` applies to.
    whole_head : bool
        The default rope type ignores `partial_rotary_factor`.
    rotates : str
        "end" if the last elements of a head are rotated, where the first ones usually are;
        "backwards" if the angle is minus position times frequency; "first head" if only that is
        rotated.
    by_layer_type : {layer type: {standard key: own key}}
        The keys of values that layers of a type have instead.
    unrotated : {layer type: key}
        The layer type is not rotated, unless config[key] is null; key "": always.
    refuse : {key: (values, reason)}
        Values that describe no rotation we can express; values ["*"]: any value.
    ignored : sequence of str
        Keys with names of rotations that the code does not read, or that rotate nothing.
    indexer : {fact: value}
        Of the indexer of sparse attention: `interleaved`, its pairing; `rotates` "end" if it
        rotates the last elements of a head, and not the first ones; `layer_type`, if not all
        layers with a rotation have one. Its heads have `index_head_dim` elements.
    part : (key, model type), optional
        The key of the language model's config inside this config, and its model type.
    reads : sequence of str
        The keys with names of rotations that its code reads, or refuses.
    source : str
        Where a row by hand comes from, if that is not the class of the model type.
    """

    like: str | None = None
    interleaved: bool | str | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    filled: Mapping[str, Config] = field(default_factory=dict)
    top_level: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    rope_types: Mapping[str, Config] = field(default_factory=dict)
    mrope: Config = field(default_factory=dict)
    scaled: Sequence[str] = ()
    whole_head: bool = False
    rotates: str = ""
    by_layer_type: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unrotated: Mapping[str, str] = field(default_factory=dict)
    refuse: Mapping[str, Any] = field(default_factory=dict)
    ignored: Sequence[str] = ()
    indexer: Mapping[str, Any] = field(default_factory=dict)
    part: Sequence[str] | None = None
    reads: Sequence[str] = (
        *("rope_theta", "partial_rotary_factor"),
        *("no_rope_layers", "layer_rope_theta", "no_rope_layer_interval"),
    )
    source: str = ""

    @cached_property
    def read_keys(self) -> frozenset[str]:
        """The keys of its own that its code reads, refuses or ignores."""
        named = (*self.names.values(), *self.unrotated.values(), *self.refuse)
        return frozenset((*named, *self.ignored, *self.reads))


# The row of model types that the table lacks.
UNKNOWN = ModelFacts(
    filled={"": {"rope_theta": None}}, reads=(*ModelFacts.reads, "qk_rope_head_dim")
)


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """Return the value of a key, "part.key" for one inside a part; None for a missing key."""
    part, _, key = path.rpartition(".")
    inner = config.get(part) if part else config
    return inner.get(key) if isinstance(inner, Mapping) else None


@cache
def data(name: str) -> Any:
    """Return the content of a JSON file in the folder `data`, not to be changed."""
    return json.loads(resources.files("rope_cpu.models.data").joinpath(name).read_text("utf-8"))


def reasons_by_type(name: str) -> dict[str, str]:
    """Return {model type: reason} from a JSON file that lists the model types of each reason."""
    rows = data(name).items()
    return {model_type: reason for reason, model_types in rows for model_type in model_types}


# Model types whose layers are not rotated, and why.
UNROTATED = reasons_by_type("unrotated.json")

# Model types whose rotation cannot be expressed as frequencies of pairs, and why.
REFUSED = reasons_by_type("refused.json")


@cache
def known_types() -> tuple[str, ...]:
    """Return the model types of the model table."""
    return tuple({name: None for table in TABLES for name in data(table)})


@cache
def model_facts(model_type: str) -> ModelFacts | None:
    """Return the row of a model type, None for an unknown model type."""
    return ModelFacts(**_row(model_type)) if model_type in known_types() else None


def _row(model_type: str) -> dict[str, Any]:
    """Return the row of a model type with all that it inherits.

    A row by hand extends the one that it is like, or else the written one of its type: what it says
    goes first, and its `defaults` are merged.
    """
    written, by_hand = (data(name).get(model_type, {}) for name in TABLES)
    inherited = _row(by_hand["like"]) if "like" in by_hand else written
    defaults = {**inherited.get("defaults", {}), **by_hand.get("defaults", {})}
    return {**inherited, **by_hand, "defaults": defaults}


def type_of_class(classes: Any) -> str | None:
    """Return the model type of the first of some classes, such as ["DeepseekV2ForCausalLM"].

    Types and classes are compared without separators; types of transformers go first. None for an
    unknown class.
    """
    name = next(iter(classes), None) if isinstance(classes, list | tuple) else None
    stem = re.sub("(For[A-Z]|LMHead|Model$).*", "", name).lower() if isinstance(name, str) else ""
    names = [known for table in reversed(TABLES) for known in data(table)]
    types = {re.sub("[-_.]", "", known).lower(): known for known in names}
    return types.get(stem) if types.get(stem) not in _PLAIN_WORDS else None
