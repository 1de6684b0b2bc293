"""What a model's attention has besides the rotation, by its model type and its config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    other: what else there is, in words.
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
    other: str | None = None

    @classmethod
    def of(cls, model_type: str | None, values: Mapping[str, Any]) -> Attention:
        """Return the attention of a model type; values: its config under standard names."""
        scalar = values.get("query_pre_attn_scalar")
        scale = values.get("attention_multiplier", None if not scalar else scalar**-0.5)
        parameters = own_section(values)[1]
        return cls(
            causal=_is_causal(model_type, values),
            latent=latent(values) or ("kv_lora_rank" in values and bool(values.get("use_mla", True))),
            sinks=model_type in FACTS["sinks"],
            qk_norm=_qk_norm(model_type, values),
            v_norm=model_type in FACTS["v_norm"],
            chunk=values.get("attention_chunk_size") if model_type in FACTS["chunks"] else None,
            window=values.get("sliding_window") if values.get("use_sliding_window", True) else None,
            softcap=values.get("attn_logit_softcapping"),
            scale=FACTS["scale"].get(model_type, scale),
            query_scale="llama_4_scaling_beta" if parameters.get("llama_4_scaling_beta") else None,
            other=FACTS["other"].get(model_type),
        )


def _is_causal(model_type: str | None, values: Mapping[str, Any]) -> bool:
    """Return True if a query attends to keys up to itself only; for some model types a key of the config decides."""
    # Gemma 4's "vision" is about tokens of images alone.
    if model_type in FACTS["bidirectional"] or values.get("use_bidirectional_attention") in (True, "all"):
        return False
    return model_type not in FACTS["causal_if_decoder"] or bool(values.get("is_decoder"))


def _qk_norm(model_type: str | None, values: Mapping[str, Any]) -> str | None:
    """Return when q and k are normed; for some model types a key of the config decides."""
    key, default = FACTS["qk_norm_key"].get(model_type, ("", True))
    if not values.get(key, default):
        return None
    return next((when for when in ("before", "after") if model_type in FACTS[f"qk_norm_{when}_rotation"]), None)
