"""The calls of a server that a model needs, for `rope-cpu show`."""

from __future__ import annotations

from collections.abc import Iterator

from rope_cpu.configs.attention_facts import Attention
from rope_cpu.configs.gguf.adapter import GgufConfig
from rope_cpu.configs.model_config import ModelConfig, OneRotationConfig
from rope_cpu.frequencies.rope_types import ROPE_TYPES
from rope_cpu.rotation.embedding import RotaryEmbedding

_APPEND = "plan.append(q, k, v, cache, batch"


def serving_lines(config: ModelConfig, rope: RotaryEmbedding) -> Iterator[str]:
    """Yield the calls that write to a cache of keys and values, and the reasons for others.

    A line has at most 76 columns. Models without such a cache have none, nor do unknown ones, and
    GGUF files, which do not say how q and k are normed.
    """
    if not config.is_known or isinstance(config, OneRotationConfig | GgufConfig):
        return
    attention = config.attention
    if not attention.causal:
        return
    if attention.latent or attention.own_cache is not None:
        yield "plan.rotate, and the server's own writes to its cache:"
        yield attention.own_cache or "latent attention caches compressed keys and values"
        return
    yield from _append_lines(attention, rope)
    if attention.shared_layers:
        norm = ", norm=…" if attention.qk_norm else ""
        yield f"plan.rotate(q{norm}) in the last {attention.shared_layers} layers: they share keys"
    if rope.axes > 1:
        yield f"position ids (tokens, {rope.axes}) of the model, not batch.cache_position"
    if rope.spec.length_rule is not None:
        yield "rope.at_length(lengths).plan(…, cu_seqlens=batch.cu_seqlens)"
        yield f"rerotate_plan(…).rotate_cached(…) {ROPE_TYPES[rope.rope_type].changes}"


def _append_lines(attention: Attention, rope: RotaryEmbedding) -> Iterator[str]:
    """Yield the call of `append`, with norms where they fit, otherwise the reason and a remedy."""
    # A rotation keeps the mean of squares, but for the attention factor.
    is_after = attention.qk_norm == "after"
    if is_after and rope.attention_factor != 1:
        yield "plan(q, k), then the model's norms and the server's own writes:"
        yield "the norms follow the rotation, which has an attention factor"
        return
    if attention.qk_norm is None:
        yield f"{_APPEND}{_v_norm(attention)})"
        return
    if attention.norm_other is not None:
        yield f"{_APPEND}{_v_norm(attention)})"
        yield "without q_norm and k_norm: norm q and k before, as the model's norms are"
        yield attention.norm_other
        return
    yield f"{_APPEND},"
    yield f"q_norm={_qk_norm(attention, 'q')},"
    yield f"k_norm={_qk_norm(attention, 'k')}{_v_norm(attention)})"
    if is_after and attention.norm_weighted:
        yield "without weights, as the model's norms follow the rotation:"
        yield "multiply q_rot by q_weight * k_weight, and leave the keys"


def _qk_norm(attention: Attention, name: str) -> str:
    is_weighted = attention.norm_weighted and attention.qk_norm == "before"
    weight = f"{name}_weight" if is_weighted else "None"
    offset = f", offset={attention.norm_offset:g}" if attention.norm_offset else ""
    return f"RMSNorm({weight}, {_eps(attention)}{offset})"


def _v_norm(attention: Attention) -> str:
    return f", v_norm=RMSNorm(None, {_eps(attention)})" if attention.v_norm else ""


def _eps(attention: Attention) -> str:
    """Return the eps of the norms as text, or its name if it is not known."""
    epsilon = attention.norm_epsilon
    return "eps" if epsilon is None else f"{epsilon:g}"
