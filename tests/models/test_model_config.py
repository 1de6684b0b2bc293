"""`Model` besides the rotation: numbers of heads by layer, and facts of attention."""

import pytest

from rope_cpu.models import reader

GEMMA4 = {"model_type": "gemma4_text", "num_attention_heads": 16, "num_key_value_heads": 8}
FALCON_40B = {
    "model_type": "falcon",
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_kv_heads": 8,
}
MIMO = {"model_type": "mimo_v2_flash", "num_attention_heads": 64, "num_key_value_heads": 4}
LAGUNA = {
    "model_type": "laguna",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "num_attention_heads": 48,
    "num_attention_heads_per_layer": [48, 64, 64],
    "num_key_value_heads": 8,
}
LLAMA = {"model_type": "llama", "hidden_size": 64}


@pytest.mark.parametrize(
    ("config", "layer_type", "heads"),
    [
        (LLAMA | {"num_attention_heads": 4}, None, (4, 4)),
        (LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 2}, None, (4, 2)),
        ({"model_type": "mistral"}, None, (32, 8)),  # the defaults of its class
        (GEMMA4 | {"num_global_key_value_heads": 2}, "full_attention", (16, 2)),
        (GEMMA4 | {"num_global_key_value_heads": 2}, "sliding_attention", (16, 8)),
        (GEMMA4 | {"num_global_key_value_heads": None}, "full_attention", (16, 8)),
        (MIMO | {"swa_num_key_value_heads": 8}, "sliding_attention", (64, 8)),
        (MIMO | {"swa_num_key_value_heads": 8}, "full_attention", (64, 4)),
        (LAGUNA, "full_attention", (48, 8)),
        (LAGUNA, "sliding_attention", (64, 8)),
        ({"model_type": "deepseek_v3", "num_attention_heads": 16}, None, (16, 1)),
        # Every fourth layer is not rotated.
        ({"model_type": "smollm3", "num_attention_heads": [8, 8, 8, 4] * 9}, None, (8, 4)),
    ],
)
def test_heads(config, layer_type, heads):
    assert reader.read(config).heads(layer_type) == heads


def test_heads_that_no_key_has():
    with pytest.raises(TypeError, match="`num_attention_heads` is missing"):
        reader.read({"model_type": "mystery", "rope_theta": 1e4}).heads()


def test_heads_that_differ_between_layers_are_no_one_number():
    with pytest.raises(ValueError, match=r"whose num_attention_heads are \[48, 64\]"):
        reader.read(LAGUNA | {"layer_types": ["full_attention"] * 3}).heads()


def test_heads_of_a_layer():
    openelm = {"model_type": "openelm", "head_dim": 64, "num_transformer_layers": 3}
    openelm |= {"num_query_heads": [12, 12, 16], "num_kv_heads": [3, 4, 4]}
    config = reader.read(openelm)
    assert [config.heads(layer=layer) for layer in range(3)] == [(12, 3), (12, 4), (16, 4)]
    with pytest.raises(ValueError, match=r"num_attention_heads are \[12, 16\]; .*give `layer`"):
        config.heads()
    assert reader.read(LAGUNA).heads(layer=1) == (64, 8)
    gemma = reader.read(GEMMA4 | {"num_global_key_value_heads": 2})
    assert [gemma.heads(layer=layer)[1] for layer in range(6)] == [8, 8, 8, 8, 8, 2]


def nemotron_nas(*groups):
    """Return a config whose layers have these numbers of query heads for a key head."""
    attentions = [{"n_heads_in_group": group, "no_op": group is None} for group in groups]
    return {
        "model_type": "nemotron-nas",
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "num_hidden_layers": len(groups),
        "rope_theta": 5e5,
        "block_configs": [{"attention": attention, "ffn": {}} for attention in attentions],
    }


def test_blocks_with_their_own_heads():
    config = reader.read(nemotron_nas(8, None, 8))
    assert config.heads() == (64, 8)
    assert config.spec(layer=2).head_dim == 128
    with pytest.raises(ValueError, match="`layer` is 1; it must select a layer that is rotated"):
        config.spec(layer=1)


def test_blocks_whose_key_heads_differ_have_no_one_number():
    with pytest.raises(ValueError, match=r"whose num_key_value_heads are \[8, 4\]"):
        reader.read(nemotron_nas(8, 16)).heads()


def test_blocks_replaced_by_a_linear_layer_are_not_rotated():
    config = nemotron_nas(8)
    config["block_configs"][0]["attention"]["replace_with_linear"] = True
    with pytest.raises(ValueError, match="select a layer that is rotated"):
        reader.read(config).spec()


@pytest.mark.parametrize(
    ("block_configs", "error", "text"),
    [
        (3, TypeError, "`block_configs` is 3; it must be a list"),
        (None, TypeError, "`block_configs` is None; it must be a list"),
        ([3], TypeError, "`block_configs` is 3; it must hold objects"),
        ([{"attention": {}}], TypeError, "`n_heads_in_group` is None"),
        ([{"attention": {"n_heads_in_group": 0}}], ValueError, "`n_heads_in_group` is 0"),
    ],
)
def test_malformed_blocks(block_configs, error, text):
    with pytest.raises(error, match=text):
        reader.read(nemotron_nas(8) | {"block_configs": block_configs})


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "eurobert"}, False),
        ({"model_type": "roformer"}, False),
        ({"model_type": "roformer", "is_decoder": True}, True),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, False),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "vision"}, True),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, False),
    ],
)
def test_attention_is_causal_or_not(config, causal):
    assert reader.read(config).attention.causal is causal


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({"model_type": "falcon", "num_attention_heads": 71, "multi_query": True}, 1),
        (FALCON_40B, 8),
        ({"model_type": "falcon", "num_attention_heads": 71, "multi_query": False}, 71),
        ({"model_type": "RefinedWeb", "n_head": 128, "n_head_kv": 8}, 8),
        ({"model_type": "chatglm", "multi_query_group_num": 2}, 2),
        ({"model_type": "dbrx", "n_heads": 48, "attn_config": {"kv_n_heads": 12}}, 12),
        ({"model_type": "hf_olmo", "n_heads": 32, "multi_query_attention": True}, 1),
        # As the class has it: the number of the query heads.
        ({"model_type": "mistral", "num_key_value_heads": None}, 32),
    ],
)
def test_key_heads_under_names_of_their_own(config, kv_heads):
    assert reader.read(config).heads()[1] == kv_heads


def test_a_model_type_like_another_has_its_attention():
    assert reader.read({"model_type": "qwen3_tts_talker"}).attention.qk_norm == "before"
    minimax = reader.read({"model_type": "minimax_m3"})
    assert minimax.attention.other == "an indexer chooses the keys"


def test_attention_of_images_is_not_known():
    config = {"_class_name": "FluxTransformer2DModel", "attention_head_dim": 128}
    assert "images" in reader.read(config).attention.other


@pytest.mark.parametrize(
    ("model_type", "facts"),
    [
        ("gemma2", {"window": 4096, "softcap": 50.0, "scale": 256**-0.5}),
        ("granite", {"scale": 1.0}),
        ("llama4_text", {"chunk": 8192}),
        ("gemma3n_text", {"shared_layers": 15}),
        ("recurrent_gemma", {"window": 2048}),
        ("minicpm3", {"latent": True}),
    ],
)
def test_attention_where_a_config_is_silent_is_that_of_its_model_type(model_type, facts):
    attention = reader.read({"model_type": model_type}).attention
    assert {name: getattr(attention, name) for name in facts} == facts


def test_a_window_that_its_model_type_does_not_use():
    assert reader.read({"model_type": "qwen3", "sliding_window": 128}).attention.window is None
    assert reader.read({"model_type": "qwen3", "use_sliding_window": True}).attention.window == 4096


@pytest.mark.parametrize(
    ("model_type", "key", "name"),
    [
        ("mistral", "sliding_window", "window"),
        ("llama4_text", "attention_chunk_size", "chunk"),
        ("gemma2", "attn_logit_softcapping", "softcap"),
        ("gemma2", "query_pre_attn_scalar", "scale"),
        ("granite", "attention_multiplier", "scale"),
        ("gemma3n_text", "num_kv_shared_layers", "shared_layers"),
    ],
)
def test_a_null_is_none_whatever_the_model_type_has(model_type, key, name):
    assert getattr(reader.read({"model_type": model_type, key: None}).attention, name) in (None, 0)
