"""The attention of a model besides its rotation, from its model type and its config.

attention.json has under `types` the facts of model types, fields of `Layer`, which are compared
with classes in tests/peers/test_attention_facts.py. Besides fields, a row may have

- `if`: a fact's condition: a key, its default, and the value with which the fact holds;
- `other_keys`: keys that make a difference, as those of all types under the same name do;
- `query_scale_key`: the key under `query_scale` that is on by default.

`families` are beginnings of class names that differ from those of their model types, `wholes` are
multimodal types whose language models are as usual, `parts` has words for facts, and `tensors`,
`fused_rows` and `interleaved_weights` belong to checkpoints.

The vocabulary of keys, attention_keys.json, has patterns of names, and keys:

- `names`, `others`: words of attention, and of other parts whose keys have these words, too;
- `inert`: keys that no result depends on;
- `states`: keys that repeat a fact of `Layer`, which makes the same value neutral;
- `latent`: numbers of latent attention, which are read with it;
- `units`: factors, of which 1 is neutral; of other numbers 0 and -1 are;
- `read`: keys that are read for every model type;
- `neutral`: values of keys that are neutral in some model types, "*" for any value or type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

from rope_cpu.arguments import scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.models.keys import objects
from rope_cpu.models.layer import WINDOW_LAYERS, Layer, rule_keys, window
from rope_cpu.models.model_types import UNKNOWN, Config, ModelFacts, data, model_facts, value_at

_EMPTY: Config = {}

FACTS: Config = data("attention.json")
KEYS: Config = data("attention_keys.json")

# Letters of a class' name that follow those of its family, and ends that only model types have.
# Other tasks than these have an attention of their own, such as the blocks of diffusion.
_OTHER_TASKS = "diffusion|bidirectional|eagle|draft"
_CLASS_KIND = f"(text|vision)?(lmhead)?(model)?(for(?!.*({_OTHER_TASKS})).+)?"
_TYPE_END = re.compile("(_text|_model|_module)+$")


def attention_of(
    model_type: str | None, values: Config, source: Config = _EMPTY, beside: Config = _EMPTY
) -> Layer:
    """Return the facts that the layers of a language model share.

    model_type: its own. values: its config under standard names. source: the whole file. beside:
    the same, if the language model is a part of it with a type of its own.
    """
    # A whole file with these heads is the language model's own, whatever type it names.
    is_own = not beside and "num_attention_heads" in source
    like = (model_facts(str(model_type)) or UNKNOWN).like
    types = (like, model_type, None if is_own else source.get("model_type"))
    latent_keys = {"qk_rope_head_dim", "kv_lora_rank"}
    row = _row(types, values)
    other_keys = FACTS["other_keys"] | row.pop("other_keys", {})
    by_key = (text for key, text in other_keys.items() if value_at(values, key))
    is_bidirectional = values.get("use_bidirectional_attention") in (True, "all")
    is_causal = row.get("causal", True) and values.get("is_causal") is not False
    epsilon = _number(values, *FACTS["norm_epsilon_keys"])
    facts = {
        "latent": bool(values.get("use_mla", True)) and not latent_keys.isdisjoint(values),
        "chunk": _integer(values, "attention_chunk_size"),
        "window": window(values),
        "softcap": _number(values, "attn_logit_softcapping"),
        "scale": _scale(values),
        "query_scale": _query_scale(values, row.pop("query_scale_key", None)),
        "shared_layers": _integer(values, "num_kv_shared_layers") or 0,
        **row,
        "model_type": model_type,
        "causal": "bidirectional_tokens" in row or (is_causal and not is_bidirectional),
        "norm_epsilon": row.get("norm_epsilon") if epsilon is None else epsilon,
    }
    layer = Layer(**facts)
    other = _other_class(values, source) or layer.other or next(by_key, None)
    return replace(layer, other=other or _unread(types, values, beside, layer))


def _row(model_types: Sequence[str | None], values: Config) -> dict[str, Any]:
    """Return the facts of model types, without those whose condition the config does not meet.

    Those of later types go before those of earlier ones.
    """
    row: dict[str, Any] = {}
    for name in model_types:
        own = dict(FACTS["types"].get(name, {}))
        for fact, (key, default, wanted) in own.pop("if", {}).items():
            value = values.get(key, default)
            if wanted != (bool(value) if isinstance(wanted, bool) else value):
                del own[fact]
        row |= own
    return row


def _number(values: Config, *keys: str) -> float | None:
    """Return the number of the first key that is present, None without one."""
    key = next((key for key in keys if values.get(key) is not None), None)
    return None if key is None else scalars.real_number(key, values[key], zero=True)


def _integer(values: Config, key: str) -> int | None:
    """Return the whole number of a key, None for a missing key."""
    value = values.get(key)
    return None if value is None else scalars.whole_number(key, value, 0)


def _scale(values: Config) -> float | None:
    """Return the factor on the scores that a config has, None for head_dim^-½."""
    scale = _number(values, "attention_multiplier")
    return _scale_of_scalar(values) if scale is None else scale


def _scale_of_scalar(values: Config) -> float | None:
    """Return the factor on the scores that the scalar of a config stands for."""
    query_scalar = _number(values, "query_pre_attn_scalar")
    return query_scalar**-0.5 if query_scalar else None


def _query_scale(values: Config, own_key: str | None) -> str | None:
    """Return the formula of a scale of queries by their position, None without one."""
    parts = (values, *(part for _, part in objects(values)))
    for key, formula in FACTS["query_scale"].items():
        found = [part[key] for part in parts if key in part]
        if any(found) or (not found and key == own_key):
            return str(formula)
    return None


def _unread(
    types: Sequence[str | None], values: Config, beside: Config, layer: Layer
) -> str | None:
    """Return a text on a key of attention, in the config or beside it, that nothing reads.

    None for an unknown model type, of which every part is to be stated.
    """
    rows = [*filter(None, (model_facts(str(name)) for name in types))]
    if not rows:
        return None
    read = _read_keys(types, rows, values, layer)
    is_scaled_by_log = layer.query_scale == FACTS["query_scale"]["use_logn_attn"]
    states = {
        **vars(layer),
        "window": layer.window if "sliding_window" in read else None,
        "bidirectional": not layer.causal or layer.bidirectional_tokens is not None,
        "scaled_by_log": is_scaled_by_log and layer.unrotated_query_scale is None,
    }
    inner = [values.get(key) for key in read if _is_attention_key(key)]
    parts = [values, *(part for part in inner if isinstance(part, Mapping))]
    found = [pair for part in parts for pair in part.items() if pair[0] not in read]
    found += [pair for pair in beside.items() if values.get(pair[0]) != pair[1]]
    for key, value in found:
        if _is_attention_key(key) and not _is_neutral(key, value, types, states):
            remedy = "leave it out if the model's code ignores it"
            return f"nothing reads its `{cut(key)}`, {shown(value)} ({remedy})"
    return None


def _read_keys(
    types: Sequence[str | None], rows: Sequence[ModelFacts], values: Config, layer: Layer
) -> set[str]:
    """Return the keys that the facts and the layer types of some model types come from."""
    keys = {*KEYS["read"], *rule_keys({*types}), *chain(*(row.read_keys for row in rows))}
    if layer.scale == _scale_of_scalar(values):
        keys.add("query_pre_attn_scalar")
    is_own = any("sliding_window" in {*row.defaults, *row.names} for row in rows)
    layer_types = values.get("layer_types", WINDOW_LAYERS)
    if is_own or layer.window_in_all_layers or not {*layer_types}.isdisjoint(WINDOW_LAYERS):
        keys.add("sliding_window")
    return {part for key in keys for part in key.split(".")}


@lru_cache
def _is_attention_key(key: Any) -> bool:
    """Return True for a key whose name belongs to attention."""
    if not isinstance(key, str) or key in KEYS["inert"] or re.search(KEYS["others"], key):
        return False
    return re.search(KEYS["names"], key) is not None


def _is_neutral(key: str, value: Any, types: Sequence[str | None], states: Config) -> bool:
    """Return True for a value that leaves the attention as it is without the key.

    states: the facts of the layers by name.
    """
    neutral = KEYS["neutral"].get(key, {})
    if any(neutral[name] in ("*", value) for name in (*types, "*") if name in neutral):
        return True
    if value in (None, "", "none", "default", [], {}, ()):
        return True
    if states["latent"] and re.search(KEYS["latent"], key):
        return True
    same = (states[name] for pattern, name in KEYS["states"].items() if re.search(pattern, key))
    fact = next(same, None)
    if not isinstance(value, int | float):
        return bool(value == "causal" and states["causal"])
    if isinstance(value, bool) or (isinstance(fact, bool) and value in (0, 1)):
        return bool(value) is bool(fact)
    return value in (fact, -1, 1 if re.search(KEYS["units"], key) else 0)


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
