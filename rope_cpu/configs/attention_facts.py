"""What a model's attention has besides the rotation, by its model type and its config."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from rope_cpu.arguments import scalars
from rope_cpu.configs.model_types import data
from rope_cpu.configs.rope_parameters import latent, own_section

# Property of an attention class → the model types that have it; see tests/peers/test_attention_facts.py.
FACTS: Mapping[str, Any] = data("attention.json")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What is computed between queries, keys and values besides their rotation.

    causal: a query attends to keys up to itself only.
    latent: keys and values are compressed (MLA), and only a part of each head is rotated.
    sinks: the softmax has a learned term beside the scores.
    qk_norm: "before" or "after" the rotation, None where q and k are not normed. v_norm: values are.
    chunk: tokens that attend to each other only; window: how many keys a query attends to; softcap: c·tanh(score/c).
    scale: of the scores, None for head_dim^-½. query_scale: the key that scales queries by their position.
    shared_layers: how many of the last layers take keys and values of an earlier one. other: what else, in words.
    """

    causal: bool = True
    latent: bool = False
    sinks: bool = False
    qk_norm: str | None = None
    v_norm: bool = False
    chunk: int | None = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    query_scale: str | None = None
    shared_layers: int = 0
    other: str | None = None

    @classmethod
    def of(cls, types: Set[str | None], values: Mapping[str, Any]) -> Attention:
        """Return the attention of a model type and the one that it is like; values: its config, standard names."""
        scalar = _number("query_pre_attn_scalar", values)
        scale = _number("attention_multiplier", values)
        if scale is None and scalar:
            scale = scalar**-0.5
        by_position = {
            key: own_section(values)[1].get(key, values.get(key))
            for key in FACTS["query_scale_keys"]
        }
        return cls(
            causal=_is_causal(types, values),
            latent=latent(values)
            or ("kv_lora_rank" in values and bool(values.get("use_mla", True))),
            sinks=not types.isdisjoint(FACTS["sinks"]),
            qk_norm=_qk_norm(types, values),
            v_norm=not types.isdisjoint(FACTS["v_norm"]),
            chunk=None
            if types.isdisjoint(FACTS["chunks"])
            else _whole("attention_chunk_size", values),
            window=_whole("sliding_window", values)
            if values.get("use_sliding_window", True)
            else None,
            softcap=_number("attn_logit_softcapping", values),
            scale=next((FACTS["scale"][name] for name in types if name in FACTS["scale"]), scale),
            query_scale=next((key for key, value in by_position.items() if value), None),
            shared_layers=_whole("num_kv_shared_layers", values) or 0,
            other=next((FACTS["other"][name] for name in types if name in FACTS["other"]), None),
        )


def _number(key: str, values: Mapping[str, Any]) -> float | None:
    """Return the number under a key, None where there is none."""
    value = values.get(key)
    return None if value is None else scalars.real_number(key, value, zero=True)


def _whole(key: str, values: Mapping[str, Any]) -> int | None:
    """Return the whole number under a key, None where there is none."""
    value = values.get(key)
    return None if value is None else scalars.whole_number(key, value, 0)


def _is_causal(types: Set[str | None], values: Mapping[str, Any]) -> bool:
    """Return True if a query attends to keys up to itself only; for some model types a key of the config decides."""
    # Gemma 4's "vision" is about tokens of images alone.
    if values.get("is_causal") is False or values.get("use_bidirectional_attention") in (
        True,
        "all",
    ):
        return False
    decoder = types.isdisjoint(FACTS["causal_if_decoder"]) or bool(values.get("is_decoder"))
    return decoder and types.isdisjoint(FACTS["bidirectional"])


def _qk_norm(types: Set[str | None], values: Mapping[str, Any]) -> str | None:
    """Return when q and k are normed; for some model types a key of the config decides."""
    keys = (FACTS["qk_norm_key"][name] for name in types if name in FACTS["qk_norm_key"])
    if not all(values.get(key, default) for key, default in keys):
        return None
    return next(
        (w for w in ("before", "after") if not types.isdisjoint(FACTS[f"qk_norm_{w}_rotation"])),
        None,
    )
