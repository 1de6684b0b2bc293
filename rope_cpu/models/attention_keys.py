"""Keys of a config that a layer's attention depends on: read, neutral, or unread.

The vocabulary, attention_keys.json, has patterns of names, and keys:

- `names`, `others`: words of attention, and of other parts whose keys have these words, too;
- `states`: keys that repeat a fact of `Attention`, which makes the same value neutral;
- `asks`: flags of which false is neutral, whatever the fact;
- `latent`: numbers of latent attention, which are read with it;
- `units`: factors, of which 1 is neutral; of other numbers 0 and -1 are;
- `read`, `inert`: keys that are read for every model type, and those that no result depends on;
- `of_types`: keys of single model types, each with the value of their class, or "*" for any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from rope_cpu.arguments.texts import cut, shown
from rope_cpu.models.model_types import data

KEYS: Mapping[str, Any] = data("attention_keys.json")
READ: list[str] = KEYS["read"]
_NAMES = re.compile(KEYS["names"])
_OTHERS = re.compile(KEYS["others"])
_UNITS = re.compile(KEYS["units"])


def unread_key(
    values: Mapping[str, Any],
    model_types: Set[str | None],
    facts: Mapping[str, Any],
    read: Set[str] = frozenset(),
) -> str | None:
    """Return a text on the first key of attention that nothing reads, None if there is none.

    facts: those of `Attention` by name, and `bidirectional`. read: keys that facts come from.
    """
    known = {*KEYS["inert"], *read}
    for key, value in values.items():
        if not is_attention_key(key) or _is_neutral(key, value, model_types, facts):
            continue
        if key not in known:
            return (
                f"nothing reads its `{cut(key)}`, {shown(value)} (leave it out if the model's code "
                "ignores it)"
            )
        inner = value if isinstance(value, Mapping) else {}
        unread = unread_key(inner, model_types, facts, read)
        if unread is not None:
            return unread
    return None


def is_attention_key(key: Any) -> bool:
    """Return True for a key whose name belongs to attention."""
    return isinstance(key, str) and bool(_NAMES.search(key)) and not _OTHERS.search(key)


def _is_neutral(
    key: str, value: Any, model_types: Set[str | None], facts: Mapping[str, Any]
) -> bool:
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
    if facts["latent"] and re.search(KEYS["latent"], key):
        return True
    states = KEYS["states"].items()
    fact = next((facts[name] for pattern, name in states if re.search(pattern, key)), None)
    if not isinstance(value, int | float):
        return bool(value == "causal" and facts["causal"])
    if isinstance(value, bool) or (isinstance(fact, bool) and value in (0, 1)):
        return bool(value) is bool(fact)
    return value in (fact, -1, 1 if _UNITS.search(key) else 0)
