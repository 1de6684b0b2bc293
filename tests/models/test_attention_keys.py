"""A key that a layer's attention depends on is read, means what the layer has, or is refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rope_cpu
from rope_cpu.models import reader
from rope_cpu.models.attention import KEYS
from rope_cpu.models.model_types import known_types

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "head_dim": 16}

# Keys of published files and of other code, each with two values, of which at most one is what a
# model has without the key. Not from the tables of the library.
FLAGS = (
    *("causal", "is_causal", "causal_attn", "causal_attention", "use_causal_mask"),
    "unidirectional",
    *("bidirectional", "bidirectional_attention", "use_bidirectional_attention"),
    *("qk_norm", "use_qk_norm", "qk_layernorm", "query_key_norm", "use_value_norm"),
    *("attn_output_gate", "headwise_attn_output_gate", "elementwise_attn_output_gate"),
    *("gated_attention", "use_attention_gate", "use_attention_sinks", "attention_sinks"),
    *("use_sparse_attention", "sparse_attention", "differential_attention"),
    *("use_logn_attn", "prefix_lm", "use_mla", "scale_attn_by_inverse_layer_idx", "multi_query"),
)
NUMBERS = (
    *("block_size", "attention_block_size", "attention_window", "window_size", "local_window_size"),
    *("attention_window_size", "sliding_window_size", "sliding_window", "local_attention"),
    *("attention_chunk_size", "chunk_length", "num_sink_tokens", "attention_sink_size"),
    *("attn_logit_softcap", "attn_logit_softcapping", "attention_logit_cap", "attn_softclamp"),
    *("softmax_scale", "attention_scale", "attn_scale", "qk_scale", "query_scale", "clip_qkv"),
    *("attention_multiplier", "attn_multiplier", "key_multiplier", "attention_temperature"),
    "num_query_groups",
)
COUNTS = ("global_attn_every_n_layers", "sliding_window_pattern", "full_attention_interval")
WORDS = ("attention_mask_type", "attn_mask_type", "attention_type", "attn_type", "mask_type")
OBJECTS = ("attention_config", "attn_config", "sparse_attention_config", "local_attention_config")
VALUES: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(FLAGS, (True, False)),
    **dict.fromkeys(NUMBERS, (23, 37)),
    **dict.fromkeys(COUNTS, (2, 3)),
    **dict.fromkeys(WORDS, ("prefix", "block")),
    **dict.fromkeys(OBJECTS, ({"softmax_scale": 0.3}, {"causal_mask": "block", "block_size": 7})),
    "attention_types": (["local"], [["global", "local"]]),
}
# Other keys without which a key is off, by the code of the model types that have it.
WITH = {"sliding_window": {"use_sliding_window": True, "max_window_layers": 0}}


def configs() -> list[dict[str, Any]]:
    """Return published configs, and an almost silent one of each model type."""
    published = json.loads((ROOT / "tests/data/published_configs.json").read_text())
    found = [entry["config"] for entry in published.values()]
    for path in sorted((ROOT.parent / "shared/configs").glob("*.json")):
        held = json.loads(path.read_text())
        found += [held] if isinstance(held, dict) else []
    return found + [SIZES | {"model_type": name} for name in known_types()]


def answers(config: dict[str, Any]) -> list[Any]:
    """Return the attention of the first layers, None for a layer that is refused."""
    found: list[Any] = []
    for index in range(4):
        try:
            found.append(vars(rope_cpu.attention_layer(config, index)))
        except (TypeError, ValueError):
            found.append(None)
    return found


@cache
def answered() -> list[tuple[dict[str, Any], list[Any]]]:
    """Return configs of which a layer is answered, and the answers."""
    found = [(config, answers(config)) for config in configs()]
    return [one for one in found if any(one[1])]


def is_own(config: dict[str, Any], key: str) -> bool:
    """Return True for a key of the config's own model type, which may change none of its layers.

    That of a rule for layers that are listed, and those of layers that are refused.
    """
    parsed = reader.read(config)
    types = {parsed.model_type, parsed.facts.like, config.get("model_type")}
    has_list = key in COUNTS and "layer_types" in parsed.source.get("text_config", parsed.source)
    of_llama4 = ("attention_chunk_size", "use_qk_norm")
    is_refused = parsed.model_type == "llama4_text" and key in of_llama4
    return has_list or is_refused or not types.isdisjoint(KEYS["neutral"].get(key, {}))


def changed(config: dict[str, Any], part: str | None, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a config with more keys, in the object of its language model if it has a name."""
    return config | keys if part is None else config | {part: config[part] | keys}


def test_no_config_is_answered_as_if_a_key_were_not_there(rng: np.random.Generator) -> None:
    cases = answered()
    unread = set()
    for _ in range(2000):
        config, without = cases[rng.integers(len(cases))]
        key = str(rng.choice([*VALUES]))
        parts = [None, *(name for name in ("text_config", "llm_config") if name in config)]
        part = parts[rng.integers(len(parts))]
        if key in (config if part is None else config[part]) or is_own(config, key):
            continue
        more = [changed(config, part, {key: value} | WITH.get(key, {})) for value in VALUES[key]]
        if all(answers(one) == without for one in more):
            unread.add((key, config.get("model_type"), part))
    assert unread == set()


def test_a_key_in_an_object_that_is_read_is_named() -> None:
    keys = {"kv_n_heads": 2, "rope_theta": 1e4, "softmax_scale": 0.5}
    with pytest.raises(ValueError, match="nothing reads its `softmax_scale`, "):
        rope_cpu.attention_layer(SIZES | {"model_type": "dbrx", "attn_config": keys}, 0)


# Of a Llama, whose layers are causal, without window, norms and sinks.
UNREAD: dict[str, Any] = {
    "causal_attn": False,
    "causal": False,
    "bidirectional": True,
    "attention_mask_type": "prefix",
    "block_size": 32,
    "softmax_scale": 1.0,
    "headwise_attn_output_gate": True,
    "bidirectional_image_tokens": True,
    "use_linear_attention": True,
    "use_bidirectional_attention": "vision",
    "index_topk": 2048,
    "attn_config": {"softmax_scale": 0.5},
}


@pytest.mark.parametrize("key", UNREAD)
@pytest.mark.parametrize("holder", [None, "llava"])
def test_a_key_that_nothing_reads_is_named(holder: str | None, key: str) -> None:
    keys = SIZES | {"model_type": "llama"}
    config = {"model_type": holder, "text_config": keys} if holder else keys
    config = config | {key: UNREAD[key]}
    name = "softmax_scale" if isinstance(UNREAD[key], dict) else key
    with pytest.raises(ValueError, match=f"nothing reads its `({key}|{name})`, "):
        rope_cpu.attention_layer(config, 0)
    assert reader.read(config).spec() == reader.read(keys).spec()


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"causal_attn": True, "attention_mask_type": "causal", "is_decoder": False}),
    (
        "llama",
        {"qk_norm": False, "num_sink_tokens": 0, "local_window_size": -1, "block_size": None},
    ),
    ("llama", {"_flash_attn_2_enabled": True, "attention_window": np.int64(0), "causal": np.True_}),
    ("qwen3", {"use_qk_norm": True, "attention_dropout": 0.1, "softmax_scale": None}),
    ("mistral", {"window_size": 4096, "key_multiplier": 1.0}),
    ("gemma2", {"attn_logit_softcap": 50.0, "attention_scale": 0.0625, "is_decoder": True}),
    ("gpt_oss", {"attention_sinks": True, "final_logit_softcapping": 30.0}),
    ("falcon", {"parallel_attn": False, "num_ln_in_parallel_attn": 1}),
    ("modernbert", {"causal": False, "bidirectional": True}),
]


@pytest.mark.parametrize(("model_type", "keys"), NEUTRAL)
def test_a_neutral_value_changes_nothing(model_type: str, keys: dict[str, Any]) -> None:
    config = SIZES | {"model_type": model_type}
    assert reader.read(config | keys).attention == reader.read(config).attention
