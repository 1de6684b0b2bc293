"""The parts of a model's attention besides the rotation, from its model type and its config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from rope_cpu.arguments import scalars
from rope_cpu.arguments.texts import cut, shown
from rope_cpu.models.attention_keys import READ, unread_key
from rope_cpu.models.keys import objects
from rope_cpu.models.layers import FULL, SLIDING, rule_keys, window
from rope_cpu.models.model_types import data, model_facts, value_at
from rope_cpu.models.quirks import quirks_of
from rope_cpu.models.rope_parameters import is_latent

# From a property of an attention class to its model types; see tests/peers/test_attention_facts.py.
FACTS: Mapping[str, Any] = data("attention.json")

# Letters of a class' name that follow those of its family, and ends that only model types have.
# Other tasks than these have an attention of their own, such as the blocks of diffusion.
_OTHER_TASKS = "diffusion|bidirectional|eagle|draft"
_CLASS_KIND = f"(text|vision)?(lmhead)?(model)?(for(?!.*({_OTHER_TASKS})).+)?"
_TYPE_END = re.compile("(_text|_model|_module)+$")

# Names of layer types whose queries attend to all keys, or to those of a window.
FULL_LAYERS = (FULL, "attention")
WINDOW_LAYERS = (SLIDING, "local_attention")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The computation between queries, keys and values besides their rotation.

    Parameters
    ----------
    causal : bool
        A query attends only to keys up to its own position.
    latent : bool
        Keys and values are compressed (MLA), and only a part of each head is rotated.
    sinks : bool
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
        Number of keys that a query attends to, in the layers that have a window.
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
    bidirectional_tokens : str, optional
        Tokens among which attention is bidirectional, in a causal model.
    shared_layers : int
        Number of last layers that reuse keys and values of an earlier layer.
    own_cache : str, optional
        Reason why the cache does not hold a key and a value for each key head.
    other : str, optional
        Description of further differences.
    """

    causal: bool = True
    latent: bool = False
    sinks: bool = False
    qk_norm: str | None = None
    norm_offset: float = 0.0
    norm_weighted: bool = True
    norm_epsilon: float | None = None
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
    bidirectional_tokens: str | None = None
    shared_layers: int = 0
    own_cache: str | None = None
    other: str | None = None

    @classmethod
    def from_values(
        cls,
        model_types: Set[str | None],
        values: Mapping[str, Any],
        source: Mapping[str, Any] | None = None,
        beside: Mapping[str, Any] | None = None,
    ) -> Attention:
        """Return the attention of a model.

        model_types: its model type, and the one it inherits facts from. values: its config under
        standard names. source: the whole file, perhaps of a multimodal model, with a type of its
        own. beside: the keys of that file which are not those of the language model.
        """
        source = source or {}
        if "num_attention_heads" not in source:  # otherwise it is the language model's own file
            model_types = {*model_types, source.get("model_type")}
        tokens = _bidirectional_tokens(model_types, values)
        uses_mla = "kv_lora_rank" in values and bool(values.get("use_mla", True))
        facts = cls(
            causal=tokens is not None or _is_causal(model_types, values),
            latent=is_latent(values) or uses_mla,
            sinks=_has(model_types, "sinks"),
            qk_norm=_qk_norm(model_types, values),
            norm_offset=float(_has(model_types, "qk_norm_offset")),
            norm_weighted=not _has(model_types, "qk_norm_unweighted"),
            norm_epsilon=_norm_epsilon(model_types, values),
            norm_other=_fact_by_type("qk_norm_other", model_types, None),
            v_norm=_has(model_types, "v_norm"),
            chunk=_optional_integer("attention_chunk_size", values),
            window=window(values),
            window_in_all_layers=_has(model_types, "window_in_all_layers"),
            softcap=_optional_number("attn_logit_softcapping", values),
            scale=_scale(model_types, values),
            query_weights=_fact_by_type("query_weights", model_types, None),
            query_scale=_query_scale(model_types, values),
            unrotated_query_scale=_unrotated_query_scale(model_types, values),
            bidirectional_tokens=tokens,
            shared_layers=_optional_integer("num_kv_shared_layers", values) or 0,
            own_cache=_fact_by_type("own_cache", model_types, None),
            other=_other_class(values, source) or _other(model_types, values),
        )
        other = facts.other or _unread(model_types, values, beside or {}, facts)
        return replace(facts, other=other)

    def unusual_parts(self) -> Iterator[str]:
        """Yield the parts that neither a server's calls nor an export express."""
        if self.other:
            yield f"an attention of its own: {self.other}"
        if self.chunk:
            yield f"chunks of {self.chunk} tokens (attention_chunk_size)"

    def window_of(self, layer_type: str | None) -> int | None:
        """Return the number of keys that a query attends to in layers of a type, None for all keys.

        Raises ValueError if the layer type is needed and unknown.
        """
        if self.window is None or self.window_in_all_layers:
            return self.window
        if layer_type in FULL_LAYERS:
            return None
        if layer_type in WINDOW_LAYERS:
            return self.window
        raise ValueError(
            f"it is not known which layers have the window of {self.window} keys "
            f"(`sliding_window`), and the layer type is {shown(layer_type)}; add `layer_types` to "
            "the config, or give --set window=N, or window=none for all keys, to the command"
        )


def _unread(
    model_types: Set[str | None],
    values: Mapping[str, Any],
    beside: Mapping[str, Any],
    facts: Attention,
) -> str | None:
    """Return a text on a key of attention, in the config or beside it, that nothing reads.

    None for an unknown model type, of which every part is to be stated.
    """
    if all(model_facts(str(name)) is None for name in model_types):
        return None
    is_bidirectional = not facts.causal or facts.bidirectional_tokens is not None
    states = vars(facts) | {"bidirectional": is_bidirectional}
    read = _read_keys(model_types, values, facts)
    if not _has_windows(model_types, values):
        states["window"] = None
        read -= {"sliding_window"}
    others = {key: value for key, value in beside.items() if values.get(key) != value}
    text = unread_key(values, model_types, states, read)
    return text or unread_key(others, model_types, states)


def _read_keys(
    model_types: Set[str | None], values: Mapping[str, Any], facts: Attention
) -> set[str]:
    """Return the keys that facts, rows, quirks and layer types of some model types come from."""
    keys: set[Any] = {*READ, *FACTS["other_keys"], *rule_keys(model_types)}
    rows = [row for name in model_types if (row := model_facts(str(name))) is not None]
    for row in rows:
        keys |= {*row.names.values(), *row.unrotated.values(), *row.refuse, *row.ignored}
    keys |= {key for name in model_types for quirk in quirks_of(name) for key in quirk.keys}
    if facts.unrotated_query_scale is None:
        scales = FACTS["query_scale"].items()
        keys |= {key for key, formula in scales if formula == facts.query_scale}
    if facts.scale == _scale_of_scalar(values):
        keys.add("query_pre_attn_scalar")
    return {part for key in keys for part in key.split(".")}


def _has_windows(model_types: Set[str | None], values: Mapping[str, Any]) -> bool:
    """Return True if a model's code reads a window, or the config may have layers with one."""
    rows = [model_facts(str(name)) for name in model_types]
    is_own = any(row and "sliding_window" in {*row.defaults, *row.names} for row in rows)
    is_own = is_own or _has(model_types, "window_in_all_layers")
    return is_own or not {*values.get("layer_types", WINDOW_LAYERS)}.isdisjoint(WINDOW_LAYERS)


def _has(model_types: Set[str | None], fact: str) -> bool:
    """Return True if the table lists one of the model types for a fact."""
    return not model_types.isdisjoint(FACTS[fact])


def _fact_by_type(fact: str, model_types: Set[str | None], default: Any) -> Any:
    """Return the value that the table has for one of the model types."""
    table = FACTS[fact]
    return next((table[name] for name in model_types if name in table), default)


def _optional_number(key: str, values: Mapping[str, Any]) -> float | None:
    """Return the number of a key, None for a missing key."""
    value = values.get(key)
    return None if value is None else scalars.real_number(key, value, zero=True)


def _optional_integer(key: str, values: Mapping[str, Any]) -> int | None:
    """Return the whole number of a key, None for a missing key."""
    value = values.get(key)
    return None if value is None else scalars.whole_number(key, value, 0)


def _scale(model_types: Set[str | None], values: Mapping[str, Any]) -> float | None:
    """Return the factor on the scores, None for head_dim^-½."""
    scale = _optional_number("attention_multiplier", values)
    if scale is None:
        scale = _scale_of_scalar(values)
    from_table: float | None = _fact_by_type("scale", model_types, scale)
    return from_table


def _scale_of_scalar(values: Mapping[str, Any]) -> float | None:
    """Return the factor on the scores that the scalar of a config stands for."""
    query_scalar = _optional_number("query_pre_attn_scalar", values)
    return query_scalar**-0.5 if query_scalar else None


def _query_scale(model_types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return the formula of a scale of queries by their position, None without one."""
    parts = (values, *(part for _, part in objects(values)))
    own_key = _fact_by_type("query_scale_key", model_types, None)
    for key, formula in FACTS["query_scale"].items():
        found = [part[key] for part in parts if key in part]
        if any(found) or (not found and key == own_key):
            return str(formula)
    return None


def _unrotated_query_scale(model_types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return the same for layers without rotation; for some types a key can switch it off."""
    key, formula = _fact_by_type("unrotated_query_scale", model_types, ("", None))
    return formula if values.get(key, True) else None


def _bidirectional_tokens(model_types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return the tokens among which attention is bidirectional, None in other models."""
    key, value, default = _fact_by_type("bidirectional_tokens_if", model_types, ("", None, None))
    tokens: str | None = _fact_by_type("bidirectional_tokens", model_types, None)
    return tokens if values.get(key, default) == value else None


def _other_class(values: Mapping[str, Any], source: Mapping[str, Any]) -> str | None:
    """Return a text on a class, in the config or in the file, that its model type does not have."""
    key = "architectures"
    configs = (source,) if values.get(key) == source.get(key) else (source, values)
    for config in configs:
        model_type = str(config.get("model_type"))
        for key, name in _classes(config):
            if not _has_class(model_type, name):
                return f"`{key}` has {shown(name)}, no class of model type {cut(model_type)}"
    return None


def _classes(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the classes that a config names, each with the key that names it."""
    names = config.get("architectures") or ()
    for name in names if isinstance(names, list | tuple) else (names,):
        yield "architectures", name
    own_code = config.get("auto_map")
    for auto_class, path in own_code.items() if isinstance(own_code, Mapping) else ():
        if str(auto_class).startswith("AutoModel") and isinstance(path, str):
            yield "auto_map", path


def _has_class(model_type: str, name: object) -> bool:
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
    module, _, class_name = str(name).rpartition(".")  # without a module in `architectures`
    is_other_task = re.search(_OTHER_TASKS, _letters(module))
    return not is_other_task and re.fullmatch(pattern, _letters(class_name)) is not None


def _letters(name: object) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub("[^a-z0-9]", "", str(name).lower())


def _other(model_types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return the further differences of a model type, or those that a key of the config makes."""
    keys = FACTS["other_keys"] | _fact_by_type("other_keys_of_types", model_types, {})
    by_key = (text for key, text in keys.items() if value_at(values, key))
    other: str | None = _fact_by_type("other", model_types, next(by_key, None))
    return other


def _is_causal(model_types: Set[str | None], values: Mapping[str, Any]) -> bool:
    """Return True for causal attention; for some model types a key of the config decides."""
    # Gemma 4's value "vision" concerns tokens of images only.
    is_bidirectional = values.get("use_bidirectional_attention") in (True, "all")
    is_encoder = _has(model_types, "causal_if_decoder") and not values.get("is_decoder")
    is_switched_off = is_bidirectional or values.get("is_causal") is False
    return not (is_switched_off or is_encoder or _has(model_types, "bidirectional"))


def _qk_norm(model_types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return "before" or "after" the rotation if queries and keys are normed, else None.

    For some model types a key of the config decides.
    """
    keys = (FACTS["qk_norm_key"][name] for name in model_types if name in FACTS["qk_norm_key"])
    if not all(values.get(key, default) for key, default in keys):
        return None
    orders = ("before", "after")
    return next((one for one in orders if _has(model_types, f"qk_norm_{one}_rotation")), None)


def _norm_epsilon(model_types: Set[str | None], values: Mapping[str, Any]) -> float | None:
    """Return the epsilon of RMS norms, None if neither the file nor its model type has one."""
    for key in FACTS["norm_epsilon_keys"]:
        if values.get(key) is not None:
            return scalars.real_number(key, values[key], zero=True)
    tables = FACTS["norm_epsilon"].items()
    known = (float(epsilon) for epsilon, names in tables if not model_types.isdisjoint(names))
    return next(known, None)
