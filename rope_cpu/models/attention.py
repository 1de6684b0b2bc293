"""The attention of a model besides its rotation, from its model type and its config.

The facts of model types, attention.json, are compared with classes in
tests/peers/test_attention_facts.py. The vocabulary of keys, attention_keys.json, has patterns of
names, and keys:

- `names`, `others`: words of attention, and of other parts whose keys have these words, too;
- `states`: keys that repeat a fact of `Layer`, which makes the same value neutral;
- `asks`: flags of which false is neutral, whatever the fact;
- `latent`: numbers of latent attention, which are read with it;
- `units`: factors, of which 1 is neutral; of other numbers 0 and -1 are;
- `read`, `inert`: keys that are read for every model type, and those that no result depends on;
- `of_types`: keys of single model types, each with the value of their class, or "*" for any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from rope_cpu.arguments import scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.models.keys import objects
from rope_cpu.models.layer import WINDOW_LAYERS, Layer, rule_keys, window
from rope_cpu.models.model_types import Config, ModelFacts, data, model_facts, value_at

_EMPTY: Config = {}

# From a property of an attention class to its model types.
FACTS: Config = data("attention.json")
KEYS: Config = data("attention_keys.json")

# Letters of a class' name that follow those of its family, and ends that only model types have.
# Other tasks than these have an attention of their own, such as the blocks of diffusion.
_OTHER_TASKS = "diffusion|bidirectional|eagle|draft"
_CLASS_KIND = f"(text|vision)?(lmhead)?(model)?(for(?!.*({_OTHER_TASKS})).+)?"
_TYPE_END = re.compile("(_text|_model|_module)+$")

_NAMES = re.compile(KEYS["names"])
_OTHERS = re.compile(KEYS["others"])
_UNITS = re.compile(KEYS["units"])
_LATENT = re.compile(KEYS["latent"])
_STATES = [(re.compile(pattern), fact) for pattern, fact in KEYS["states"].items()]


@dataclass(frozen=True)
class _Model:
    """What decides the attention of a model.

    types: its model type, the one it inherits facts from, and that of a multimodal file around it.
    values: its config under standard names.
    """

    types: Set[str | None]
    values: Config

    def has(self, fact: str) -> bool:
        """Return True if the table lists one of the model types for a fact."""
        return not self.types.isdisjoint(FACTS[fact])

    def of_type(self, fact: str, default: Any = None) -> Any:
        """Return the value that the table has for one of the model types."""
        return next((FACTS[fact][name] for name in self.types if name in FACTS[fact]), default)

    @cached_property
    def rows(self) -> list[ModelFacts]:
        """The rows of the model types that are known."""
        return [*filter(None, (model_facts(str(name)) for name in self.types))]

    def number(self, key: str) -> float | None:
        """Return the number of a key, None for a missing key."""
        value = self.values.get(key)
        return None if value is None else scalars.real_number(key, value, zero=True)

    def integer(self, key: str) -> int | None:
        """Return the whole number of a key, None for a missing key."""
        value = self.values.get(key)
        return None if value is None else scalars.whole_number(key, value, 0)


def attention_of(
    model_types: Set[str | None],
    values: Config,
    source: Config = _EMPTY,
    beside: Config = _EMPTY,
    model_type: str | None = None,
) -> Layer:
    """Return the facts that the layers of a language model share.

    model_types: its model type, and the one it inherits facts from. values: its config under
    standard names. source: the whole file, perhaps of a multimodal model, with a type of its own.
    beside: the keys of that file which are not those of the language model. model_type: that of
    the layers.
    """
    # A file with these heads is the language model's own.
    whole = set() if "num_attention_heads" in source else {source.get("model_type")}
    model = _Model({*model_types, *whole}, values)
    tokens = _bidirectional_tokens(model)
    latent_keys = {"qk_rope_head_dim", "kv_lora_rank"}
    facts: dict[str, Any] = {
        "model_type": model_type,
        "causal": tokens is not None or _is_causal(model),
        "latent": bool(values.get("use_mla", True)) and not latent_keys.isdisjoint(values),
        "has_sinks": model.has("sinks"),
        "qk_norm": _qk_norm(model),
        "norm_offset": float(model.has("qk_norm_offset")),
        "norm_weighted": not model.has("qk_norm_unweighted"),
        "norm_epsilon": _norm_epsilon(model),
        "norm_other": model.of_type("qk_norm_other"),
        "v_norm": model.has("v_norm"),
        "chunk": model.integer("attention_chunk_size"),
        "window": window(values),
        "window_in_all_layers": model.has("window_in_all_layers"),
        "softcap": model.number("attn_logit_softcapping"),
        "scale": _scale(model),
        "query_weights": model.of_type("query_weights"),
        "query_scale": _query_scale(model),
        "unrotated_query_scale": _unrotated_query_scale(model),
        "bidirectional_tokens": tokens,
        "shared_layers": model.integer("num_kv_shared_layers") or 0,
        "own_cache": model.of_type("own_cache"),
    }
    other = _other_class(values, source) or _other(model) or _unread(model, beside, facts)
    return Layer(**facts, other=other)


def _unread(model: _Model, beside: Config, facts: Config) -> str | None:
    """Return a text on a key of attention, in the config or beside it, that nothing reads.

    None for an unknown model type, of which every part is to be stated.
    """
    if not model.rows:
        return None
    is_bidirectional = not facts["causal"] or facts["bidirectional_tokens"] is not None
    states = {**facts, "bidirectional": is_bidirectional}
    read = _read_keys(model, facts)
    if not _has_windows(model):
        states["window"] = None
        read -= {"sliding_window"}
    others = {key: value for key, value in beside.items() if model.values.get(key) != value}
    text = _unread_key(model.values, model.types, states, read)
    return text or _unread_key(others, model.types, states)


def _read_keys(model: _Model, facts: Config) -> set[str]:
    """Return the keys that facts, rows and layer types of some model types come from."""
    keys: set[Any] = {*KEYS["read"], *FACTS["other_keys"], *rule_keys(model.types)}
    for row in model.rows:
        keys |= row.read_keys
    if facts["unrotated_query_scale"] is None:
        scales = FACTS["query_scale"].items()
        keys |= {key for key, formula in scales if formula == facts["query_scale"]}
    if facts["scale"] == _scale_of_scalar(model):
        keys.add("query_pre_attn_scalar")
    return {part for key in keys for part in key.split(".")}


def _has_windows(model: _Model) -> bool:
    """Return True if a model's code reads a window, or the config may have layers with one."""
    is_own = any("sliding_window" in {*row.defaults, *row.names} for row in model.rows)
    types = model.values.get("layer_types", WINDOW_LAYERS)
    return is_own or model.has("window_in_all_layers") or not {*types}.isdisjoint(WINDOW_LAYERS)


def _unread_key(
    values: Config, model_types: Set[str | None], facts: Config, read: Set[str] = frozenset()
) -> str | None:
    """Return a text on the first key of attention that nothing reads, None if there is none.

    facts: those of `Layer` by name, and `bidirectional`. read: keys that facts come from.
    """
    known = {*KEYS["inert"], *read}
    for key, value in values.items():
        is_number = key in known and not isinstance(value, Mapping)
        if is_number or not _is_attention_key(key) or _is_neutral(key, value, model_types, facts):
            continue
        remedy = "leave it out if the model's code ignores it"
        text: str | None = f"nothing reads its `{cut(key)}`, {shown(value)} ({remedy})"
        if key in known:
            text = _unread_key(value, model_types, facts, read)
        if text is not None:
            return text
    return None


@lru_cache
def _is_attention_key(key: Any) -> bool:
    """Return True for a key whose name belongs to attention."""
    return isinstance(key, str) and bool(_NAMES.search(key)) and not _OTHERS.search(key)


def _is_neutral(key: str, value: Any, model_types: Set[str | None], facts: Config) -> bool:
    """Return True for a value that leaves the attention as it is without the key."""
    of_types = KEYS["of_types"].get(key, {})
    if any(of_types[name] in ("*", value) for name in model_types if name in of_types):
        return True
    if isinstance(value, np.generic):
        value = value.item()
    if value in (None, "", "none", "default") or value in ([], {}, ()):
        return True
    if value is False and key in KEYS["asks"]:
        return True
    if facts["latent"] and _LATENT.search(key):
        return True
    fact = next((facts[name] for pattern, name in _STATES if pattern.search(key)), None)
    if not isinstance(value, int | float):
        return bool(value == "causal" and facts["causal"])
    if isinstance(value, bool) or (isinstance(fact, bool) and value in (0, 1)):
        return bool(value) is bool(fact)
    return value in (fact, -1, 1 if _UNITS.search(key) else 0)


def _scale(model: _Model) -> float | None:
    """Return the factor on the scores, None for head_dim^-½."""
    scale = model.number("attention_multiplier")
    if scale is None:
        scale = _scale_of_scalar(model)
    from_table: float | None = model.of_type("scale", scale)
    return from_table


def _scale_of_scalar(model: _Model) -> float | None:
    """Return the factor on the scores that the scalar of a config stands for."""
    query_scalar = model.number("query_pre_attn_scalar")
    return query_scalar**-0.5 if query_scalar else None


def _query_scale(model: _Model) -> str | None:
    """Return the formula of a scale of queries by their position, None without one."""
    parts = (model.values, *(part for _, part in objects(model.values)))
    own_key = model.of_type("query_scale_key")
    for key, formula in FACTS["query_scale"].items():
        found = [part[key] for part in parts if key in part]
        if any(found) or (not found and key == own_key):
            return str(formula)
    return None


def _unrotated_query_scale(model: _Model) -> str | None:
    """Return the same for layers without rotation; for some types a key can switch it off."""
    key, formula = model.of_type("unrotated_query_scale", ("", None))
    return formula if model.values.get(key, True) else None


def _bidirectional_tokens(model: _Model) -> str | None:
    """Return the tokens among which attention is bidirectional, None in other models."""
    key, value, default = model.of_type("bidirectional_tokens_if", ("", None, None))
    tokens: str | None = model.of_type("bidirectional_tokens")
    return tokens if model.values.get(key, default) == value else None


def _other_class(values: Config, source: Config) -> str | None:
    """Return a text on a class, in the config or in the file, that its model type does not have."""
    key = "architectures"
    configs = (source,) if values.get(key) == source.get(key) else (source, values)
    for config in configs:
        model_type = str(config.get("model_type"))
        for key, name in _classes(config):
            if not _has_class(model_type, str(name)):
                return f"`{key}` has {shown(name)}, no class of model type {cut(model_type)}"
    return None


def _classes(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the classes that a config names, each with the key that names it."""
    names = config.get("architectures") or ()
    for name in names if isinstance(names, list | tuple) else (names,):
        yield "architectures", name
    own_code = config.get("auto_map")
    for auto_class, path in own_code.items() if isinstance(own_code, Mapping) else ():
        if str(auto_class).startswith("AutoModel") and isinstance(path, str):
            yield "auto_map", path


@lru_cache
def _has_class(model_type: str, name: str) -> bool:
    """Return False for a class of another family than a known model type.

    Names of its classes begin with that of the type, or of the one it inherits facts from, unless
    the table has others.
    """
    facts = model_facts(model_type)
    if facts is None:
        return True
    types = [name for name in (model_type, facts.like) if name is not None]
    families = [_TYPE_END.sub("", name) for name in types]
    families += [family for name in types for family in FACTS["families"].get(name, ())]
    pattern = f"({'|'.join(map(_letters, families))}){_CLASS_KIND}"
    module, _, class_name = name.rpartition(".")  # without a module in `architectures`
    is_other_task = re.search(_OTHER_TASKS, _letters(module))
    return not is_other_task and re.fullmatch(pattern, _letters(class_name)) is not None


def _letters(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub("[^a-z0-9]", "", name.lower())


def _other(model: _Model) -> str | None:
    """Return the further differences of a model type, or those that a key of the config makes."""
    keys = FACTS["other_keys"] | model.of_type("other_keys_of_types", {})
    by_key = (text for key, text in keys.items() if value_at(model.values, key))
    other: str | None = model.of_type("other", next(by_key, None))
    return other


def _is_causal(model: _Model) -> bool:
    """Return True for causal attention; for some model types a key of the config decides."""
    # Gemma 4's value "vision" concerns tokens of images only.
    is_bidirectional = model.values.get("use_bidirectional_attention") in (True, "all")
    is_encoder = model.has("causal_if_decoder") and not model.values.get("is_decoder")
    is_switched_off = is_bidirectional or model.values.get("is_causal") is False
    return not (is_switched_off or is_encoder or model.has("bidirectional"))


def _qk_norm(model: _Model) -> str | None:
    """Return "before" or "after" the rotation if queries and keys are normed, else None.

    For some model types a key of the config decides.
    """
    table = FACTS["qk_norm_key"]
    keys = (table[name] for name in model.types if name in table)
    if not all(model.values.get(key, default) for key, default in keys):
        return None
    return next((one for one in ("before", "after") if model.has(f"qk_norm_{one}_rotation")), None)


def _norm_epsilon(model: _Model) -> float | None:
    """Return the epsilon of RMS norms, None if neither the file nor its model type has one."""
    for key in FACTS["norm_epsilon_keys"]:
        if model.values.get(key) is not None:
            return scalars.real_number(key, model.values[key], zero=True)
    tables = FACTS["norm_epsilon"].items()
    known = (float(epsilon) for epsilon, names in tables if not model.types.isdisjoint(names))
    return next(known, None)
