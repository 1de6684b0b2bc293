"""A key of a rotation that nothing reads is refused by name; copies and neutral values are not."""

from __future__ import annotations

from typing import Any

import pytest
from text_configs import LLAMA, read

from rope_cpu.models.keys import KEYS, is_rotation_key
from rope_cpu.models.model_types import ModelFacts, known_types, model_facts

MYSTERY = {**LLAMA, "model_type": "mystery", "rope_theta": 777.0}
NOMIC = {"model_type": "nomic_bert", "n_embd": 768, "n_head": 12}


def rows() -> list[ModelFacts]:
    return [*filter(None, map(model_facts, known_types()))]


# Keys that no code of an unknown model type is known to read.
UNKNOWN: list[tuple[str, Any]] = [
    ("rotary_dim", 64),
    ("rotary_pct", 0.25),
    ("rotary_percentage", 0.5),
    ("partial_rotary_dim", 32),
    ("rope_head_dim", 32),
    ("local_rope_theta", 1e4),
    ("rope_local_base_freq", 1e4),
    ("rotary_emb_base", 5e5),
    ("use_scaled_rope", True),
    ("rope_scaling_factor", 32.0),
    ("rope_type", "mine"),
    ("scaling_factor", 4.0),
    ("dual_chunk_attention_config", {"chunk_size": 8}),
    ("yarn", {"factor": 16.0}),
    ("yarn_factor", 4.0),
    ("ntk_alpha", 2.0),
    ("mrope_section", [16, 24, 24]),
    ("mrope_interleaved", True),
    ("rope_ratio", 50),
    ("use_xpos", True),
    ("alibi", True),
    ("use_alibi", True),
    ("use_rope", False),
    ("use_fope", True),
    ("fope_init_factor", 0.5),
    ("num_inv_freq", 32),
    ("nope", True),
    ("rope", False),
    ("use_rotary_embeddings", False),
    ("position_embedding_type", "alibi"),
    ("rope_interleave", True),
]


@pytest.mark.parametrize(("key", "value"), UNKNOWN, ids=lambda value: str(value)[:30])
def test_an_unknown_model_type_is_not_answered_as_if_a_key_were_not_there(key, value):
    assert read(MYSTERY, interleaved=False).rope_type == "default"
    with pytest.raises(ValueError, match=f"`{key}` is .*`model_type` 'mystery' ignores it"):
        read({**MYSTERY, key: value}, interleaved=False)


# The same for known model types.
KNOWN: list[tuple[dict[str, Any], str, Any]] = [
    (NOMIC, "rotary_emb_fraction", 0.5),
    (NOMIC, "rotary_scaling_factor", 2.0),
    (NOMIC, "rotary_emb_scale_base", 512.0),
    (LLAMA, "use_scaled_rope", True),
    (LLAMA, "rotary_pct", 0.25),
    (LLAMA, "rope_local_base_freq", 1e4),
    (LLAMA, "use_rope", False),
    (LLAMA, "use_fope", True),
    (LLAMA, "alibi", 1),
    (LLAMA, "no_rope", 1),
    (LLAMA, "qk_rope_head_dim", 64),
    ({"model_type": "seed_oss"}, "head_dim", None),
    ({"model_type": "glm4"}, "partial_rotary_factor", None),
    ({"model_type": "gptj"}, "rotary_pct", 0.25),
    ({"model_type": "plamo3", "rope_theta": 1e4}, "rope_scaling_factor", 4.0),
    ({"model_type": "molmo2_text"}, "rope_scaling_layers", [0, 1]),
    ({"model_type": "step3p5"}, "yarn_only_types", ["sliding_attention"]),
    ({"model_type": "ernie4_5"}, "head_dim", None),
    ({"model_type": "glm_moe_dsa"}, "rope_interleave", False),
    ({"model_type": "qwen2_vl", "hidden_size": 8192}, "mrope_section", [24, 20, 20]),
]


@pytest.mark.parametrize(("keys", "key", "value"), KNOWN, ids=lambda value: str(value)[:30])
def test_a_known_model_type_does_not_pass_over_a_key(keys, key, value):
    with pytest.raises(ValueError, match=f"`{key}` is "):
        read(keys, {key: value})


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "llama", "dim": 2048, "n_heads": 32},
        {"model_type": "llama", "n_embd": 2048, "n_head": 32},
        {"model_type": "qwen2", "d_model": 2048},
        {"model_type": "gemma", "kv_channels": 128, "hidden_size": 512},
    ],
    ids=str,
)
def test_another_vocabulary_does_not_give_the_defaults(keys):
    with pytest.raises(ValueError, match=r"it must be called `.*`, as its `model_type` has it"):
        read(keys)


def test_every_name_of_a_width_is_known() -> None:
    standard = ("hidden_size", "num_attention_heads", "head_dim")
    own = [row.names for row in rows()]
    found = {names[key]: key for names in own for key in standard if names.get(key)}
    del found["qk_rope_head_dim"]  # of the slice that latent attention rotates
    assert len(found) > 8
    assert found.items() <= KEYS["other_widths"].items()


NEUTRAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"use_scaled_rope": False, "rotary_pct": 1.0, "rope_ratio": 1, "yarn": None}),
    (LLAMA, {"use_rope": True, "alibi": False, "position_embedding_type": "rope"}),
    (LLAMA, {"d_model": 4096, "n_heads": 32}),  # copies beside the keys that are read
    ({**MYSTERY, "interleaved": False}, {"mrope_section": None, "use_mrope": False}),
    ({"model_type": "qwen2"}, {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ({"model_type": "chatglm"}, {"original_rope": True}),
    # Keys of published files that the models' code does not read for q and k of the attention.
    ({"model_type": "glm_moe_dsa"}, {"indexer_rope_interleave": True, "rope_interleave": True}),
    ({"model_type": "qwen2_vl", "hidden_size": 8192}, {"mrope_section": [16, 24, 24]}),
    ({"model_type": "cohere2"}, {"position_embedding_type": "rope_gptj", "rotary_pct": 1.0}),
    ({"model_type": "openelm", "head_dim": 64}, {"rope_max_length": 4096}),
    ({"model_type": "hf_olmo"}, {"alibi_bias_max": 8.0, "rope_full_precision": True}),
    ({"model_type": "gpt_neox"}, {"rope_theta": 5e5}),  # its class reads `rotary_emb_base` alone
]


@pytest.mark.parametrize(("keys", "neutral"), NEUTRAL, ids=lambda value: str(value)[:40])
def test_a_neutral_value_changes_nothing(keys, neutral):
    interleaved = keys.get("interleaved")
    keys = {key: value for key, value in keys.items() if key != "interleaved"}
    given = read(keys, neutral, interleaved=interleaved)
    assert given == read(keys, interleaved=interleaved)


@pytest.mark.parametrize("keys", [LLAMA, {"model_type": "pixtral", "hidden_size": 64}], ids=str)
def test_other_keys_than_names_are_passed_over(keys):
    few = {"num_attention_heads": 4}
    numbered = {1: 1, 2: True, ("rope", 2): 2.0}
    assert read(few, keys, numbered) == read(few, keys)
    whole = {"model_type": "llava", "text_config": LLAMA}
    assert read(whole, numbered) == read(whole)


def test_a_file_cannot_set_what_a_row_says():
    keys = {"by_layer_type": {"full_attention": {"head_dim": "hidden_size"}}}
    layers = {"layer_type": "full_attention"}
    gemma4 = {"model_type": "gemma4_text"}
    assert read(gemma4, keys, **layers) == read(gemma4, **layers)
    with pytest.raises(ValueError, match="`rotation_sign` is -1"):
        read(LLAMA, {"rotation_sign": -1})


def test_copies_in_a_section_and_ignored_keys_of_the_part_are_no_harm():
    section = {"rope_type": "default", "rope_theta": 5e5}
    part = {"model_type": "llama", "head_dim": 64, "rope_parameters": section}
    whole = {"model_type": "llava", "rope_theta": 5e5, "text_config": part}
    assert read(whole) == read(part)
    part = {"model_type": "paddleocr_vl_text"}
    whole = {"model_type": "paddleocr_vl", "use_3d_rope": True, "text_config": part}
    assert read(whole) == read(part)
    dbrx = {"model_type": "dbrx", "d_model": 6144, "attn_config": {"rope_theta": 5e5}}
    assert read(dbrx).head_dim == 384  # the base is where its row says


PART = {"model_type": "llama", "head_dim": 64, "num_attention_heads": 4, "rope_theta": 5e5}


@pytest.mark.parametrize("model_type", ["llava", "mystery", None])
def test_a_key_beside_the_language_model_is_read_there_or_refused(model_type):
    whole = {"model_type": model_type, "text_config": PART}
    assert read(whole, {"rope_theta": 5e5}) == read(whole) == read(PART)
    with pytest.raises(ValueError, match=r"`rope_theta` is 10000.0; it must be in `text_config`"):
        read(whole, {"rope_theta": 1e4})
    with pytest.raises(ValueError, match=r"`mrope_section` is .*; it must be in `text_config`"):
        read(whole, {"mrope_section": [8, 12, 12]})


def test_the_keys_of_bases_and_shares_have_names_of_rotations():
    tables = [keys for row in rows() for keys in row.top_level.values()]
    own = [row.names for row in rows()]
    found = {key for table in tables for key in table.values()} - {""}
    found |= {names[key] for names in own for key in ("rope_theta",) if key in names}
    assert len(found) > 12
    assert [key for key in found if not is_rotation_key(key)] == []


def test_the_first_qwen_has_two_names_for_each_width():
    names = {"hidden_size": "n_embd", "num_attention_heads": "n_head", "head_dim": "kv_channels"}
    keys = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
    own = {names[key]: value for key, value in keys.items()}
    assert read({"model_type": "qwen"}, own) == read({"model_type": "qwen"}, keys)


def test_keys_that_a_models_code_ignores_stand_in_its_row():
    facts = model_facts("chatglm")
    assert facts is not None
    assert "original_rope" in facts.ignored
